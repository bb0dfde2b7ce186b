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

import contextlib
import re
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from antiphon._errors import LimitExceeded, RemoteProtocolError, RequestError
from antiphon.schema import decoder, encode_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


class _LooseEnvelope(msgspec.Struct, gc=False):
    """What any JSON object decodes to, so that even a wrong envelope tells whom it concerns."""

    params: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    jsonrpc: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Error(msgspec.Struct):
    code: int
    message: str
    data: Raw | UnsetType = UNSET


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
    """A frame that is no legal message: send `reply`.

    `event` and `facts` are what to tell an operator (runtime-semantics §18), `noise` the beginning of
    the frame if it was no JSON.
    """

    reply: bytes
    event: Literal["invalid_request_frame", "parse_error"]
    facts: dict[str, Any]
    noise: bytes | None = None


class Ignored(msgspec.Struct):
    """A frame that must have no effect; `event`, `facts` and `noise` as in `Refusal`."""

    event: Literal["late_response", "malformed_response", "refused_by_peer", "noise"]
    facts: dict[str, Any]
    noise: bytes | None = None


Event = UpdateEvent | RequestEvent | NotificationEvent | ResponseEvent | Refusal | Ignored


def _decode_first_update(frame: bytes) -> UpdateEvent:
    """Make the decoder of updates: an agent, which is told none, does not wait for it."""
    global _decode_update  # noqa: PLW0603  (set once, to a constant)
    _decode_update = decoder(UpdateEvent)
    return _decode_update(frame)


_decode_update: Callable[[bytes], UpdateEvent] = _decode_first_update
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_any = msgspec.json.Decoder().decode
_check_json = msgspec.json.Decoder(Raw).decode
_encode = msgspec.json.Encoder().encode

_OPENING: Final = b'{"jsonrpc":"2.0","id":'
_METHOD: Final = b',"method":'
_PARAMS: Final = b',"params":'
_NULL: Final = b"null"
#: How most write what has an id: a request or an answer, and no update.
_WITH_ID: Final = b'{"jsonrpc":"2.0","id":'
_VERSION: Final = b'"2.0"'
#: A number, which is found in bytes ten times as fast as bytes are.
_BACKSLASH: Final = ord("\\")
#: What is kept of noise, and looked at of a frame that cannot be decoded.
_KEPT: Final = 4096
#: What an operator is shown of what a peer wrote.
_SHOWN: Final = 200
#: A longer id is no legal one: each is kept while its request is open, and sent back. Real ids are
#: counters and UUIDs.
_ID_BYTES: Final = 4096
#: Nearly all ids are counters; one of fewer digits is legal without a second look.
_DIGITS: Final = 64
#: What is left of the message of an error whose frame would be over the limit.
_MESSAGE_CHARACTERS: Final = 256

# Members with scalar values, from the very start of an object or up to its very end: what they hold
# is certain even when the rest of the frame was thrown away. Strings are matched whole, so nothing
# inside them counts; and a search that begins inside a string stays out of step with the quotes up
# to the end, where it fails, because outside of strings JSON has no backslash.
_SPACE = rb"[ \t\r]*+"
_STRING = rb'"(?:[^"\\]|\\.)*+"'
_SCALAR = rb"(?:" + _STRING + rb"|-?\d[\d.eE+-]*+|true|false|null)"
_PAIR = (
    _SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE + rb"(" + _SCALAR + rb")" + _SPACE
)
# Compiled (and then kept by `re`) where the first such frame comes: most processes meet none.
_HEAD = _SPACE + rb"\{((?:" + _PAIR + rb",)*+)" + _SPACE + rb"(?P<next>" + _STRING + rb")?"
_TAIL = rb"((?:," + _PAIR + rb")++)\}" + _SPACE + rb"$"
_NO_ANSWER: Final = frozenset((None, b'"params"', b'"method"'))


class _Salvaged(msgspec.Struct):
    """What is known for certain of a frame that is not read.

    `id` and `method` are raw, None where they were not seen; `answers` tells whether it is a response.
    """

    id: bytes | None
    method: bytes | None
    answers: bool


def _salvage(head: bytes, tail: bytes) -> _Salvaged:
    """What the two ends of a frame that cannot be decoded tell."""
    known: dict[bytes, bytes] = {}
    following: bytes | None = None
    if start := re.match(_HEAD, head):
        known.update(re.findall(_PAIR, start[1]))
        following = start["next"]
    if end := re.search(_TAIL, tail):
        known.update(re.findall(_PAIR, end[1]))
    method = known.get(b'"method"')
    # The member that is no scalar is what makes such a frame long or deep: parameters or a result.
    # One whose method does not end within the head, or begins behind it, is no answer either: the
    # peer's requests have the same ids as ours.
    answers = method is None and following not in _NO_ANSWER
    return _Salvaged(_readable(known.get(b'"id"')), method, answers)


def _readable(id_: bytes | None) -> bytes | None:
    """The id, if it is JSON: the search above does not look into strings."""
    try:
        return id_ if id_ is None or _decode_any(id_) is not None else None
    except msgspec.DecodeError:
        return None


def _shown(raw: bytes) -> str:
    """The beginning of what the peer wrote, for an operator."""
    return raw[:_SHOWN].decode("utf-8", "replace")


def _key(raw: bytes) -> bytes:
    """One spelling for each string id, so that `"a"` and its escaped form are the same id."""
    return _encode(_decode_any(raw)) if _BACKSLASH in raw else raw


def _legal_id(raw: bytes) -> bool:
    """String or integer; no fraction, no exponent (runtime-semantics §2)."""
    if len(raw) > _ID_BYTES:
        return False
    if raw[:1] != b'"':
        return raw.lstrip(b"-").isdigit()
    if raw.isascii():
        return True
    try:  # the decoder does not look into raw values, and these bytes are sent back
        str(raw, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


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
        #: A frame of so many bytes is too short to nest too deep in whole JSON.
        self._shallow = 2 * limits.json_depth
        self._last_id = 0
        #: Our open calls by id, in the order they were sent.
        self.calls: dict[bytes, Any] = {}
        #: The peer's open requests by id; the value is whatever the runtime keeps for one.
        self.requests: dict[bytes, Any] = {}
        # A frame that was decoded to see whether it is one more update, and what it was decoded to.
        self._ahead_frame: bytes | Fault | None = None
        self._ahead: Any = None
        self.receive_frame: Callable[[bytes], Event] = (
            self._receive_at_client if side == "client" else self._receive_general
        )

    # ------------------------------------------------------------------ frames in

    def _receive_at_client(self, frame: bytes) -> Event:
        """The client's fast path: one pass over an update, an answer or what shows its id, else a second one."""
        event: UpdateEvent
        if frame is self._ahead_frame:  # `updates_behind` has looked at it
            event = self._ahead
            self._ahead = self._ahead_frame = None  # it may be large
        elif frame.startswith(_WITH_ID):
            return self._receive_general(frame)
        else:
            try:
                event = _decode_update(frame)
            except (msgspec.DecodeError, RecursionError):
                return self._receive_general(frame)
        if event.method == "session/update":
            if event.id is UNSET and event.params is not UNSET and event.params.update is not UNSET:
                return event
        elif event.method is UNSET and (len(frame) <= self._shallow or not self._deep(frame)):
            return self._classify_answer(event)
        return self._receive_general(frame)

    def updates_behind(
        self, first: UpdateEvent, frames: Sequence[bytes | Fault], at: int
    ) -> list[Raw]:
        """What a session is told in one go: the updates of `first` and of the frames from `at` on.

        They end before the first frame that is none of that session's. A client is told a turn in
        thousands of them, and here one costs no call.
        """
        route: Any = first.params
        session_id, updates = route.sessionId, [route.update]
        add = updates.append
        frame: Any = None  # bytes, until the decoder finds a fault: no question for each
        try:
            for frame in islice(frames, at, None):
                event = _decode_update(frame)
                route = event.params
                if (
                    event.method != "session/update"
                    or event.id is not UNSET
                    or route is UNSET
                    or route.update is UNSET
                    or route.sessionId != session_id
                ):
                    self._ahead, self._ahead_frame = event, frame
                    break
                add(route.update)
        except (msgspec.DecodeError, RecursionError):
            pass  # an odd frame: it is looked at by itself
        except TypeError:
            if isinstance(frame, bytes):  # what stands for an over-long one is none
                raise
        return updates

    def _receive_general(self, frame: bytes) -> Event:
        if len(frame) > self._shallow and self._deep(frame):
            return self._refuse_deep(frame)
        try:
            envelope = _decode_envelope(frame)
        except RecursionError:
            return self._refuse_deep(frame)
        except msgspec.DecodeError:
            return self._receive_odd(frame)
        method = envelope.method
        if method is UNSET:
            return self._classify_answer(envelope)
        raw_id = envelope.id
        if raw_id is not UNSET:
            id_ = bytes(raw_id)
            if id_.isdigit() and len(id_) < _DIGITS:  # as nearly all are
                params = envelope.params
                if params is UNSET or (len(params) == 4 and _is_null(params)):
                    return RequestEvent(id_, method, None, frame)
                return RequestEvent(id_, method, params, frame)
        return self._classify(envelope, frame)

    def _deep(self, frame: bytes) -> bool:
        limit = self.limits.json_depth
        # Above a mebibyte counting would cost more than decoding such a frame does: the decoder's own
        # recursion bound has to do, and typed decoding never keeps what it does not know.
        if not self._shallow < len(frame) <= 1 << 20:
            return False
        return frame.count(b"[") + frame.count(b"{") > limit and self._depth_exceeds(frame, limit)

    def _classify(self, envelope: _Envelope, frame: bytes) -> Event:
        method, raw_id = envelope.method, envelope.id
        if method is UNSET:
            return self._classify_answer(envelope)
        params = envelope.params
        given = None if params is UNSET or (len(params) == 4 and _is_null(params)) else params
        if raw_id is UNSET:
            return NotificationEvent(method, given, frame)
        id_ = bytes(raw_id)
        if not _legal_id(id_):  # null included: settled as -32600 in DESIGN §10
            return self._refuse(-32600, "Invalid request", None, {"reason": "illegal id"})
        return RequestEvent(id_, method, given, frame)

    def _classify_answer(self, envelope: _Envelope | UpdateEvent | _LooseEnvelope) -> Event:
        """What has no method: an answer, or nothing at all."""
        result, error = envelope.result, envelope.error
        if envelope.id is UNSET:
            if result is UNSET and error is UNSET:
                return self._refuse(-32600, "Invalid request", None, {"reason": "no method"})
            if error is not UNSET:
                return Ignored("refused_by_peer", {"error": _shown(bytes(error))})
            return Ignored("malformed_response", {"id": None, "reason": "no id"})
        id_ = bytes(envelope.id)
        call = self.calls.pop(id_, None)
        if call is None:
            if result is UNSET and error is UNSET:
                known = id_ if _legal_id(id_) else None
                return self._refuse(-32600, "Invalid request", known, {"reason": "no method"})
            if id_ == _NULL and error is not UNSET:
                return Ignored("refused_by_peer", {"error": _shown(bytes(error))})
            return Ignored("late_response", {"id": _shown(id_)})
        # A result wins over an error beside it (runtime-semantics §2.1), but null beside an error is
        # only how some peers write that there is no result.
        if error is UNSET or (result is not UNSET and not (_is_null(result) and _is_object(error))):
            # `{"id": 3}`: some peers leave the result of a void method out.
            return ResponseEvent(call, Raw(_NULL) if result is UNSET else result, None)
        return ResponseEvent(call, None, _answered_error(error))

    def _receive_odd(self, frame: bytes) -> Event:
        """Whatever the envelope decoder refused: say precisely why, and keep the id if it is usable."""
        from antiphon.schema import repair_text

        # Lone surrogates are refused by the strict decoder even inside raw values.
        text = repair_text(frame)
        try:
            if text != frame:
                try:
                    return self._classify(_decode_envelope(text), text)
                except msgspec.ValidationError:
                    pass
            loose = decoder(_LooseEnvelope)(text)
        except RecursionError:
            return self._refuse_deep(frame)
        except msgspec.ValidationError:
            return self._receive_no_object(frame, text)
        except msgspec.DecodeError:
            return self._refuse_noise(frame)
        return self._refuse_object(loose)

    def _receive_no_object(self, frame: bytes, text: bytes) -> Event:
        try:
            _check_json(text)
        except RecursionError:
            return self._refuse_deep(frame)
        except msgspec.DecodeError:
            return self._refuse_noise(frame)
        array = text.lstrip()[:1] == b"["
        reason = "batch_array" if array else "not an object"
        return self._refuse(-32600, "Invalid request", None, {"reason": reason})

    def _refuse_noise(self, frame: bytes) -> Event:
        noise = frame[:_KEPT]
        # An agent's banner or log line ("[INFO] ready") on stdout is no message; answering it could
        # only start an exchange of errors. What looks like an object gets the answer that JSON-RPC
        # asks for.
        if self.side == "client" and frame.lstrip()[:1] != b"{":
            return Ignored("noise", {"begins": _shown(frame)}, noise)
        facts = {"reason": "no JSON", "begins": _shown(frame)}
        return Refusal(error_frame(_NULL, -32700, "Parse error"), "parse_error", facts, noise)

    def _refuse_object(self, loose: _LooseEnvelope) -> Event:
        """An object whose method is no string, or that says it is of another JSON-RPC version."""
        id_ = None if loose.id is UNSET else bytes(loose.id)
        odd = loose.jsonrpc is not UNSET and bytes(loose.jsonrpc) != _VERSION
        method_given = loose.method is not UNSET and not _is_null(loose.method)
        if not method_given and (loose.result is not UNSET or loose.error is not UNSET):
            if not odd:  # a method of null is as good as none
                return self._classify_answer(loose)
            # A malformed response must fail its caller and is never answered.
            call = None if id_ is None else self.calls.pop(id_, None)
            if call is None:
                facts = {"id": None if id_ is None else _shown(id_), "reason": "jsonrpc"}
                return Ignored("malformed_response", facts)
            error = RemoteProtocolError("the answer is malformed: it is not of JSON-RPC 2.0")
            return ResponseEvent(call, None, error)
        reason = 'jsonrpc is not "2.0"' if odd else "method is no string"
        legal = id_ if id_ is not None and _legal_id(id_) else None
        return self._refuse(-32600, "Invalid request", legal, {"reason": reason})

    def receive_fault(self, fault: Fault) -> Event:
        """What stands for a frame over the limit: fail the call it would have answered, else refuse.

        An id counts where it stands among the scalar members at either end of the frame.
        """
        limit = self.limits.frame_bytes
        failed = LimitExceeded("frame_bytes", limit, fault.size)
        data = {"reason": fault.reason, "limit": limit}
        return self._refuse_unread(_salvage(fault.head, fault.tail), failed, data)

    def _refuse_deep(self, frame: bytes) -> Event:
        limit = self.limits.json_depth
        try:  # deeper than we want, perhaps not deeper than can be skipped
            loose = decoder(_LooseEnvelope)(frame)
        except (msgspec.DecodeError, RecursionError):
            found = _salvage(frame[:_KEPT], frame[-_KEPT:])
        else:
            id_ = None if loose.id is UNSET else bytes(loose.id)
            method = None if loose.method is UNSET else bytes(loose.method)
            found = _Salvaged(id_, method, answers=method is None)
        data = {"reason": "too_deep", "limit": limit}
        return self._refuse_unread(found, LimitExceeded("json_depth", limit), data)

    def _refuse_unread(
        self, found: _Salvaged, failed: LimitExceeded, data: dict[str, Any]
    ) -> Event:
        id_, method = found.id, found.method
        if id_ is not None and found.answers and (call := self.calls.pop(id_, None)) is not None:
            return ResponseEvent(call, None, failed)
        # What is lost is told by name where that was seen: it may have been an update.
        facts = data | {
            "size": failed.size,
            "method": None if method is None else _shown(method.strip(b'"')),
        }
        if id_ is not None and method is not None and _legal_id(id_):
            return self._refuse(-32600, "Invalid request", id_, data, facts)
        reply = error_frame(_NULL, -32700, "Parse error", data)
        return Refusal(reply, "parse_error", facts)

    def _refuse(
        self,
        code: int,
        message: str,
        id_: bytes | None,
        data: dict[str, Any],
        facts: dict[str, Any] | None = None,
    ) -> Refusal:
        # An id that is being handled gets its one response from its handler.
        known = _NULL if id_ is None or self.is_open(id_) else id_
        told = {"id": None if id_ is None else _shown(id_)} | (facts or data)
        return Refusal(error_frame(known, code, message, data), "invalid_request_frame", told)

    # ------------------------------------------------------------------ the peer's requests

    def open(self, id_: bytes, request: Any) -> bool:
        """Enter a request of the peer; False if that id is being handled already (then do nothing)."""
        key = id_ if _BACKSLASH not in id_ else _key(id_)
        if key in self.requests:
            return False
        self.requests[key] = request
        return True

    def is_open(self, id_: bytes) -> bool:
        """Whether a request of the peer with this id waits for its response."""
        return _key(id_) in self.requests

    def request_of(self, id_: bytes) -> Any:
        """What was entered for the peer's request with this raw id, or None."""
        return self.requests.get(_key(id_)) if _legal_id(id_) else None

    def result(self, id_: bytes, body: bytes) -> bytes | None:
        """The response frame with a result, closing the request; None if it has its response already.

        Raises:
            LimitExceeded: the frame would be over `frame_bytes`; the request stays open.
        """
        key = id_ if _BACKSLASH not in id_ else _key(id_)
        if key not in self.requests:
            return None
        frame = b"".join((_OPENING, id_, b',"result":', body, b"}"))
        if len(frame) > self.limits.frame_bytes:
            self._check(frame)
        del self.requests[key]
        return frame

    def error(self, id_: bytes, code: int, message: str, data: Any = None) -> bytes | None:
        """The response frame with an error, closing the request; None if it has its response already.

        If it would be over `frame_bytes` with its data, it goes without, and with the beginning of
        its message.

        Raises:
            TypeError, ValueError: `data` is no JSON; the request stays open.
        """
        key = _key(id_)
        if key not in self.requests:
            return None
        frame = error_frame(id_, code, message, data)
        if len(frame) > self.limits.frame_bytes:
            frame = error_frame(id_, code, message[:_MESSAGE_CHARACTERS])
        del self.requests[key]
        return frame

    # ------------------------------------------------------------------ our calls

    def request(
        self, method: str, params: bytes | msgspec.Struct | None, call: Any
    ) -> tuple[bytes, bytes]:
        """Open a call: its id and its frame.

        Parameters that are a struct are written into the frame: large ones are never copied.

        Raises:
            LimitExceeded: the frame would be over `frame_bytes`; nothing is open, the id is used up.
            TypeError, ValueError: parameters that are no JSON; likewise.
        """
        self._last_id += 1
        id_ = b"%d" % self._last_id
        if params is None:
            frame = b"".join((_OPENING, id_, _METHOD, _name(method), b"}"))
        # By class first: a struct's metaclass makes it slow to find that something is none.
        elif type(params) is not bytes and isinstance(params, msgspec.Struct):
            frame = _request_frame(id_, method, params)
        else:
            frame = b"".join((_OPENING, id_, _METHOD, _name(method), _PARAMS, params, b"}"))
        if len(frame) > self.limits.frame_bytes:
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


def _is_null(raw: Raw) -> bool:
    return len(raw) == 4 and bytes(raw) == _NULL


def _is_object(raw: Raw) -> bool:
    return memoryview(raw)[0] == ord("{")


def _answered_error(raw: Raw) -> RequestError | RemoteProtocolError:
    """The exception for the `error` of an answer; what cannot be read of its `data` is left out."""
    from antiphon.schema import loads, repair_text

    text = repair_text(raw)
    try:
        error = decoder(_Error)(text)
    except (msgspec.DecodeError, RecursionError):
        # The cause is worth more than the form (field fault 18).
        said = text[:200].decode("utf-8", "replace")
        return RemoteProtocolError(f"the answer's error is malformed: {said}")
    data = None
    if error.data is not UNSET:
        with contextlib.suppress(msgspec.DecodeError):
            data = loads(error.data)
    return RequestError.of(error.code, error.message, data)


_names: dict[str, bytes] = {}


def _name(method: str) -> bytes:
    """The method name as JSON text; the few the protocol has are kept."""
    known = _names.get(method)
    if known is None:
        known = _encode(method)
        if len(_names) < 256:
            _names[method] = known
    return known


class _Request(msgspec.Struct, gc=False):
    jsonrpc: str
    id: Raw
    method: str
    params: msgspec.Struct


def _request_frame(id_: bytes, method: str, params: msgspec.Struct) -> bytes:
    try:
        return encode_checked(_Request("2.0", Raw(id_), method, params))
    except (TypeError, ValueError):
        encode_checked(params)  # says what is wrong, by the name of what it is wrong with
        raise


def error_frame(id_: bytes, code: int, message: str, data: Any = None) -> bytes:
    """A response frame with an error. `data` None is left out.

    Lone surrogates are replaced: a file name in a message must not cost the peer its answer (field
    fault 07). Raises `TypeError` or `ValueError` for data that is no JSON.
    """
    body: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        body["data"] = data
    return b'{"jsonrpc":"2.0","id":' + id_ + b',"error":' + encode_checked(body) + b"}"
