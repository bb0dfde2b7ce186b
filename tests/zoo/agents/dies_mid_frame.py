"""Dies in the middle of a frame."""

import os

from tests.zoo.wire import chunk, complain, prompted, say, write

prompted()
say("whole")
complain("out of memory")
write(chunk("half")[:60])
os._exit(9)
