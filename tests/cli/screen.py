"""Runs the command on a terminal of its own, as a person would, and types."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from typing import Self

from tests.cli.command import BOUND, COMMAND, environment, left_by

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")


class Screen:
    """A terminal of 100 columns with the command on it; everything it wrote is kept in `text`."""

    def __init__(self, *arguments: str, term: str = "xterm-256color", **env: str) -> None:
        self._marked = environment(TERM=term, COLUMNS="100", LINES="40", **env)
        self.raw = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        try:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=self._marked,
                start_new_session=True,
                # Ctrl-C is a signal only on a controlling terminal.
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            )
        finally:
            os.close(theirs)

    @property
    def text(self) -> str:
        """What was written so far, without colours and cursor movements."""
        return _ESCAPES.sub("", self.raw.decode("utf-8", "replace")).replace("\r\n", "\n")

    def read_until(self, words: str) -> None:
        """Read until these words were written; bounded."""
        deadline = time.monotonic() + BOUND
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self._read(0.2) or words in self.text, self.text

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + BOUND
        while self._read(0.2):
            assert time.monotonic() < deadline, self.text
        code = self.process.wait(BOUND)
        assert not left_by(self._marked)
        return code

    def _read(self, seconds: float) -> bool:
        """Take what is there; False at the end."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        # The end of a terminal is an error on Linux.
        with contextlib.suppress(OSError):
            data = os.read(self._ours, 65536)
            self.raw += data
            return bool(data)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
