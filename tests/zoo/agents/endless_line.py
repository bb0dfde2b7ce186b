"""Writes 200 KiB that are no protocol, without a line end, before its first answer."""

from tests.zoo.wire import initialize, until_the_client_leaves, write

write(b"loading " + b"." * 200_000)
initialize()
until_the_client_leaves()
