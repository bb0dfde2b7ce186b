"""Says on standard output, in plain text, why it leaves in the middle of its turn."""

import sys

from tests.zoo.wire import prompted, say, write

write(b"Welcome!\n")
prompted()
say("working")
write(b"Error: quota exceeded.\nTry again tomorrow.\n")
sys.exit(1)
