"""Never waits for what it has started; and a wrapper of it does not either."""

import os

from tests.zoo.wire import end, prompted, say, until_the_client_leaves

prompt = prompted()
for _ in range(20):
    if not os.fork():
        os._exit(0)
say("done")
end(prompt)
until_the_client_leaves()
