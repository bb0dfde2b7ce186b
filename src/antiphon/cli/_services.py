"""What the command lends the agent: the library's own terminals, watched.

Confinement, limits and processes are `antiphon.services`' work. Added here is only a bound on what a
display is told of one command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.services import Terminals

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.schema import v1_unstable as v1
    from antiphon.services import Guard, ServiceContext

__all__ = ["LentTerminals"]

#: What is shown of one command while it runs; the agent gets what it asked for in any case.
SHOWN_CHARS = 64 * 1024


class LentTerminals(Terminals):
    """`Terminals` that shows what the commands print as they print it: its beginning.

    `show` is called with the terminal's id and the text.
    """

    def __init__(self, *roots: str, guard: Guard, show: Callable[[str, str], None]) -> None:
        super().__init__(*roots, guard=guard, on_output=self._printed)
        self._show = show
        self._left: dict[str, int] = {}

    def _printed(self, _session_id: str, terminal_id: str, text: str) -> None:
        left = self._left.get(terminal_id, SHOWN_CHARS)
        if left > 0:
            self._left[terminal_id] = left - len(text)
            self._show(terminal_id, text[:left])

    async def release_terminal(
        self, params: v1.ReleaseTerminalRequest, ctx: ServiceContext
    ) -> v1.ReleaseTerminalResponse:
        try:
            return await super().release_terminal(params, ctx)
        finally:
            self._left.pop(params.terminal_id, None)
