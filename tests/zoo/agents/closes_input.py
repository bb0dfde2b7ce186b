"""Closes its input before its turn, and goes on talking until nobody listens."""

import os
import time

from tests.zoo.wire import SESSION, answer, initialize, request, say

initialize()
id_ = request("session/new")
os.close(0)
answer(id_, {"sessionId": SESSION})
try:
    while True:
        say("and another thing")
        time.sleep(0.05)
except BrokenPipeError:
    os._exit(1)
