"""What lets a test see both ends of a connection, and what is asked of its transport.

`Peer` is a raw peer with more words. `PlainSide` stands in for `antiphon.sessions`: it
serves what a test gives it, with plain JSON values for parameters and results. `SpiedTransport` is
a real transport of a memory pair, with a real framer, that writes down what the connection asks of
it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from antiphon import UNSET
from antiphon.core import Fault, Limits, LineFramer, Side
from antiphon.runtime import Connection, Context, InboundCall, NoticeRoute, RequestRoute
from antiphon.schema import encode_checked, loads
from antiphon.testing import RawPeer
from antiphon.transports import MemoryTransport, memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from antiphon._errors import ConnectionClosed
    from antiphon.transports import Receiver

#: How long anything is waited for. What is tested takes milliseconds.
BOUND = 5.0

SIDES: list[Side] = ["agent", "client"]


class Peer(RawPeer):
    """The far end of a link, with words for what these tests say most."""

    def call(self, id_: Any, method: str, params: Any = UNSET) -> None:
        """Send a well-formed request."""
        self.send(self.request(id_, method, params))

    def tell(self, method: str, params: Any = None) -> None:
        """Send a well-formed notification."""
        self.send(self.notification(method, params))

    def respond(self, id_: Any, result: Any) -> None:
        """Send a well-formed result."""
        self.answer({"id": id_}, result)

    async def messages(self, count: int) -> list[dict[str, Any]]:
        """Wait for `count` messages in all; return all that came."""
        await self.until(lambda: len(self.frames) >= count)
        return self.frames


class Framed:
    """Between transport and connection: frames pass a framer, as bytes from a pipe would."""

    def __init__(self, receiver: Receiver, frame_bytes: int) -> None:
        self._receiver = receiver
        self._framer = LineFramer(frame_bytes)
        self.input_ended = receiver.input_ended
        self.connection_lost = receiver.connection_lost
        self.pause_writing = receiver.pause_writing
        self.resume_writing = receiver.resume_writing

    def frames_received(self, frames: list[bytes | Fault]) -> None:
        data = b"".join(frame + b"\n" for frame in frames if isinstance(frame, bytes))
        self._receiver.frames_received(self._framer.feed(data))


class SpiedTransport:
    """One end of a memory pair; writes down what is asked of it. Satisfies `Transport`."""

    def __init__(self, inner: MemoryTransport, frame_bytes: int) -> None:
        self.inner = inner
        self._frame_bytes = frame_bytes
        #: The frames of each call of `send`.
        self.sent: list[list[bytes]] = []
        #: "pause" and "resume", as asked for.
        self.reading: list[str] = []
        self.closes = 0

    async def start(self, receiver: Receiver) -> None:
        await self.inner.start(Framed(receiver, self._frame_bytes))

    def send(self, frames: list[bytes]) -> None:
        self.sent.append(list(frames))
        self.inner.send(frames)

    @property
    def unsent(self) -> int:
        return self.inner.unsent

    def pause_reading(self) -> None:
        self.reading.append("pause")
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.reading.append("resume")
        self.inner.resume_reading()

    async def aclose(self) -> None:
        self.closes += 1
        await self.inner.aclose()

    def describe(self) -> str:
        return "spied memory"


def plain(raw: Any) -> Any:
    return {} if raw is None else loads(raw)


class PlainSide:
    """Serves the methods a test gives it. Satisfies `runtime.Router`."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.updates: list[tuple[str, Any, bytes]] = []
        #: Count what is received against the connection's budget, as sessions do.
        self.queue_updates = False
        self.losses: list[ConnectionClosed] = []
        self.contexts: list[Context] = []
        #: What `cancelled` does; the default leaves it to the connection.
        self.on_cancel: Callable[[InboundCall], bool] = lambda _call: False
        self._requests: dict[str, RequestRoute] = {}
        self._notices: dict[str, NoticeRoute] = {}

    def serve(
        self,
        method: str,
        handler: Callable[[Any, Any], Awaitable[Any]],
        *,
        decode: Callable[[Any], Any] = plain,
        encode: Callable[[Any], bytes] = encode_checked,
        accept: Callable[[Any, Any], Any] | None = None,
        begin: Callable[[Any, Any, InboundCall], Any] | None = None,
        conclude: Callable[[Any, Any, BaseException | None], Any] | None = None,
    ) -> None:
        """Serve a request."""
        self._requests[method] = RequestRoute(
            decode, handler, encode, accept, begin=begin, conclude=conclude
        )

    def hear(
        self,
        method: str,
        handler: Callable[[Any, Any], Awaitable[None]] | None = None,
        *,
        at_once: Callable[[Any, Any], None] | None = None,
        decode: Callable[[Any], Any] = plain,
    ) -> None:
        """Serve a notification, in order or in the reader."""
        self._notices[method] = NoticeRoute(decode, at_once, handler)

    # Router

    def request_route(self, method: str) -> RequestRoute | None:
        return self._requests.get(method)

    def notice_route(self, method: str) -> NoticeRoute | None:
        return self._notices.get(method)

    def context(self, method: str, raw: Any, params: Any, call: InboundCall | None) -> Context:
        assert self.connection is not None
        session_id = ""
        if isinstance(params, dict):
            session_id = cast("dict[str, Any]", params).get("sessionId", "")
        context = Context(self.connection, method, session_id, raw, call)
        self.contexts.append(context)
        return context

    def update_received(self, session_id: str, update: Any, frame: bytes) -> None:
        self.updates.append((session_id, loads(update), frame))
        if self.queue_updates:
            assert self.connection is not None
            self.connection.queued_bytes += len(frame)
            self.connection.queued_updates += 1

    def updates_received(
        self, session_id: str, updates: Sequence[Any], frames: Sequence[bytes]
    ) -> None:
        for update, frame in zip(updates, frames, strict=True):
            self.update_received(session_id, update, frame)

    def cancelled(self, call: InboundCall) -> bool:
        return self.on_cancel(call)

    def input_ended(self) -> None:
        """Nothing here runs long."""

    def connection_lost(self, error: ConnectionClosed) -> None:
        self.losses.append(error)


class Link:
    """A connection under test, what it serves, its transport, and the peer."""

    def __init__(
        self, side: Side, limits: Limits, record: Any = None, telemetry: Any = None
    ) -> None:
        near, far = memory_pair()
        self.transport = SpiedTransport(near, limits.frame_bytes)
        self.side = PlainSide()
        self.connection = Connection(
            self.transport, side, self.side, limits=limits, record=record, telemetry=telemetry
        )
        self.side.connection = self.connection
        self.peer = Peer(far, BOUND)


@asynccontextmanager
async def linked(
    side: Side = "agent",
    *,
    initialized: bool = True,
    record: Any = None,
    telemetry: Any = None,
    **limits: Any,
) -> AsyncGenerator[Link]:
    """A started link whose handshake is done (or not), closed at the end."""
    limits.setdefault("close_grace", 1.0)
    link = Link(side, Limits(**limits), record, telemetry)
    await link.connection.start()
    await link.peer.transport.start(link.peer)
    link.connection.initialized = initialized
    try:
        yield link
    finally:
        async with asyncio.timeout(BOUND):
            await link.connection.aclose()
            await link.peer.transport.aclose()


class Gate:
    """A handler that says when it has begun, and ends when it is told to."""

    def __init__(self, result: Any = None) -> None:
        self.result: Any = {} if result is None else result
        self.begun = asyncio.Event()
        self.ended: list[str] = []
        self._opened = asyncio.Event()

    async def __call__(self, params: Any, context: Any) -> Any:
        self.begun.set()
        try:
            await self._opened.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("returned")
        return self.result

    def open(self) -> None:
        self._opened.set()

    async def entered(self) -> None:
        async with asyncio.timeout(BOUND):
            await self.begun.wait()


class Hard(BaseException):
    """What test frameworks, gevent and Rust extensions raise: no `Exception`."""


def update(size: int) -> bytes:
    frame = b'{"method":"session/update","params":{"sessionId":"s","update":{"t":"%s"}}}'
    return frame % (b"x" * (size - len(frame) + 2))


async def good(params: Any, context: Any) -> Any:
    """A handler that answers."""
    return {"good": True}


async def bounded(awaitable: Any) -> Any:
    """Await, but not for ever."""
    async with asyncio.timeout(BOUND):
        return await awaitable


def raw(value: Any) -> Any:
    """What raw JSON says."""
    return json.loads(bytes(value))


async def turns(count: int = 5) -> None:
    """Let the loop turn: what is to happen at once has happened then."""
    for _ in range(count):
        await asyncio.sleep(0)
