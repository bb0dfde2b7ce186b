"""What a transport tells, kept; and a peer for either side that says what a test tells it, and no more.

Responsible for keeping what came, for waiting until it came, and for saying well what did not. Reads
and writes JSON with the standard library, so that a fault of our own codec cannot hide here. Leaves
moving frames to whatever transport it is given, and the handshake to `_pairs`.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from antiphon import UNSET
from antiphon.core import Fault
from antiphon.testing._virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import EllipsisType, TracebackType

    from antiphon.transports import Transport

    Message = dict[str, Any]

__all__ = ["RawPeer", "Recorder"]

#: Turns of the loop in which what is to happen at once has happened.
_TURNS = 20
#: The longest text of a frame in a failure's message.
_SHOWN = 600
#: Frames shown in a failure's message, from the last.
_FRAMES_SHOWN = 12


class Recorder:
    """A receiver for a transport under test: keeps what it is told, and checks the laws of `Transport`.

    Every wait has a bound and ends in an `AssertionError` that shows what did come. A transport that
    breaks a law gets an `AssertionError` from the call that breaks it, and so does whoever waits then
    or later, since transports call from the loop, where nobody may look.

    Args:
        bound: how long anything is waited for, in seconds of the loop.
        on_frames: called inside a delivery, after its frames were kept.

    Attributes:
        received: frames and faults, in order.
        batches: the same, as they arrived together.
        ended: set when the other side will send nothing more.
        lost: set when the link is gone.
        error: why it is gone; None for an orderly end.
        room: "pause" and "resume", as the transport asked.
    """

    def __init__(
        self,
        bound: float = 10.0,
        on_frames: Callable[[list[bytes | Fault]], object] | None = None,
    ) -> None:
        self.bound = bound
        self.on_frames: Callable[[list[bytes | Fault]], object] | None = on_frames
        self.received: list[bytes | Fault] = []
        self.batches: list[list[bytes | Fault]] = []
        self.ended = asyncio.Event()
        self.lost = asyncio.Event()
        self.error: Exception | None = None
        self.room: list[str] = []
        self._changed = asyncio.Event()
        self._broken: str | None = None

    # ------------------------------------------------------------------ waiting for what comes

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true; it is asked again whenever something came."""
        __tracebackhide__ = True  # pytest then shows the line of the test
        await self._until(condition, "the condition did not come true")

    async def have(self, count: int) -> list[bytes | Fault]:
        """Wait for `count` frames and faults in all; return all that came."""
        __tracebackhide__ = True
        await self._until(lambda: len(self.received) >= count, f"{count} frames did not come")
        return self.received

    async def closed(self) -> None:
        """Wait until the link is gone."""
        __tracebackhide__ = True
        await self._until(self.lost.is_set, "the link was not closed")

    # ------------------------------------------------------------------ Receiver

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        """Keep frames."""
        self._law(not self.lost.is_set(), "frames after the link was lost")
        self._law(not self.ended.is_set(), "frames after the end of input")
        self._law(bool(frames), "a delivery without frames")
        self.batches.append(frames)
        self.received += frames
        self._keep(frames)
        self._changed.set()
        if self.on_frames is not None:
            self.on_frames(frames)

    def input_ended(self) -> None:
        """Note the end of what the other side sends."""
        self._law(not self.lost.is_set(), "the end of input after the link was lost")
        self._law(not self.ended.is_set(), "a second end of input")
        self.ended.set()
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the link."""
        self._law(not self.lost.is_set(), "a second loss of the link")
        self.error = error
        self.ended.set()
        self.lost.set()
        self._changed.set()

    def pause_writing(self) -> None:
        """Note it; what a test sends is sent all the same."""
        self._law(not self.lost.is_set(), "pause_writing after the link was lost")
        self.room.append("pause")
        self._changed.set()

    def resume_writing(self) -> None:
        """Note it."""
        self._law(not self.lost.is_set(), "resume_writing after the link was lost")
        self.room.append("resume")
        self._changed.set()

    def _keep(self, frames: list[bytes | Fault]) -> None:
        """Do more with frames."""

    def _law(self, kept: bool, otherwise: str) -> None:  # noqa: FBT001  (as in assert)
        if not kept:
            self._broken = self._broken or f"the transport broke a law of Transport: {otherwise}"
            self._changed.set()
            raise AssertionError(self._broken)

    def _check_laws(self) -> None:
        __tracebackhide__ = True
        if self._broken is not None:
            raise AssertionError(self._broken)

    async def _until(
        self, condition: Callable[[], object], otherwise: str, last: asyncio.Event | None = None
    ) -> None:
        """Wait until `condition` holds, the bound is over, or what `last` stands for was last."""
        if last is None:
            last = self.lost
        __tracebackhide__ = True
        try:
            async with asyncio.timeout(self.bound):
                while True:
                    self._check_laws()
                    if condition():
                        return
                    if last.is_set():
                        break
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(self._report(f"{otherwise} within {self.bound:g} s")) from None
        raise AssertionError(self._report(f"{otherwise} before the other side ended"))

    def _report(self, reason: str) -> str:
        lines = [reason]
        if self.lost.is_set():
            lines.append(
                f"the link is lost: {self.error!r}" if self.error else "the link is closed"
            )
        if not self.received:
            return "; ".join((*lines, "nothing at all came"))
        last = deque(self.received, _FRAMES_SHOWN)
        lines.append(f"{len(self.received)} frames came; the last:")
        return "\n  ".join(("; ".join(lines), *map(_show, last)))


class RawPeer(Recorder):
    """The far end of a link: it may say anything, legal or not, and answers nothing by itself.

    Satisfies `transports.Receiver`. Start it with `await raw.start()` or `async with`, or get a started
    one from `raw_agent`, `raw_client` or `unshaken_client`.

    What `wait`, `answer_to`, `ask` and `expect` return counts as expected; `expect` and
    `expect_nothing` are about the frames that none of them has returned. The other ways to look leave
    no trace.

    Args:
        transport: its end of a link, of `memory_pair()`, of `byte_pair()`, or any other.
        bound: how long anything is waited for, in seconds of the loop.

    Attributes:
        transport: as given.
        frames: every JSON object that came, decoded, in order.
        raw_frames: every frame that came, as it came.
        faults: what stands for frames that the transport refused.
    """

    def __init__(self, transport: Transport, bound: float = 10.0) -> None:
        super().__init__(bound)
        self.transport = transport
        self.frames: list[Message] = []
        self.raw_frames: list[bytes] = []
        self.faults: list[Fault] = []
        #: What was not expected yet: objects by their identity, anything else by a number below 0.
        self._open: OrderedDict[int, Message | bytes | Fault] = OrderedDict()
        self._odd = 0
        self._life = 0  # goes up with each `forget`
        self._asked = 0

    async def start(self) -> None:
        """Begin to receive. Raises what the transport's `start` raises."""
        await self.transport.start(self)

    async def aclose(self) -> None:
        """Close this end. Idempotent.

        Raises:
            AssertionError: the transport has broken a law of `Transport` before.
        """
        await self.transport.aclose()
        self._check_laws()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------ saying something

    def send(self, *messages: Any) -> None:
        """Send frames in one write: `bytes` as they are, anything else as JSON."""
        frames = [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
        self.transport.send(frames)

    def send_bytes(self, data: bytes) -> None:
        """Send any bytes, not framed: half a frame, two in one, line ends of any kind.

        Raises:
            TypeError: the transport has no bytes below its frames; `byte_pair` has.
        """
        write = getattr(self.transport, "send_bytes", None)
        if write is None:
            msg = f"a {self.transport.describe()} transport moves frames, not bytes: use byte_pair"
            raise TypeError(msg)
        write(data)

    def answer(self, request: Message, result: Any) -> None:
        """Answer a request that came."""
        self.send({"jsonrpc": "2.0", "id": request["id"], "result": result})

    def refuse(self, request: Message, code: int, message: str = "no", **more: Any) -> None:
        """Answer a request that came with an error; `more` are further members of it."""
        error = {"code": code, "message": message, **more}
        self.send({"jsonrpc": "2.0", "id": request["id"], "error": error})

    @staticmethod
    def request(id_: Any, method: str, params: Any = UNSET) -> Message:
        """Make a request, to be sent; without `params` it has none."""
        request = {"jsonrpc": "2.0", "id": id_, "method": method}
        return request if params is UNSET else {**request, "params": params}

    @staticmethod
    def notification(method: str, params: Any = UNSET) -> Message:
        """Make a notification, to be sent; without `params` it has none."""
        notification = {"jsonrpc": "2.0", "method": method}
        return notification if params is UNSET else {**notification, "params": params}

    @classmethod
    def update(cls, session_id: str, text: str) -> Message:
        """Make the notification of a chunk of the agent's message, to be sent."""
        content = {"type": "text", "text": text}
        body = {"sessionUpdate": "agent_message_chunk", "content": content}
        return cls.notification("session/update", {"sessionId": session_id, "update": body})

    # ------------------------------------------------------------------ looking at what came

    def sent(self, method: str | None) -> list[Message]:
        """Requests and notifications of this method that came so far; None: responses."""
        return [frame for frame in self.frames if frame.get("method") == method]

    def responses(self, id_: Any) -> list[Message]:
        """Responses with exactly this id that came so far; 1 is neither "1" nor 1.0."""
        return [frame for frame in self.frames if _answers(frame, id_)]

    def forget(self) -> None:
        """Forget all that came so far, as if the link began here."""
        for kept in (self.frames, self.raw_frames, self.faults, self.received, self.batches):
            kept.clear()
        self._open.clear()
        self._life += 1

    # ------------------------------------------------------------------ waiting for what comes

    async def wait(self, method: str | None, count: int = 1) -> Message:
        """Wait for the `count`-th request or notification of this method; None: response."""
        __tracebackhide__ = True
        what = f"a response (number {count})" if method is None else f"{method} (number {count})"
        return await self._find(lambda frame: frame.get("method") == method, count, what)

    async def answer_to(self, id_: Any) -> Message:
        """Wait for the first response with exactly this id."""
        __tracebackhide__ = True
        what = f"a response to id {id_!r}"
        return await self._find(lambda frame: _answers(frame, id_), 1, what)

    async def ask(self, method: str, params: Any = UNSET, id_: Any = None) -> Message:
        """Send a request, with an id that was not used yet, and wait for its response."""
        __tracebackhide__ = True
        if id_ is None:
            self._asked += 1
            id_ = f"ask-{self._asked}"
        self.send(self.request(id_, method, params))
        return await self.answer_to(id_)

    async def round_trip(self) -> None:
        """Once this returns, the other side has read everything that was sent before.

        It asks for a method that nobody serves.
        """
        __tracebackhide__ = True
        answer = await self.ask("_test/nobody_serves_this")
        assert "error" in answer, f"somebody does serve it: {_show(answer)}"

    async def expect(self, method: str | EllipsisType | None = ..., **members: Any) -> Message:
        """Wait for the next frame that was not expected yet; it must match what is said here.

        Of an object only the members that are named must match, also further down; a list must match
        item for item; `...` matches whatever is there, `antiphon.UNSET` only what is absent. `True`
        and `1`, `1` and `1.0` differ.

        Args:
            method: of a request or notification; None: it must be a response.
            members: of the frame, such as `id`, `params`, `result`, `error`.

        Raises:
            AssertionError: it does not match, or nothing came; the message shows frame and difference.
        """
        __tracebackhide__ = True  # pytest then shows the line of the test
        wanted = {} if method is ... else {"method": UNSET if method is None else method}
        wanted.update(members)
        if not await self._await_next():
            raise AssertionError(self._report(f"nothing came; expected {_show(wanted)}"))
        frame = next(iter(self._open.values()))
        if not isinstance(frame, dict):
            msg = f"expected {_show(wanted)}; what came is no JSON object: {_show(frame)}"
            raise AssertionError(msg)  # noqa: TRY004  (it is the other side that is wrong)
        if differences := list(_differences(wanted, frame, "")):
            lines = [
                "the next frame is another one than was expected",
                f"  expected: {_show(wanted)}",
                f"  came:     {_show(frame)}",
                *(f"  {difference}" for difference in differences),
            ]
            raise AssertionError("\n".join(lines))
        del self._open[id(frame)]
        return frame

    async def expect_nothing(self, seconds: float = 0.0) -> None:
        """Check that no frame came that was not expected, once the loop has nothing left to do.

        Args:
            seconds: wait so long for one that might still come, in seconds of the loop. On a virtual
                loop that takes no time.

        Raises:
            AssertionError: one came; the message shows it.
        """
        __tracebackhide__ = True
        if isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
            # The least time is more than all that can happen without it.
            await asyncio.sleep(max(seconds, 1e-6))
        else:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if seconds:
                await asyncio.sleep(seconds)
        self._check_laws()
        if self._open:
            left = map(_show, self._open.values())
            raise AssertionError("\n  ".join(("frames came that nobody expected:", *left)))

    # ------------------------------------------------------------------ how it is done

    def _keep(self, frames: list[bytes | Fault]) -> None:
        for frame in frames:
            if isinstance(frame, Fault):
                self.faults.append(frame)
            else:
                self.raw_frames.append(frame)
                try:
                    message: Any = json.loads(frame)
                except (ValueError, RecursionError):
                    message = None
                if _is_object(message):
                    self.frames.append(message)
                    self._open[id(message)] = message
                    continue
            self._odd += 1
            self._open[-self._odd] = frame

    async def _find(self, wanted: Callable[[Message], bool], count: int, what: str) -> Message:
        """Wait for the `count`-th frame that is wanted; each is looked at once."""
        __tracebackhide__ = True
        found: list[Message] = []
        looked, life = 0, self._life

        def look() -> bool:
            nonlocal looked, life
            if life != self._life:
                looked, life = 0, self._life
            for frame in islice(self.frames, looked, None):
                looked += 1
                if wanted(frame):
                    found.append(frame)
                    if len(found) == count:
                        return True
            return False

        await self._until(look, f"{what} did not come", self.ended)
        for frame in found:
            self._open.pop(id(frame), None)
        return found[-1]

    async def _await_next(self) -> bool:
        try:
            await self._until(lambda: self._open, "nothing came", self.ended)
        except AssertionError:
            self._check_laws()
            return False
        return True


def _answers(frame: Message, id_: Any) -> bool:
    # Python's 1, 1.0 and True are equal; ids of those types are not.
    return (
        "method" not in frame
        and "id" in frame
        and type(frame["id"]) is type(id_)
        and frame["id"] == id_
    )


def _show(value: Any) -> str:
    if isinstance(value, (bytes, Fault)):
        text = repr(value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=_show_special)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def _show_special(value: Any) -> str:
    return "(absent)" if value is UNSET else "(anything)" if value is ... else repr(value)


def _differences(wanted: Any, came: Any, where: str) -> Iterator[str]:
    """Where `came` does not match, one line each."""
    if wanted is ...:
        return
    if _is_object(wanted) and _is_object(came):
        for name, value in wanted.items():
            place = f"{where}.{name}" if where else name
            if value is UNSET:
                if name in came:
                    yield f"{place}: came {_show(came[name])}, expected to be absent"
            elif name not in came:
                yield f"{place}: absent, expected {_show(value)}"
            else:
                yield from _differences(value, came[name], place)
    elif _is_array(wanted) and _is_array(came):
        if len(wanted) != len(came):
            yield f"{where}: {len(came)} items came, expected {len(wanted)}"
        for index, (one, other) in enumerate(zip(wanted, came, strict=False)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif type(wanted) is not type(came) or wanted != came:
        yield f"{where}: came {_show(came)}, expected {_show(wanted)}"


def _is_object(value: Any) -> TypeGuard[Message]:
    return isinstance(value, dict)


def _is_array(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)
