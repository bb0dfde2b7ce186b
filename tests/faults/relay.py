"""A process between a client of ours and a test: `python relay.py PORT [noisy]`.

What comes on standard input goes to the test over a loopback socket, what the test sends goes to
standard output, byte for byte, so that a test can play an agent that is a real process. A noisy one
writes some kibibytes to standard error whenever something passes.
"""

import os
import socket
import sys
import threading

link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


noise = b"DEBUG \xff noise\n" * 1000 if "noisy" in sys.argv else b""


def complain() -> None:
    left = noise
    while left:
        left = left[os.write(2, left) :]


def up() -> None:
    while data := os.read(0, 1 << 16):
        link.sendall(data)
        complain()
    link.shutdown(socket.SHUT_WR)


threading.Thread(target=up, daemon=True).start()
try:
    while data := link.recv(1 << 16):
        complain()
        while data:
            data = data[os.write(1, data) :]
except (BrokenPipeError, ConnectionResetError):
    pass
