"""Writes to standard error as if nobody had to read it: lines, one line without end, no UTF-8."""

import sys

from tests.zoo.wire import answer, end, initialize, request, say, until_the_client_leaves

initialize()
sys.stderr.buffer.write(b"\xff\xfe" * (5 << 19))
session = request("session/new")
sys.stderr.buffer.write(b"x" * (5 << 20))
answer(session, {"sessionId": "s-1"})
prompt = request("session/prompt")
for number in range(100_000):
    sys.stderr.buffer.write(b"line %d\n" % number)
sys.stderr.flush()
say("done")
end(prompt)
until_the_client_leaves()
