"""Answers initialize with a list."""

from tests.zoo.wire import answer, request, until_the_client_leaves

answer(request("initialize"), [1, 2])
until_the_client_leaves()
