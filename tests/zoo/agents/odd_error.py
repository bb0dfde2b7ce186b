"""Refuses initialize with an error that is none."""

from tests.zoo.wire import request, send, until_the_client_leaves

send(id=request("initialize"), error="no")
until_the_client_leaves()
