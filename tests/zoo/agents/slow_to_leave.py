"""Needs a while to put its things away when its client leaves, and says when it has."""

import sys
import time

from tests.zoo.wire import complain, end, prompted, say

prompt = prompted()
say("done")
end(prompt)
while sys.stdin.readline():
    pass
time.sleep(0.5)
complain("history saved")
