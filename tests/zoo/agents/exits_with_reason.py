"""Leaves before it was asked anything, and says why."""

import sys

sys.exit("no API key in the environment")
