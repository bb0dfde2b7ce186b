"""Answers initialize with null."""

from tests.zoo.wire import answer, request, until_the_client_leaves

answer(request("initialize"), None)
until_the_client_leaves()
