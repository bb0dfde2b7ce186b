"""What is alike on both sides about calling the peer: gates, patience, extension methods.

`AgentPeer` and `ClientPeer` derive from it and say which side they call; the connection underneath
moves the frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from antiphon._errors import CapabilityError, LocalProtocolError
from antiphon.schema import UNSET, UnsetType, decode, encode_checked
from antiphon.sessions._methods import allowed_by, default_timeout, refuse_unstable, table, tag_of

if TYPE_CHECKING:
    from antiphon.core import Side
    from antiphon.runtime import Connection
    from antiphon.schema import Method
    from antiphon.transports import Transport

__all__ = ["Peer", "check_extension"]


class Peer:
    """Base of the two peers."""

    #: The side that is called.
    side: ClassVar[Side]

    transport: Transport
    connection: Connection
    unstable: bool
    #: The peer's capabilities as builtins; what gates look at.
    tree: Any

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.transport.describe()}>"

    def offers(self, path: str) -> bool:
        """Whether the peer advertised a capability.

        An agent's are e.g. "sessionCapabilities.list", a client's "fs.readTextFile".
        """
        return allowed_by(self.tree, path)

    async def request_extension(
        self,
        method: str,
        params: Any = None,
        *,
        timeout: float | None | UnsetType = UNSET,
    ) -> Any:
        """Ask an extension method (its name starts with `_`); the result as plain JSON values."""
        check_extension(method)
        raw = await self.connection.request(
            method,
            None if params is None else encode_checked(params),
            self._timeout(method, timeout),
        )
        return decode(Any, raw)

    async def notify_extension(self, method: str, params: Any = None) -> None:
        """Send an extension notification (its name starts with `_`)."""
        check_extension(method)
        self.connection.notify(method, None if params is None else encode_checked(params))
        await self.connection.drain()

    # -------------------------------------------------------------- for the two peers

    def _row_of(self, params: Any, kind: Literal["request", "notification"]) -> Method:
        """The method that parameters belong to, if it may be called.

        Raises:
            TypeError: they belong to none that the peer handles.
            LocalProtocolError: it is unstable, and this connection is not.
            CapabilityError: the peer did not advertise it (R1-28).
        """
        row = table().row_of(params, kind, self.side)
        refuse_unstable(row, unstable=self.unstable)
        gate = row.gate
        if row.name == "elicitation/create":  # R1-128: each of its modes has its own
            gate = f"elicitation.{tag_of(params)}"
        if gate is not None:
            self._require(row.name, gate)
        return row

    def _require(self, method: str, gate: str) -> None:
        if not allowed_by(self.tree, gate):
            raise CapabilityError(method, f"{self.side}Capabilities.{gate}")

    def _timeout(self, method: str, given: float | None | UnsetType) -> float | None:
        if isinstance(given, UnsetType):
            return default_timeout(self.connection.limits, method)
        return given


def check_extension(method: str) -> None:
    """Raise `LocalProtocolError` for a name that no extension may have."""
    if not method.startswith("_"):
        msg = f"an extension method starts with an underscore, not {method!r}"
        raise LocalProtocolError(msg)
