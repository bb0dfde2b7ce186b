"""The row of the method table, and what every wire struct has in common."""

from __future__ import annotations

import gc

import msgspec
import pytest

from antiphon.schema import UNSET, Method, Wire, v1


def test_row_is_frozen() -> None:
    row = v1.METHODS[0]

    assert isinstance(row, Method)
    with pytest.raises(AttributeError):
        row.name = "other"  # type: ignore[misc]


def test_members_are_camel_case_on_the_wire() -> None:
    class Made(Wire, kw_only=True):
        session_id: str

    assert msgspec.json.encode(Made(session_id="s")) == b'{"sessionId":"s"}'


def test_struct_shows_only_what_is_set() -> None:
    assert repr(v1.TextContent(text="t")) == "TextContent(text='t')"


def test_collector_does_not_track_structs() -> None:
    assert not gc.is_tracked(v1.TextContent(text="t", meta={"a": 1}))


def test_absent_is_false_in_a_condition() -> None:
    capabilities = v1.ClientCapabilities()

    assert capabilities.fs is UNSET
    assert not (capabilities.fs and capabilities.fs.read_text_file)


def test_fields_have_no_positions() -> None:
    with pytest.raises(TypeError):
        v1.NewSessionResponse("s")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
