"""The policy that admits whoever is on this machine as this user (resumable-sessions §11.3).

Responsible for `LocalNode`, which is asked where nobody names another. Leaves tokens to `_token`, and
what a policy may do at all to `_attach`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from antiphon.journal._attach import AttachRefused, Grant

if TYPE_CHECKING:
    from antiphon.journal._attach import AttachContext

__all__ = ["LocalNode"]

#: Both ends are in one process, or joined by pipes that only a co-resident program can hold.
_LOCAL: Final = frozenset(("process", "stdio"))


class LocalNode:
    """Admits whoever is on this machine as this user, for as long as the link lives.

    It looks at what this side knows of the transport, and at nothing that was sent: memory pairs and
    standard streams are local, and so is a Unix socket whose other end runs as our own user. A token,
    or who an attacher says to be, changes nothing.
    """

    def __call__(self, context: AttachContext) -> Grant:
        """Grant or refuse (AP18).

        Raises:
            AttachRefused: the transport is another, or unknown.
        """
        if not _is_local(context.transport):
            raise AttachRefused("not_local")
        return Grant(_actor(context.actor), context.session_id, "local_node")

    def __repr__(self) -> str:
        return "LocalNode()"


def _is_local(transport: Any) -> bool:
    if not isinstance(transport, Mapping):
        return False
    link = cast("Mapping[str, Any]", transport)
    kind = link.get("kind")
    if not isinstance(kind, str):
        return False
    return kind in _LOCAL or (kind == "unix" and _is_ours(link.get("peer")))


def _is_ours(peer: Any) -> bool:
    if not isinstance(peer, Mapping) or not hasattr(os, "geteuid"):
        return False
    uid = cast("Mapping[str, Any]", peer).get("uid")
    return type(uid) is int and uid == os.geteuid()


def _actor(asserted: Any) -> Any:
    if isinstance(asserted, Mapping):
        actor = cast("Mapping[str, Any]", asserted)
        if isinstance(actor.get("id"), str):
            return actor
    return {"id": "local", "kind": "local_node"}
