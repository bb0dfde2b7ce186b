"""The method table as the two sides use it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from antiphon import LocalProtocolError, RemoteProtocolError
from antiphon.core import Limits
from antiphon.schema import v1, v1_unstable
from antiphon.sessions._methods import (
    allowed_by,
    default_timeout,
    encode_result_of,
    read_result,
    refuse_unstable,
    table,
    tag_of,
    tree_of,
)


@pytest.mark.parametrize("raw", [b"5", b"[]", b'{"sessionId":5}', b"{}"])
def test_a_malformed_answer_is_the_peer_s_fault_and_names_its_method(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^the answer to session/new is malformed: "):
        read_result("session/new", v1.NewSessionResponse, raw)


@pytest.mark.parametrize("gate", ["a", "a.b", "a.b.c"])
def test_a_gate_is_open_for_true_and_for_any_object_an_empty_one_included(gate: str) -> None:
    *parents, last = gate.split(".")
    for value in (True, {}, {"x": 1}):
        tree: dict[str, Any] = {last: value}
        for name in reversed(parents):
            tree = {name: tree}
        assert allowed_by(tree, gate)


@pytest.mark.parametrize("value", [None, False, 0, 1, "yes", "", []])
@pytest.mark.covers("R1-28")
def test_a_gate_is_closed_for_everything_else(value: Any) -> None:
    assert not allowed_by({"a": value}, "a")
    assert not allowed_by({"a": value}, "a.b")
    assert not allowed_by({}, "a")
    assert not allowed_by(None, "a")


def test_a_method_without_a_gate_is_always_allowed() -> None:
    assert allowed_by(None, None)


def test_stable_parameters_belong_to_the_same_row_as_their_superset() -> None:
    rows = table()
    stable = v1.NewSessionRequest(cwd="/", mcp_servers=[])
    superset = v1_unstable.NewSessionRequest(cwd="/", mcp_servers=[])
    assert rows.row_of(stable, "request", "agent") is rows.row_of(superset, "request", "agent")
    assert rows.row_of(stable, "request", "agent").name == "session/new"


def test_a_subclass_of_parameters_belongs_to_their_row() -> None:
    class Mine(v1.CloseSessionRequest, kw_only=True):
        pass

    assert table().row_of(Mine(session_id="s"), "request", "agent").name == "session/close"


def test_parameters_for_the_other_side_have_no_row() -> None:
    read = v1.ReadTextFileRequest(session_id="s", path="/x")
    assert table().row_of(read, "request", "client").name == "fs/read_text_file"
    with pytest.raises(TypeError, match="no request to the agent takes ReadTextFileRequest"):
        table().row_of(read, "request", "agent")
    with pytest.raises(TypeError, match="no notification to the client"):
        table().row_of(read, "notification", "client")


def test_what_is_no_parameter_at_all_has_no_row() -> None:
    with pytest.raises(TypeError):
        table().row_of({"cwd": "/"}, "request", "agent")


def test_unions_of_parameters_belong_to_their_method() -> None:
    form = v1.ElicitationFormMode(
        message="?", requested_schema=v1.ElicitationSchema(), session_id="s"
    )
    assert table().row_of(form, "request", "client").name == "elicitation/create"


def test_people_are_waited_for_longer_than_programs() -> None:
    limits = Limits(request_timeout=1.0, permission_timeout=9.0)
    assert default_timeout(limits, "session/new") == 1.0
    assert default_timeout(limits, "session/prompt") is None
    assert default_timeout(limits, "terminal/wait_for_exit") is None
    assert default_timeout(limits, "session/request_permission") == 9.0
    assert default_timeout(limits, "authenticate") == 9.0
    # A guard may ask a person before these.
    assert default_timeout(limits, "fs/write_text_file") == 9.0
    assert default_timeout(limits, "terminal/create") == 9.0
    assert default_timeout(limits, "terminal/output") == 1.0


def test_unstable_methods_are_refused_unless_asked_for() -> None:
    fork = table().requests["agent"]["session/fork"]
    with pytest.raises(LocalProtocolError, match="session/fork is unstable"):
        refuse_unstable(fork, unstable=False)
    refuse_unstable(fork, unstable=True)
    refuse_unstable(table().requests["agent"]["session/new"], unstable=False)


def test_a_void_result_may_be_none_and_others_may_not() -> None:
    close = encode_result_of(table().requests["agent"]["session/close"])
    assert close(None) == b"{}"
    assert close(v1.CloseSessionResponse()) == b"{}"
    new = encode_result_of(table().requests["agent"]["session/new"])
    with pytest.raises(TypeError, match="session/new returned NoneType"):
        new(None)
    for other in (
        {"sessionId": "s"},
        v1.LoadSessionResponse(),
        v1.Cost(amount=1.0, currency="EUR"),
    ):
        with pytest.raises(TypeError, match=f"returned {type(other).__name__}, not a result of it"):
            new(other)


class OwnSession(v1.NewSessionResponse, kw_only=True):
    """A result with a member that the protocol does not name."""

    models: list[str]


def test_a_result_is_of_its_method_in_any_version_or_a_subclass_of_it() -> None:
    new = encode_result_of(table().requests["agent"]["session/new"])
    assert new(v1.NewSessionResponse(session_id="s")) == b'{"sessionId":"s"}'
    assert new(v1_unstable.NewSessionResponse(session_id="s")) == b'{"sessionId":"s"}'
    own = OwnSession(session_id="s", models=["m"])
    assert new(own) == b'{"sessionId":"s","models":["m"]}'
    form = encode_result_of(table().requests["client"]["elicitation/create"])
    assert form(v1.ElicitationDeclineAction()) == b'{"action":"decline"}'
    with pytest.raises(TypeError, match="returned NewSessionResponse"):
        form(v1.NewSessionResponse(session_id="s"))


def test_a_result_that_may_be_anything_is_written_as_it_is() -> None:
    forward = encode_result_of(table().requests["agent"]["proxy/successor"])
    assert forward({"any": [None]}) == b'{"any":[null]}'
    assert forward(None) == b"null"


def test_tags_are_read_off_any_value() -> None:
    assert tag_of(v1.TextContent(text="x")) == "text"
    assert tag_of(v1.Cost(amount=1.0, currency="EUR")) == ""
    assert tag_of(object()) == ""


def test_a_capability_struct_becomes_the_tree_the_wire_has() -> None:
    tree = tree_of(
        v1.ClientCapabilities(fs=v1.FileSystemCapabilities(read_text_file=True), terminal=False)
    )
    assert tree == {"fs": {"readTextFile": True}, "terminal": False}
    assert allowed_by(tree, "fs.readTextFile")
    assert not allowed_by(tree, "fs.writeTextFile")
    assert not allowed_by(tree, "terminal")


def test_the_table_has_every_stable_method_of_both_directions() -> None:
    def stable(rows: dict[str, Any]) -> set[str]:
        return {row.name for row in rows.values() if row.stable}

    rows = table()
    assert stable(rows.requests["agent"]) | stable(rows.notifications["agent"]) == {
        "initialize",
        "authenticate",
        "logout",
        "session/new",
        "session/load",
        "session/resume",
        "session/list",
        "session/close",
        "session/delete",
        "session/set_mode",
        "session/set_config_option",
        "session/prompt",
        "session/cancel",
        "$/cancel_request",
    }
    assert stable(rows.requests["client"]) | stable(rows.notifications["client"]) == {
        "session/update",
        "session/request_permission",
        "fs/read_text_file",
        "fs/write_text_file",
        "terminal/create",
        "terminal/output",
        "terminal/wait_for_exit",
        "terminal/kill",
        "terminal/release",
        "elicitation/create",
        "elicitation/complete",
        "$/cancel_request",
    }


def test_none_is_a_result_exactly_where_no_member_is_required() -> None:
    rows = [row for row in v1_unstable.METHODS if row.kind == "request" and row.result is not Any]
    empty: dict[str, bool] = {}
    for row in rows:
        kind: Any = row.result
        empty[row.name] = isinstance(kind, msgspec.StructMeta) and not any(
            field.required
            for field in msgspec.structs.fields(kind)  # type: ignore[arg-type]
        )
        if empty[row.name]:
            assert encode_result_of(row)(None) == b"{}"
        else:
            with pytest.raises(TypeError, match="NoneType"):
                encode_result_of(row)(None)
    assert set(empty.values()) == {True, False}
