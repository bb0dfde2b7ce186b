"""Records as lines of JSON: each as it is stored, or as the recording of a client that got them all.

An export is what `antiphon.connect(…, record=FILE)` writes, lines of `{"t", "dir", "frame"}`, for a
client that connects to the agent, attaches to each session from offset 0, and does nothing else. So
"dir" is as seen from that client, as in every recording of a client: "out" for what it asks
(`initialize`, and `session/load` with the rider, once a session), "in" for what it gets (the two answers,
each record's frame as a subscriber sends it, `_raxol/session.caught_up`). Whoever plays the file to a
client sends the "in" lines, and at each "out" line waits for a request of that method and answers with
the id that came. "t" of a record's frame is when the record was appended, of a frame around them that of
the record beside it: time jumps back where one session ends and another begins.

Every line is one line for every reader and harmless on a terminal: what could end a line or control one
is written as a JSON escape, which means the same.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from antiphon._version import __version__
from antiphon.cli._output import one_line
from antiphon.journal._record import FrameHeads

if TYPE_CHECKING:
    from antiphon.journal import Record, SessionInfo

__all__ = ["Recording", "json_line", "record_line"]

# DEL, the C1 controls, and what hides text or turns it around: all can only stand in strings.
_CONTROLS: Final = re.compile(
    rb"\x7f|\xc2[\x80-\x9f\xad]|\xe2\x80[\x8b\x8e\x8f\xaa-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf"
)
_encode = msgspec.json.Encoder().encode


def json_line(value: dict[str, Any]) -> bytes:
    """A line of our own."""
    return _harmless(_encode(value)) + b"\n"


def record_line(record: Record) -> bytes:
    """The line of a record: every field as stored; `ts` in milliseconds since 1970."""
    return (
        b'{"type":"record","session_id":%b,"offset":%d,"kind":%b,"payload":%b,"taint":%b,"ts":%d}\n'
        % (
            _harmless(_encode(record.session_id)),
            record.offset,
            _harmless(_encode(record.kind)),
            _checked(record.payload),
            _harmless(_encode(record.taint)),
            record.ts,
        )
    )


class Recording:
    """The lines of an export, session by session."""

    def __init__(self) -> None:
        self._asked = 0
        self._heads: FrameHeads | None = None

    def begin(self, session: SessionInfo) -> list[bytes]:
        """What comes before a session's records: the client asks for them."""
        lines: list[bytes] = []
        if not self._asked:
            lines += self._call("initialize", session.created, _HELLO, _WELCOME)
        self._heads = FrameHeads(session.session_id)
        cwd = session.meta.get("cwd")
        params: dict[str, Any] = {
            "sessionId": session.session_id,
            "cwd": cwd if isinstance(cwd, str) else "/",
            "mcpServers": [],
            "_meta": {"raxol.io": {"fromOffset": 0, "historyPolicy": "from_offset"}},
        }
        self._asked += 1
        lines.append(self._request("session/load", session.created, params))
        return lines

    def record(self, record: Record) -> bytes:
        """The line of a record: its frame as a subscriber sends it."""
        assert self._heads is not None
        return _line(record.ts, b"in", self._heads.frame(record))

    def end(self, session_id: str, last: int, ts: int) -> list[bytes]:
        """What comes after them: that these were all, up to offset `last`."""
        params = {"sessionId": session_id, "offset": last + 1}
        caught_up = {"jsonrpc": "2.0", "method": "_raxol/session.caught_up", "params": params}
        result = {"_meta": {"raxol.io": {"highWatermark": last}}}
        return [_line(ts, b"in", _encode(caught_up)), self._answer(ts, result)]

    def _call(self, method: str, ts: int, params: Any, result: Any) -> list[bytes]:
        self._asked += 1
        return [self._request(method, ts, params), self._answer(ts, result)]

    def _request(self, method: str, ts: int, params: Any) -> bytes:
        frame = {"jsonrpc": "2.0", "id": self._asked, "method": method, "params": params}
        return _line(ts, b"out", _encode(frame))

    def _answer(self, ts: int, result: Any) -> bytes:
        return _line(ts, b"in", _encode({"jsonrpc": "2.0", "id": self._asked, "result": result}))


_INFO: Final = {"name": "antiphon journal export", "version": __version__}
_HELLO: Final[dict[str, Any]] = {
    "protocolVersion": 1,
    "clientCapabilities": {},
    "clientInfo": _INFO,
}
_WELCOME: Final[dict[str, Any]] = {
    "protocolVersion": 1,
    "agentCapabilities": {"loadSession": True},
    "agentInfo": _INFO,
    "authMethods": [],
    "_meta": {"raxol.io": {"resumable": True}},
}


def _line(ts: int, direction: bytes, frame: bytes) -> bytes:
    return b'{"t":%.6f,"dir":"%b","frame":%b}\n' % (ts / 1000, direction, _checked(frame))


def _checked(text: bytes) -> bytes:
    """JSON as it is, anything else as a string of it, as in every recording."""
    return _harmless(text if _is_json(text) else _encode(text.decode("utf-8", "replace")))


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # Numbers that Python's types do not hold are JSON all the same.
        try:
            json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)


def _harmless(text: bytes) -> bytes:
    """The same JSON without anything that ends a line, moves a cursor or turns text around."""
    text = one_line(text.replace(b"\n", b" "))
    return _CONTROLS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), text)
