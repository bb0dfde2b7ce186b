"""One terminal: a command that runs or has run, and the end of what it has written.

Responsible for reading all that comes, keeping the last of it as text, seeing the exit, and ending the
command once, whoever asks. Which terminals there are, and who may use them, is left to `_terminals`,
the command itself to `_launched` and `_process`.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import signal
from typing import TYPE_CHECKING, Final

from antiphon._descriptors import open_reader
from antiphon._errors import ENDING

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.services._launched import Command

__all__ = ["OutputTail", "Terminal", "signal_name"]

logger = logging.getLogger("antiphon.services")

# What the largest pipe holds on Linux without a privilege: so much can be left when a command ends.
_PIPE_BYTES: Final = 1 << 20


class Terminal:
    """One command and the end of its output."""

    def __init__(self, command: Command, most: int, kill_grace: float) -> None:
        self.output = OutputTail(most)
        self.exited = asyncio.Event()
        self.closed: Callable[[], None] | None = None
        self.show: Callable[[str], object] | None = None
        self._command = command
        self._kill_grace = kill_grace
        self._ending: asyncio.Task[object] | None = None
        self._release: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        fd = command.output
        # Our end of a pipe of ours. Emptying it at the exit may come between the loop's seeing
        # that it is readable and its reading, which must not wait for whoever still holds it.
        os.set_blocking(fd, False)
        self._reader = open_reader(
            loop, fd, self._received, lambda _error: self._output_ended(), own=True
        )
        # Reading never pauses: output is thrown away rather than the command held up.
        self._reader.resume()
        command.on_exit(self._exit_seen)

    def _received(self, data: bytes) -> None:
        if self._command.silence is not None:
            self._command.silence.shown()
        self._show(self.output.add(data))

    def _output_ended(self) -> None:
        self._show(self.output.end())

    def _show(self, text: str) -> None:
        if text and self.show is not None:
            try:
                self.show(text)
            except ENDING:
                raise
            except BaseException:
                self.show = None  # it may fail each time, and a traceback costs more than the text
                logger.exception("on_output failed, and is no longer told of this terminal")

    def expire_after(self, seconds: float, count: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds, count)

    def _expire(self, seconds: float, count: Callable[[], None]) -> None:
        if self._ending is None:
            if not self.exited.is_set():
                count()
                logger.warning("a command of the agent is ended: it has run for %g s", seconds)
            # What a command has left behind has no longer a life than itself.
            self._ended()

    def _ended(self) -> asyncio.Task[object]:
        if self._ending is None:
            ending = self._command.end(self._kill_grace)
            self._ending = asyncio.get_running_loop().create_task(ending)
        return self._ending

    def _exit_seen(self) -> None:
        if self._command.silence is not None:
            self._command.silence.close()
        # What the command itself has written is in the pipe by now. What its children, which may
        # hold the pipe for ever, write later comes as it comes.
        self._reader.drain(_PIPE_BYTES)
        self.exited.set()

    def status(self) -> tuple[int | None, str | None]:
        """Exit code or signal name, never both."""
        code = self._command.returncode
        if code is None:
            return None, None
        return (code, None) if code >= 0 else (None, signal_name(-code))

    async def end(self) -> None:
        # Nobody's cancellation may stop it half-way.
        await asyncio.shield(self._ended())

    async def release(self) -> None:
        if self._release is None:
            self._release = asyncio.get_running_loop().create_task(self._end_and_close())
        await asyncio.shield(self._release)

    async def _end_and_close(self) -> None:
        try:
            await self.end()
        finally:
            self._close()

    def _close(self) -> None:
        self._reader.close()
        self._output_ended()
        if self._command.silence is not None:
            self._command.silence.close()
        if self._timer is not None:
            self._timer.cancel()
        # Set already, unless the kernel does not let go of the process.
        self.exited.set()
        if self.closed is not None:
            self.closed()


class OutputTail:
    """The end of a byte stream as text: at most `most` bytes of UTF-8, cut between characters."""

    def __init__(self, most: int) -> None:
        self.truncated = False
        self._most = most
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = bytearray()

    def add(self, data: bytes) -> str:
        """Take the next piece, however it is cut; the text that has become whole."""
        return self._keep(self._decoder.decode(data))

    def end(self) -> str:
        """The stream has ended: half a character will not become whole any more. Idempotent."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._keep(text)

    def _keep(self, text: str) -> str:
        kept = self._kept
        kept += text.encode()
        cut = len(kept) - self._most
        if cut > 0:
            self.truncated = True
            while cut < len(kept) and kept[cut] & 0xC0 == 0x80:
                cut += 1
            del kept[:cut]  # moves nothing: a bytearray can begin later
        return text

    def text(self) -> str:
        """What is kept."""
        return self._kept.decode()


def signal_name(number: int) -> str:
    """The name of a signal: "SIGKILL", "SIGRTMIN+2"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", 0)
        return f"SIGRTMIN+{number - first}" if first and number > first else f"SIG{number}"
