"""What the command lends the agent: the library's own terminals, watched.

Confinement, limits and processes are `antiphon.services`' work. Added here is only what a display needs
to know: what the agent's commands print.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from antiphon.schema import v1_unstable as v1
from antiphon.services import Terminals

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.services import Guard, ServiceContext

__all__ = ["LentTerminals"]

#: Between two looks at what a running command has printed.
LOOK_EVERY = 0.2
#: What is shown of one command while it runs; the agent gets what it asked for in any case.
SHOWN_CHARS = 64 * 1024


class LentTerminals(Terminals):
    """`Terminals` that shows what the commands print as they print it."""

    def __init__(
        self,
        *roots: str,
        guard: Guard,
        show: Callable[[str, str], None],
    ) -> None:
        super().__init__(*roots, guard=guard)
        self._show = show
        self._shown: dict[str, str] = {}
        self._lookers: dict[str, asyncio.Task[None]] = {}

    async def create_terminal(
        self, params: v1.CreateTerminalRequest, ctx: ServiceContext
    ) -> v1.CreateTerminalResponse:
        created = await super().create_terminal(params, ctx)
        terminal_id = created.terminal_id
        self._shown[terminal_id] = ""
        self._lookers[terminal_id] = asyncio.create_task(self._look(terminal_id, ctx))
        return created

    async def wait_for_terminal_exit(
        self, params: v1.WaitForTerminalExitRequest, ctx: ServiceContext
    ) -> v1.WaitForTerminalExitResponse:
        status = await super().wait_for_terminal_exit(params, ctx)
        await self._glance(params.terminal_id, ctx)
        return status

    async def release_terminal(
        self, params: v1.ReleaseTerminalRequest, ctx: ServiceContext
    ) -> v1.ReleaseTerminalResponse:
        looker = self._lookers.pop(params.terminal_id, None)
        if looker is not None:
            looker.cancel()
            await self._glance(params.terminal_id, ctx)
            self._shown.pop(params.terminal_id, None)
        return await super().release_terminal(params, ctx)

    async def aclose(self) -> None:
        for looker in self._lookers.values():
            looker.cancel()
        await asyncio.gather(*self._lookers.values(), return_exceptions=True)
        self._lookers.clear()
        await super().aclose()

    async def _look(self, terminal_id: str, ctx: ServiceContext) -> None:
        # A terminal has no event for output.
        while not await self._glance(terminal_id, ctx):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY)

    async def _glance(self, terminal_id: str, ctx: ServiceContext) -> bool:
        """Show what is new; True when there will be nothing more."""
        params = v1.TerminalOutputRequest(session_id=ctx.session_id, terminal_id=terminal_id)
        shown = self._shown.get(terminal_id)
        # A look must not fail the agent's call; a terminal that is gone has nothing to show.
        with contextlib.suppress(Exception):
            state = await super().terminal_output(params, ctx)
            if shown is None or len(shown) >= SHOWN_CHARS:
                return True
            # Output beyond the terminal's limit loses its beginning; then nothing fits any more.
            if state.output.startswith(shown) and len(state.output) > len(shown):
                self._shown[terminal_id] = state.output
                self._show(terminal_id, state.output[len(shown) :])
            return isinstance(state.exit_status, v1.TerminalExitStatus)
        return True
