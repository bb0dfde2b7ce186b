"""Goes on with its turn for ever, whatever it is told."""

from tests.zoo.wire import prompted, say, until_the_client_leaves

prompted()
say("working")
until_the_client_leaves()
