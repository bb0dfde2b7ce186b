"""The fixtures of `antiphon.testing` for pytest, loaded wherever pytest and antiphon are installed.

Each is the function of the same name, so that a test need import nothing. Loading this module must cost
nothing to those who use none of it: what stands behind a fixture is imported when a test asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from antiphon import AgentPeer
    from antiphon.testing import ByteTransport, RawPeer
    from antiphon.transports import MemoryTransport

__all__ = [
    "antiphon_byte_pair",
    "antiphon_memory_pair",
    "antiphon_raw_agent",
    "antiphon_raw_client",
    "antiphon_virtual",
]


@pytest.fixture
def antiphon_memory_pair() -> Callable[[], tuple[MemoryTransport, MemoryTransport]]:
    """`antiphon.testing.memory_pair`: two transports joined in memory."""
    from antiphon.testing import memory_pair

    return memory_pair


@pytest.fixture
def antiphon_byte_pair() -> Callable[..., tuple[ByteTransport, ByteTransport]]:
    """`antiphon.testing.byte_pair`: two transports joined by a simulated stream, with faults."""
    from antiphon.testing import byte_pair

    return byte_pair


@pytest.fixture
def antiphon_raw_agent() -> Callable[..., AbstractAsyncContextManager[tuple[AgentPeer, RawPeer]]]:
    """`antiphon.testing.raw_agent`: a client under test, shaken hands with a raw agent."""
    from antiphon.testing import raw_agent

    return raw_agent


@pytest.fixture
def antiphon_raw_client() -> Callable[..., AbstractAsyncContextManager[RawPeer]]:
    """`antiphon.testing.raw_client`: an agent under test, shaken hands with a raw client."""
    from antiphon.testing import raw_client

    return raw_client


@pytest.fixture
def antiphon_virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """`antiphon.testing.run_virtual`: runs a coroutine in a time that jumps."""
    from antiphon.testing import run_virtual

    return run_virtual
