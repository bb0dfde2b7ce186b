"""Stops itself in its turn, as a debugger or Ctrl-Z would."""

import os
import signal

from tests.zoo.wire import prompted, say

prompted()
say("whole")
os.kill(os.getpid(), signal.SIGSTOP)
