"""Writes NUL between its frames, and once inside of one."""

from tests.zoo.wire import chunk, end, prompted, say, until_the_client_leaves, write

prompt = prompted()
write(bytes(1000) + b"\n")
write(chunk("lost").replace(b"lost", b"lo\0st"))
say("done")
end(prompt)
until_the_client_leaves()
