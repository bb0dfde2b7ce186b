"""Sends updates without end and hears nothing; says when it is made to wait."""

import os
import select

from tests.zoo.wire import chunk, complain, prompted

prompted()
os.set_blocking(1, False)
piece = chunk("x" * 1000) * 20
waits = False
while True:
    rest = piece
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:
            if not select.select([], [1], [], 0.2)[1] and not waits:
                complain("made to wait")
                waits = True
            select.select([], [1], [])
