"""Answers everything twice, and differently."""

from tests.zoo.wire import answer, request, say, send, until_the_client_leaves

id_ = request("initialize")
answer(id_, {"protocolVersion": 1})
send(id=id_, error={"code": -32603, "message": "on second thought"})
id_ = request("session/new")
answer(id_, {"sessionId": "s-1"})
answer(id_, {"sessionId": "s-2"})
id_ = request("session/prompt")
say("done")
answer(id_, {"stopReason": "end_turn"})
answer(id_, {"stopReason": "refusal"})
until_the_client_leaves()
