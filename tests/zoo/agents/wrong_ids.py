"""Answers what nobody asked, and what was asked only after that."""

from tests.zoo.wire import answer, request, say, send, until_the_client_leaves

for method, result in (
    ("initialize", {"protocolVersion": 1}),
    ("session/new", {"sessionId": "s-1"}),
    ("session/prompt", {"stopReason": "end_turn"}),
):
    id_ = request(method)
    for wrong in (4711, -1, f"{id_}", str(id_) + "x", None, 1e300, [id_], {"id": id_}, True):
        answer(wrong, {"wrong": True})
        send(id=wrong, error={"code": 1, "message": "wrong"})
    if method == "session/prompt":
        say("done")
    answer(id_, result)
until_the_client_leaves()
