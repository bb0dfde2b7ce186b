"""One delivered update: decoded when looked at, its bytes kept."""

from __future__ import annotations

import msgspec

from antiphon.schema import UnknownUpdate, v1
from antiphon.sessions import Update


def made(update: bytes, *, meta: bytes = b"") -> Update:
    extra = b',"_meta":' + meta if meta else b""
    frame = (
        b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":'
        + update
        + extra
        + b"}}"
    )
    return Update("s", "turn", msgspec.Raw(update), frame)


CHUNK = b'{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"hi"},"zzz":[1]}'


def test_an_update_is_typed_and_keeps_the_bytes_it_came_in() -> None:
    update = made(CHUNK)
    assert isinstance(update.value, v1.AgentMessageChunk)
    assert update.kind == "agent_message_chunk"
    assert update.text == "hi"
    assert update.raw == CHUNK
    assert update.raw in update.frame


def test_an_update_is_decoded_once() -> None:
    update = made(CHUNK)
    assert update.value is update.value


def test_an_unknown_kind_keeps_everything() -> None:
    raw = b'{"sessionUpdate":"brand_new","x":{"y":null}}'
    update = made(raw)
    assert isinstance(update.value, UnknownUpdate)
    assert update.kind == "brand_new"
    assert update.text == ""
    assert update.raw == raw


def test_what_has_no_tag_has_no_kind() -> None:
    for raw in (b"{}", b"[]", b"5", b'{"sessionUpdate":5}'):
        assert made(raw).kind == ""
        assert isinstance(made(raw).value, UnknownUpdate)


def test_only_the_agents_own_message_has_text() -> None:
    def chunk(tag: bytes, content: bytes) -> Update:
        return made(b'{"sessionUpdate":"' + tag + b'","content":' + content + b"}")

    assert chunk(b"agent_thought_chunk", b'{"type":"text","text":"x"}').text == ""
    assert chunk(b"user_message_chunk", b'{"type":"text","text":"x"}').text == ""
    image = b'{"type":"image","data":"","mimeType":"image/png"}'
    assert chunk(b"agent_message_chunk", image).text == ""


def test_the_meta_of_the_notification_is_at_hand() -> None:
    assert made(CHUNK, meta=b'{"k":1}').meta == {"k": 1}
    assert made(CHUNK).meta is None
    assert Update("s", "turn", msgspec.Raw(CHUNK), b"").meta is None


def test_an_update_shows_what_it_holds() -> None:
    assert repr(made(CHUNK)) == "Update(AgentMessageChunk(content=TextContent(text='hi')))"
