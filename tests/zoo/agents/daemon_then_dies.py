"""Dies in its turn, while a daemon of its own holds all three pipes."""

import os
import time

from tests.zoo.wire import prompted, say

prompted()
left, ready = os.pipe()
if not os.fork():
    os.setsid()
    os.write(ready, b".")
    time.sleep(60)
os.read(left, 1)
say("now")
os._exit(7)
