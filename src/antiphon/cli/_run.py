"""`antiphon run MODULE:AGENT`: serve somebody's agent on standard input and output, or on a socket.

The descriptors are secured before the module is imported, so that nothing it prints, at import or
later, can reach the wire; the serving itself is `serve_stdio`'s. With `--listen` they are no wire, and
it is that of `serve_unix` and `serve_tcp`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING

from antiphon.cli._arguments import UsageError
from antiphon.cli._output import tell

if TYPE_CHECKING:
    import argparse

    from antiphon import Agent
    from antiphon.journal import Journal
    from antiphon.transports import TcpAddress, UnixAddress

__all__ = ["run"]


class _NoAgentError(Exception):
    """There is nothing to serve; the text says why."""


def run(options: argparse.Namespace) -> int:
    """Serve until the client leaves or a signal: 0. 1 if there is no such agent, or no listening."""
    module, name = _split(options.agent)
    address = None if options.listen is None else _address(options.listen)
    if address is None:
        from antiphon.transports import secure_stdio

        secure_stdio()
    # As `python -m` does it: the folder one is in comes first.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  (sys.path holds text)
    agent = _find(module, name)
    if agent is None:
        return 1
    journal = None
    if options.journal is not None:
        journal = _journal(options.journal)
        if journal is None:
            return 1
    if address is not None:
        return _listen(agent, address, journal)

    from antiphon import serve_stdio

    with contextlib.suppress(KeyboardInterrupt):
        serve_stdio(agent, journal=journal)
    return 0


def _journal(directory: str) -> Journal | None:
    """The journal in a directory, made if there is none; None after saying why it cannot be one."""
    import asyncio

    from antiphon.journal import JournalError, SqliteJournal

    async def look() -> None:
        # One of its own: the journal that serves belongs to the loop that does.
        journal = SqliteJournal(directory)
        try:
            await journal.make()
        finally:
            await journal.aclose()

    try:
        asyncio.run(look())
    except (JournalError, OSError) as error:
        tell(f"antiphon run: the journal cannot be used: {error}\n")
        return None
    return SqliteJournal(directory)


def _address(text: str) -> TcpAddress | UnixAddress:
    from antiphon.transports import parse_address

    try:
        return parse_address(text)
    except ValueError as error:
        raise UsageError(f"antiphon run: --listen {error}") from None


def _listen(agent: Agent, address: TcpAddress | UnixAddress, journal: Journal | None) -> int:
    """Serve all who connect, until a signal."""
    from antiphon import serve_tcp, serve_unix
    from antiphon.transports import UnixAddress

    # The library's log: whom it has refused, and what has failed.
    logging.basicConfig(format="antiphon run: %(message)s", level=logging.WARNING)
    try:
        if isinstance(address, UnixAddress):
            server = serve_unix(agent, address.path, journal=journal, on_listening=_tell_where)
        else:
            server = serve_tcp(
                agent, address.host, address.port, journal=journal, on_listening=_tell_where
            )
    except ValueError as error:
        why = str(error).replace(
            ": allow_remote=True", "; only a program can: serve_tcp(…, allow_remote=True)"
        )
        raise UsageError(f"antiphon run: --listen {address}: {why}") from None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        tell(f"antiphon run: cannot listen at {address}: {reason}\n")
        return 1
    return 0


def _tell_where(address: str) -> None:
    tell(f"antiphon run: listening at {address}\n")


def _split(text: str) -> tuple[str, str]:
    module, colon, name = text.partition(":")
    name = name.removesuffix("()")
    if module.endswith(".py") and colon:
        hint = module.removesuffix(".py").replace("/", ".").lstrip(".")
        raise UsageError(f"antiphon run: {text!r} names a file; try {hint}:{name}")
    words = [*module.split("."), *name.split(".")]
    if not colon or not all(word.isidentifier() for word in words):
        raise UsageError(f"antiphon run: {text!r} is not MODULE:AGENT, e.g. echo:Echo")
    return module, name


def _find(module_name: str, name: str) -> Agent | None:
    """The agent, or None after saying on standard error why there is none."""
    try:
        return _made(module_name, name)
    except _NoAgentError as error:
        tell(f"antiphon run: {error}\n")
        return None


def _made(module_name: str, name: str) -> Agent:
    from antiphon import Agent
    from antiphon._connect import left_to_the_command

    try:
        with left_to_the_command() as ignored:
            module = importlib.import_module(module_name)
    except BaseException:  # noqa: BLE001  (somebody else's code; sys.exit() at import is no exit of ours)
        traceback.print_exc()
        raise _NoAgentError(f"cannot import {module_name!r}: see above") from None
    if ignored:
        tell(f"antiphon run: {module_name} serves an agent by itself; left to this command\n")
    found: object = module
    for word in name.split("."):
        try:
            found = getattr(found, word)
        except AttributeError:
            others = _agents_in(vars(module))
            raise _NoAgentError(f"there is no {name!r} in {module_name!r}{others}") from None
    if not isinstance(found, Agent) and callable(found):
        try:
            found = found()
        except BaseException:  # noqa: BLE001  (as above)
            traceback.print_exc()
            raise _NoAgentError(f"{module_name}:{name} could not be made: see above") from None
    if isinstance(found, Agent):
        return found
    raise _NoAgentError(f"{module_name}:{name} is no Agent but {type(found).__name__!r}")


def _agents_in(names: dict[str, object]) -> str:
    from antiphon import Agent

    agents = [
        name
        for name, value in names.items()
        if not name.startswith("_")
        and (isinstance(value, Agent) or (isinstance(value, type) and issubclass(value, Agent)))
        and value is not Agent
    ]
    return f"; its agents: {', '.join(sorted(agents))}" if agents else ""
