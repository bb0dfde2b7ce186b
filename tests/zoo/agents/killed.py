"""Is killed in its turn, as the kernel does when memory is short."""

import os
import signal

from tests.zoo.wire import prompted, say

prompted()
say("whole")
os.kill(os.getpid(), signal.SIGKILL)
