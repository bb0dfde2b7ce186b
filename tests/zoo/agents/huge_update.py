"""Sends an update of 20 MiB between two small ones."""

from tests.zoo.wire import end, prompted, say, until_the_client_leaves

prompt = prompted()
say("do")
say("x" * (20 << 20))
say("ne")
end(prompt)
until_the_client_leaves()
