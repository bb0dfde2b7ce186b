"""Takes a prompt for a reason to leave."""

import sys

from tests.zoo.wire import prompted

prompted()
sys.exit(0)
