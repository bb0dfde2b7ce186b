"""Ends with nothing but force: neither the end of its input nor TERM."""

import signal
import time

from tests.zoo.wire import end, prompted, say

signal.signal(signal.SIGTERM, signal.SIG_IGN)
prompt = prompted()
say("done")
end(prompt)
while True:
    time.sleep(60)
