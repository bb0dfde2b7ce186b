"""Reads nothing once its session is open, so that the pipe to it fills."""

import time

from tests.zoo.wire import initialize, open_session

initialize()
open_session()
while True:
    time.sleep(60)
