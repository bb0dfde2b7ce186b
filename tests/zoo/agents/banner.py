"""Greets, sets the title of a terminal and leaves empty lines, each on standard output."""

from tests.zoo.wire import (
    end,
    initialize,
    open_session,
    request,
    say,
    until_the_client_leaves,
    write,
)

write(b"Welcome to the agent!\n\n\x1b]0;agent\x07\n")
initialize()
write(b"[info] loading plug-ins ... {done}\n")
open_session()
prompt = request("session/prompt")
write(b"thinking\r\n")
say("done")
write(b"\x1b[2K\n")
end(prompt)
until_the_client_leaves()
