"""Sees what is published, and outlives whoever publishes: `journal_subscriber.py FILE`, a process.

It listens on the socket `s` of its working directory and says `ready`. Of one connection after the
other it reads frames until it ends, and appends those that came whole to FILE. It says `began` with
the first bytes of a connection, and the number of frames at its end.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path


def say(word: object) -> None:
    """Tell who started this."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def frames_of(stream: socket.socket) -> list[bytes]:
    """All frames of one connection; a part of one, at the end, was never seen."""
    data = bytearray()
    while piece := stream.recv(1 << 16):
        if not data:
            say("began")
        data += piece
    return bytes(data).split(b"\n")[:-1]


def main(file: str) -> None:
    """Serve until killed."""
    with socket.socket(socket.AF_UNIX) as listening, Path(file).open("ab", buffering=0) as seen:
        listening.bind("s")
        listening.listen()
        say("ready")
        while True:
            stream, _ = listening.accept()
            with stream:
                frames = frames_of(stream)
            seen.write(b"".join(frame + b"\n" for frame in frames))
            say(len(frames))


if __name__ == "__main__":
    main(sys.argv[1])
