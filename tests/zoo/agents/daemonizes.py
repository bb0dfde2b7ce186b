"""Leaves a daemon behind that holds all three pipes, and is a good agent otherwise."""

import os
import time

from tests.zoo.wire import end, prompted, say, until_the_client_leaves

prompt = prompted()
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(60)
os.wait()
say("done")
end(prompt)
until_the_client_leaves()
