"""Sets the title of a terminal in front of its first answer, in the same line."""

from tests.zoo.wire import frame, request, until_the_client_leaves, write

id_ = request("initialize")
write(b"\x1b]0;my agent\x07" + frame(id=id_, result={"protocolVersion": 1}))
until_the_client_leaves()
