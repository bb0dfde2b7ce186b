"""Where an agent listens, as text: `unix:PATH` and `tcp:HOST:PORT`.

Responsible for reading and writing that text, and for saying what is wrong with it before anything is
opened. Leaves connecting to `_socket`, listening to `_listener`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Address", "TcpAddress", "UnixAddress", "parse_address"]

#: Bytes that the system has for a path, its end included.
_ROOM = 108 if sys.platform == "linux" else 104

_FORMS = "unix:PATH or tcp:HOST:PORT"


@dataclass(frozen=True)
class UnixAddress:
    """A socket in the file system, or an abstract one of Linux where the path begins with "@".

    Raises:
        ValueError: there is no such path: empty, with a NUL, longer than the system's 107 (elsewhere
            103) bytes; or abstract, and this is not Linux.
    """

    path: str

    def __post_init__(self) -> None:
        path = self.path
        if not path or "\0" in path:
            msg = f"{path!r} is no path of a socket"
            raise ValueError(msg)
        size, most = len(os.fsencode(path)), _ROOM - 1
        if size > most:
            msg = f"the path of a socket has at most {most} bytes, not {size}: {path!r}"
            raise ValueError(msg)
        if self.abstract and (path == "@" or sys.platform != "linux"):
            msg = f"{path!r} is no abstract socket: these have a name, and are Linux's alone"
            raise ValueError(msg)

    @property
    def abstract(self) -> bool:
        """Whether it is in no file system."""
        return self.path.startswith("@")

    @property
    def sockaddr(self) -> str:
        """As the operating system takes it."""
        return "\0" + self.path[1:] if self.abstract else self.path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    """A host by name or number, without brackets, and a port.

    Raises:
        ValueError: no host, or a port that is not from 0 to 65535.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or any(char.isspace() or char in "\0[]/" for char in self.host):
            msg = f"{self.host!r} is no host"
            raise ValueError(msg)
        if not 0 <= self.port <= 65535:
            msg = f"{self.port} is no port: these go from 0 to 65535"
            raise ValueError(msg)

    def __str__(self) -> str:
        return (
            f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"
        )


Address: TypeAlias = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Read `unix:PATH`, `unix:@NAME` (abstract, on Linux), `tcp:HOST:PORT` or `tcp:[IPV6]:PORT`.

    Raises:
        ValueError: it is none of these; the text says why.
    """
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in {"unix", "tcp"}:
        msg = f"{text!r} is no address: {_FORMS}"
        raise ValueError(msg)
    return UnixAddress(rest) if scheme == "unix" else _tcp(text, rest)


def _tcp(text: str, rest: str) -> TcpAddress:
    host, colon, port = rest.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        msg = f"{text!r} has no port: tcp:HOST:PORT"
        raise ValueError(msg)
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    elif ":" in host:
        msg = f"{text!r}: an IPv6 address stands in brackets, as in tcp:[::1]:4711"
        raise ValueError(msg)
    return TcpAddress(host, int(port))
