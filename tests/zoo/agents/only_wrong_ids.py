"""Answers, but never what was asked."""

from tests.zoo.wire import answer, receive

while True:
    answer(str(receive().get("id")) + "x", {"protocolVersion": 1})
