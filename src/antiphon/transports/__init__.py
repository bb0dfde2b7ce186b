"""Moving frames: the memory pair, our own stdio, a spawned process, a socket.

What a frame means is left to `core`; who is at the other end, to `runtime`. The modules are loaded
when their names are first used, so that an agent on stdio does not load what starts processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon._launch import Environment, inherit_env
    from antiphon.transports._address import TcpAddress, UnixAddress, parse_address
    from antiphon.transports._memory import MemoryTransport, memory_pair
    from antiphon.transports._socket import SocketTransport
    from antiphon.transports._spawned import ProcessTransport
    from antiphon.transports._stdio import StdioTransport, secure_stdio
    from antiphon.transports._transport import Receiver, Transport

__all__ = [
    "Environment",
    "MemoryTransport",
    "ProcessTransport",
    "Receiver",
    "SocketTransport",
    "StdioTransport",
    "TcpAddress",
    "Transport",
    "UnixAddress",
    "inherit_env",
    "memory_pair",
    "parse_address",
    "secure_stdio",
]

_HOMES = {
    "Environment": "antiphon._launch",
    "MemoryTransport": "antiphon.transports._memory",
    "ProcessTransport": "antiphon.transports._spawned",
    "Receiver": "antiphon.transports._transport",
    "SocketTransport": "antiphon.transports._socket",
    "StdioTransport": "antiphon.transports._stdio",
    "TcpAddress": "antiphon.transports._address",
    "Transport": "antiphon.transports._transport",
    "UnixAddress": "antiphon.transports._address",
    "inherit_env": "antiphon._launch",
    "memory_pair": "antiphon.transports._memory",
    "parse_address": "antiphon.transports._address",
    "secure_stdio": "antiphon.transports._stdio",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
