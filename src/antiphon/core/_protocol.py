"""The JSON-RPC side of ACP without I/O: frames in, events out; calls in, frames out.

`Protocol` understands envelopes, ids and the two tables of open calls. It knows no clock, no task and
no method's meaning: which method exists, what its parameters are and who handles it is the runtime's
business, and moving frames is the transport's. Previous station of a frame: `transports`; next:
`runtime.Connection`.

Rules that live here, all of them and only here:

* ids are kept and echoed as the bytes they came in; the two directions have separate id spaces (R1-6);
* a frame is classified by its members in the order of runtime-semantics §2.1;
* an id being handled cannot be opened a second time, and gets exactly one response (DESIGN §4.7);
* a response finds its call by the exact bytes of the id, and only once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from antiphon._errors import LimitExceeded, RemoteProtocolError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.core._framer import Fault
    from antiphon.core._limits import Limits

__all__ = [
    "Event",
    "Ignored",
    "NotificationEvent",
    "Protocol",
    "Refusal",
    "RequestEvent",
    "ResponseEvent",
    "Side",
    "UpdateEvent",
]

Side = Literal["agent", "client"]


class _Route(msgspec.Struct, gc=False):
    sessionId: str = ""  # noqa: N815  (wire names: this struct is decoded once per update)
    update: Raw | UnsetType = UNSET


class UpdateEvent(msgspec.Struct, gc=False):
    """A `session/update` notification: the envelope itself, its update still undecoded."""

    params: _Route | UnsetType = UNSET
    method: str | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    jsonrpc: Literal["2.0"] | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Envelope(msgspec.Struct, gc=False):
    params: Raw | UnsetType = UNSET
    method: str | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    jsonrpc: Literal["2.0"] | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Error(msgspec.Struct):
    code: int
    message: str
    data: Any = None


class RequestEvent(msgspec.Struct, gc=False):
    """The peer asks. `id` is its raw JSON text, `params` raw or None where absent or null."""

    id: bytes
    method: str
    params: Raw | None
    frame: bytes


class NotificationEvent(msgspec.Struct, gc=False):
    """The peer tells. `params` is raw or None where absent or null."""

    method: str
    params: Raw | None
    frame: bytes


class ResponseEvent(msgspec.Struct):
    """The peer answers a call of ours, which is taken out of the table with this.

    `call` is what was given to `Protocol.request`. Exactly one of `result` (raw JSON) and `error` is
    set; `error` is a `RequestError`, a `RemoteProtocolError` for an answer that is none, or
    `LimitExceeded` for one over the frame limit.
    """

    call: Any
    result: Raw | None
    error: RequestError | RemoteProtocolError | LimitExceeded | None


class Refusal(msgspec.Struct):
    """A frame that is no legal message: send `reply`."""

    reply: bytes
    reason: str


class Ignored(msgspec.Struct):
    """A frame that must have no effect; `reason` is for logs, `noise` the text if it was no JSON."""

    reason: str
    noise: bytes | None = None


Event = UpdateEvent | RequestEvent | NotificationEvent | ResponseEvent | Refusal | Ignored

_decode_update = msgspec.json.Decoder(UpdateEvent).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_error = msgspec.json.Decoder(_Error).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_NULL: Final = b"null"
# Members with scalar values, from the very start of an object: what they hold is certain even when
# the rest of the frame was thrown away. Strings are matched whole, so nothing inside them counts.
_STRING = rb'"(?:[^"\\]|\\.)*"'
_SCALAR = rb"(?:" + _STRING + rb"|-?\d+|true|false|null)"
_HEAD = re.compile(
    rb"[ \t\r]*\{(?:[ \t\r]*" + _STRING + rb"[ \t\r]*:[ \t\r]*" + _SCALAR + rb"[ \t\r]*,)*"
)
_MEMBER = re.compile(rb"(" + _STRING + rb")[ \t\r]*:[ \t\r]*(" + _SCALAR + rb")[ \t\r]*,")
# At the very end, `"id":X}` closes the outermost object: certain as well.
_TAIL = re.compile(
    rb'[,{][ \t\r]*"id"[ \t\r]*:[ \t\r]*(' + _STRING + rb"|-?\d+)[ \t\r]*\}[ \t\r]*$"
)


def _key(raw: bytes) -> bytes:
    """One spelling for each string id, so that `"a"` and its escaped form are the same id."""
    return _encode(_decode_any(raw)) if b"\\" in raw else raw


def _legal_id(raw: bytes) -> bool:
    """String or integer; no fraction, no exponent (runtime-semantics §2)."""
    return raw[:1] == b'"' or (raw.lstrip(b"-").isdigit())


class Protocol:
    """The state of one connection's envelopes. Not thread-safe; no method blocks.

    Args:
        side: which role this end plays; only a client receives `session/update`.
        limits: `frame_bytes` and `json_depth` are used here.
        depth_exceeds: tells whether a raw JSON text nests deeper than a number; given by the codec.
    """

    def __init__(
        self, side: Side, limits: Limits, depth_exceeds: Callable[[bytes, int], bool]
    ) -> None:
        self.side: Side = side
        self.limits = limits
        self._depth_exceeds = depth_exceeds
        self._last_id = 0
        #: Our open calls by id, in the order they were sent.
        self.calls: dict[bytes, Any] = {}
        #: The peer's open requests by id; the value is whatever the runtime keeps for one.
        self.requests: dict[bytes, Any] = {}
        self.receive_frame: Callable[[bytes], Event] = (
            self._receive_at_client if side == "client" else self._receive_general
        )

    # ------------------------------------------------------------------ frames in

    def _receive_at_client(self, frame: bytes) -> Event:
        """The client's fast path: one pass over an update, everything else a second one."""
        try:
            event = _decode_update(frame)
        except (msgspec.DecodeError, RecursionError):
            return self._receive_general(frame)
        if (
            event.method == "session/update"
            and event.id is UNSET
            and event.params is not UNSET
            and event.params.update is not UNSET
        ):
            return event
        return self._receive_general(frame)

    def _receive_general(self, frame: bytes) -> Event:
        size = len(frame)
        # Above a mebibyte the decoder's own recursion bound has to do: counting would cost more than
        # decoding such a frame does, and typed decoding never keeps what it does not know.
        if size > 2 * self.limits.json_depth and size <= 1 << 20 and self._deep(frame):
            return self._refuse_deep(frame)
        try:
            envelope = _decode_envelope(frame)
        except RecursionError:
            return self._refuse_deep(frame)
        except msgspec.DecodeError as error:
            return self._receive_odd(frame, error)
        return self._classify(envelope, frame)

    def _deep(self, frame: bytes) -> bool:
        limit = self.limits.json_depth
        return frame.count(b"[") + frame.count(b"{") > limit and self._depth_exceeds(frame, limit)

    def _classify(self, envelope: _Envelope, frame: bytes) -> Event:
        method, raw_id = envelope.method, envelope.id
        if method is not UNSET:
            params = envelope.params
            given = None if params is UNSET or bytes(params) == _NULL else params
            if raw_id is UNSET:
                return NotificationEvent(method, given, frame)
            id_ = bytes(raw_id)
            if not _legal_id(id_):  # null included: settled as -32600 in DESIGN §10
                return self._refuse(-32600, "Invalid request", None, {"reason": "illegal id"})
            return RequestEvent(id_, method, given, frame)
        if raw_id is UNSET:
            if envelope.result is UNSET and envelope.error is UNSET:
                return self._refuse(-32600, "Invalid request", None, {"reason": "no method"})
            return Ignored("a response without an id")
        return self._response(bytes(raw_id), envelope)

    def _response(self, id_: bytes, envelope: _Envelope) -> Event:
        result, error = envelope.result, envelope.error
        call = self.calls.pop(id_, None)
        if call is None:
            if result is UNSET and error is UNSET:
                known = id_ if _legal_id(id_) else None
                return self._refuse(-32600, "Invalid request", known, {"reason": "no method"})
            return Ignored("a response to no open call")
        if result is not UNSET:  # wins over an error beside it (runtime-semantics §2.1)
            return ResponseEvent(call, result, None)
        if error is UNSET:  # `{"id": 3}`: some peers leave the result of a void method out
            return ResponseEvent(call, Raw(_NULL), None)
        try:
            answer = _decode_error(error)
        except (msgspec.DecodeError, RecursionError):
            return ResponseEvent(call, None, RemoteProtocolError("the answer's error is malformed"))
        return ResponseEvent(call, None, RequestError.of(answer.code, answer.message, answer.data))

    def _receive_odd(self, frame: bytes, error: msgspec.DecodeError) -> Event:
        """Whatever the envelope decoder refused: say precisely why, and keep the id if it is usable."""
        text = frame
        if not isinstance(error, msgspec.ValidationError):
            # Lone surrogates are refused by the strict decoder even inside raw values.
            from antiphon.schema import repair_text

            text = repair_text(frame)
        try:
            if text is not frame:
                return self._classify(_decode_envelope(text), text)
        except msgspec.DecodeError:
            pass
        try:
            value = _decode_any(text)
        except RecursionError:
            return self._refuse_deep(frame)
        except msgspec.DecodeError:
            # An agent's banner or log line on stdout is no message; answering it could only start
            # an exchange of errors. What looks like an object gets the answer JSON-RPC asks for.
            if self.side == "client" and frame.lstrip()[:1] not in (b"{", b"["):
                return Ignored("the peer wrote something that is no message", frame[:4096])
            return self._refuse(-32700, "Parse error", None, None)
        return self._refuse_object(value)

    def _refuse_object(self, value: Any) -> Event:
        if not isinstance(value, dict):
            return self._refuse(-32600, "Invalid request", None, {"reason": "not an object"})
        members = cast("dict[str, Any]", value)
        id_ = members.get("id")
        legal = isinstance(id_, (int, str)) and not isinstance(id_, bool)
        raw = _encode(id_) if legal else None
        if "method" not in members and ("result" in members or "error" in members):
            # A malformed response must fail its caller and is never answered.
            call = None if raw is None else self.calls.pop(raw, None)
            if call is None:
                return Ignored("a malformed response to no open call")
            return ResponseEvent(call, None, RemoteProtocolError("the answer is malformed"))
        return self._refuse(-32600, "Invalid request", raw, {"reason": "malformed envelope"})

    def receive_fault(self, fault: Fault) -> Event:
        """What stands for a frame over the limit: fail the call it would have answered, else refuse."""
        limit = self.limits.frame_bytes
        head = _HEAD.match(fault.head)
        known = dict(_MEMBER.findall(head.group())) if head else {}
        id_: bytes | None = known.get(b'"id"')
        tail = None if id_ else _TAIL.search(fault.tail)
        if tail is not None:
            id_ = tail.group(1)
        if b'"method"' not in known and id_ is not None:
            call = self.calls.pop(id_, None)
            if call is not None:
                return ResponseEvent(call, None, LimitExceeded("frame_bytes", limit, fault.size))
        data = {"reason": fault.reason, "limit": limit}
        if b'"method"' in known and id_ is not None and _legal_id(id_):
            return self._refuse(-32600, "Invalid request", id_, data)
        return self._refuse(-32700, "Parse error", None, data)

    def _refuse_deep(self, frame: bytes) -> Event:
        head = _HEAD.match(frame[:4096])
        known = dict(_MEMBER.findall(head.group())) if head else {}
        id_: bytes | None = known.get(b'"id"')
        limit = self.limits.json_depth
        if b'"method"' not in known and id_ is not None:
            call = self.calls.pop(id_, None)
            if call is not None:
                return ResponseEvent(call, None, LimitExceeded("json_depth", limit))
        legal = id_ if id_ is not None and _legal_id(id_) and b'"method"' in known else None
        data = {"reason": "too_deep", "limit": limit}
        if legal is not None:
            return self._refuse(-32600, "Invalid request", legal, data)
        return self._refuse(-32700, "Parse error", None, data)

    def _refuse(self, code: int, message: str, id_: bytes | None, data: Any) -> Refusal:
        return Refusal(error_frame(id_ or _NULL, code, message, data), f"{message}: {data}")

    # ------------------------------------------------------------------ the peer's requests

    def open(self, id_: bytes, request: Any) -> bool:
        """Enter a request of the peer; False if that id is being handled already (then do nothing)."""
        key = _key(id_)
        if key in self.requests:
            return False
        self.requests[key] = request
        return True

    def is_open(self, id_: bytes) -> bool:
        """Whether a request of the peer with this id waits for its response."""
        return _key(id_) in self.requests

    def request_of(self, id_: bytes) -> Any:
        """What was entered for the peer's request with this raw id, or None."""
        try:
            return self.requests.get(_key(id_))
        except msgspec.DecodeError:
            return None

    def result(self, id_: bytes, body: bytes) -> bytes | None:
        """The response frame with a result, closing the request; None if it has its response already.

        Raises:
            LimitExceeded: the frame would be over `frame_bytes`; the request stays open.
        """
        key = _key(id_)
        if key not in self.requests:
            return None
        frame = b'{"jsonrpc":"2.0","id":' + id_ + b',"result":' + body + b"}"
        self._check(frame)
        del self.requests[key]
        return frame

    def error(self, id_: bytes, code: int, message: str, data: Any = None) -> bytes | None:
        """The response frame with an error, closing the request; None if it has its response already."""
        if self.requests.pop(_key(id_), None) is None:
            return None
        return error_frame(id_, code, message, data)

    # ------------------------------------------------------------------ our calls

    def request(self, method: str, params: bytes | None, call: Any) -> tuple[bytes, bytes]:
        """Open a call: its id and its frame.

        Raises:
            LimitExceeded: the frame would be over `frame_bytes`; nothing is open, the id is used up.
        """
        self._last_id += 1
        id_ = b"%d" % self._last_id
        head = b'{"jsonrpc":"2.0","id":' + id_ + b',"method":' + _name(method)
        frame = head + b"}" if params is None else head + b',"params":' + params + b"}"
        self._check(frame)
        self.calls[id_] = call
        return id_, frame

    def notification(self, method: str, params: bytes | None) -> bytes:
        """A notification frame. Raises `LimitExceeded` for one over `frame_bytes`."""
        head = b'{"jsonrpc":"2.0","method":' + _name(method)
        frame = head + b"}" if params is None else head + b',"params":' + params + b"}"
        self._check(frame)
        return frame

    def abandon(self, id_: bytes) -> bytes | None:
        """Give a call up: the `$/cancel_request` frame for it, or None if it was answered already."""
        if self.calls.pop(id_, None) is None:
            return None
        return self.notification("$/cancel_request", b'{"requestId":' + id_ + b"}")

    def close(self) -> list[Any]:
        """Forget everything; returns our calls that will get no answer, oldest first."""
        calls = list(self.calls.values())
        self.calls.clear()
        self.requests.clear()
        return calls

    def _check(self, frame: bytes) -> None:
        if len(frame) > self.limits.frame_bytes:
            raise LimitExceeded("frame_bytes", self.limits.frame_bytes, len(frame))


_names: dict[str, bytes] = {}


def _name(method: str) -> bytes:
    """The method name as JSON text; the few the protocol has are kept."""
    known = _names.get(method)
    if known is None:
        known = _encode(method)
        if len(_names) < 256:
            _names[method] = known
    return known


def error_frame(id_: bytes, code: int, message: str, data: Any = None) -> bytes:
    """A response frame with an error. `data` None is left out."""
    body: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        body["data"] = data
    return b'{"jsonrpc":"2.0","id":' + id_ + b',"error":' + _encode(body) + b"}"
