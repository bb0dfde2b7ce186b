"""Draws a screen for a person and waits for keys."""

import time

from tests.zoo.wire import write

write(
    b"\x1b[?1049h\x1b[2J\x1b[H+------------------+\n| What shall I do? |\n+------------------+\n> "
)
time.sleep(60)
