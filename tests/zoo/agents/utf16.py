"""Writes UTF-16, as some consoles and redirections make of text."""

from tests.zoo.wire import frame, request, until_the_client_leaves, write

text = frame(id=request("initialize"), result={"protocolVersion": 1}).decode()
write(b"\xff\xfe" + text.encode("utf-16-le"))
until_the_client_leaves()
