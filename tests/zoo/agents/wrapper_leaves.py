"""A launcher that starts the real agent and is gone; the real one, which holds the pipes, is slow."""

import os
import time

if os.fork():
    os._exit(0)
time.sleep(60)
