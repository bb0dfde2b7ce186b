"""`LocalNode` looks at what this side knows of the transport, and at nothing that was sent."""

from __future__ import annotations

import os
from typing import Any

import pytest

from antiphon.journal import AttachContext, AttachRefused, Grant, LocalNode, admit

SPOOFED = {"id": "root@example", "kind": "user"}


def context(transport: Any, actor: Any = None, capability: Any = None) -> AttachContext:
    return AttachContext("s-41", actor, "unknown", capability, 0, transport)


OURS = {"uid": os.geteuid(), "gid": 0, "pid": 7}
LOCAL: list[Any] = [
    {"kind": "process", "peer": None},
    {"kind": "stdio", "peer": None},
    {"kind": "stdio"},
    {"kind": "unix", "peer": OURS},
]
ELSEWHERE: list[Any] = [
    None,
    {},
    {"peer": OURS},
    {"kind": None, "peer": OURS},
    {"kind": ["stdio"]},
    {"kind": "STDIO"},
    {"kind": "stdio "},
    {"kind": "tcp", "peer": {"host": "127.0.0.1", "port": 4711}},
    {"kind": "tcp", "peer": OURS},
    {"kind": "websocket", "peer": None},
    {"kind": "unix"},
    {"kind": "unix", "peer": None},
    {"kind": "unix", "peer": {}},
    {"kind": "unix", "peer": {"uid": None}},
    {"kind": "unix", "peer": {"uid": str(os.geteuid())}},
    {"kind": "unix", "peer": {"uid": float(os.geteuid())}},
    {"kind": "unix", "peer": {"uid": os.geteuid() + 1}},
    {"kind": "unix", "peer": [os.geteuid()]},
    "stdio",
    ["kind", "stdio"],
    5,
]


@pytest.mark.covers("AP18")
@pytest.mark.parametrize("transport", LOCAL)
async def test_whoever_is_local_is_admitted_for_good(transport: Any) -> None:
    grant = await admit(LocalNode(), context(transport))

    assert grant == Grant({"id": "local", "kind": "local_node"}, "s-41", "local_node")
    assert isinstance(grant, Grant)
    assert grant.expires_at is None
    assert grant.lens is None


@pytest.mark.covers("AP18")
@pytest.mark.parametrize("transport", ELSEWHERE)
@pytest.mark.parametrize("actor", [None, SPOOFED])
@pytest.mark.parametrize("capability", [None, "RXC1.a.b", {"kind": "stdio"}])
def test_whoever_is_not_is_refused_whatever_was_sent(
    transport: Any, actor: Any, capability: Any
) -> None:
    with pytest.raises(AttachRefused) as refused:
        LocalNode()(context(transport, actor, capability))

    assert refused.value.reason == "not_local"


def test_another_user_s_superuser_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert LocalNode()(context({"kind": "unix", "peer": {"uid": 1000}})).via == "local_node"
    with pytest.raises(AttachRefused):
        LocalNode()(context({"kind": "unix", "peer": {"uid": 0}}))


def test_true_is_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    with pytest.raises(AttachRefused):
        LocalNode()(context({"kind": "unix", "peer": {"uid": True}}))


def test_where_there_are_no_users_a_unix_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "geteuid")
    with pytest.raises(AttachRefused):
        LocalNode()(context({"kind": "unix", "peer": {"uid": 0}}))


@pytest.mark.parametrize(
    ("asserted", "actor"),
    [
        (SPOOFED, SPOOFED),
        ({"id": "me"}, {"id": "me"}),
        ({"id": 5}, {"id": "local", "kind": "local_node"}),
        ({"name": "me"}, {"id": "local", "kind": "local_node"}),
        ("me", {"id": "local", "kind": "local_node"}),
        (None, {"id": "local", "kind": "local_node"}),
    ],
)
async def test_a_local_actor_may_say_who_it_is(asserted: Any, actor: Any) -> None:
    grant = await admit(LocalNode(), context({"kind": "stdio"}, asserted))

    assert isinstance(grant, Grant)
    assert grant.actor == actor


def test_it_shows_itself_as_what_to_write() -> None:
    assert repr(LocalNode()) == "LocalNode()"
