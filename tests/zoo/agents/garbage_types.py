"""Answers initialize with the right names and wrong types."""

from tests.zoo.wire import answer, request, until_the_client_leaves

answer(
    request("initialize"), {"protocolVersion": "one", "agentCapabilities": 7, "authMethods": "none"}
)
until_the_client_leaves()
