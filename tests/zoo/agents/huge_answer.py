"""Answers the prompt in 20 MiB."""

from tests.zoo.wire import answer, prompted, say, until_the_client_leaves

prompt = prompted()
say("done")
answer(prompt, {"stopReason": "end_turn", "_meta": {"blob": "x" * (20 << 20)}})
until_the_client_leaves()
