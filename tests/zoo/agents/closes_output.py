"""Closes its output in its turn, and lives on."""

import os
import time

from tests.zoo.wire import prompted, say

prompted()
say("last words")
os.close(1)
while True:
    time.sleep(60)
