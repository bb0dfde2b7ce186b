"""Begins with a byte order mark, and ends its lines as Windows does."""

from tests.zoo.wire import answer, end, frame, request, say, until_the_client_leaves, write

write(
    b"\xef\xbb\xbf" + frame(id=request("initialize"), result={"protocolVersion": 1})[:-1] + b"\r\n"
)
answer(request("session/new"), {"sessionId": "s-1"})
prompt = request("session/prompt")
say("done")
end(prompt)
until_the_client_leaves()
