"""Writes a file as an agent would have it written: `writer.py ROOT NAME MODE`, to be killed.

MODE `hold` writes once and stops for ever before the rename, when it has said `ready`. Any other is
one letter: it says `ready` when the first write is done, and goes on with a mebibyte of that letter
and one of the same in capitals, in turn, until its standard input ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import sys

from antiphon.schema import v1_unstable
from antiphon.services import Files


class Ctx:
    """No session's own directories are needed."""

    session_id = "s"
    roots = ()


def say_ready() -> None:
    """Tell who started this."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def stop_before_rename(*_args: object, **_kwargs: object) -> None:
    """In place of `os.rename`."""
    say_ready()
    while True:
        signal.pause()


async def main(root: str, name: str, mode: str) -> None:
    """Write until told to end."""
    files = Files(root)

    async def write(text: str) -> None:
        params = v1_unstable.WriteTextFileRequest(
            session_id="s", path=f"{root}/{name}", content=text
        )
        await files.write_text_file(params, Ctx())

    if mode == "hold":
        os.rename = stop_before_rename
        await write("new")
    for number, letter in enumerate(itertools.cycle([mode, mode.upper()])):
        await write(letter * (1 << 20))
        if not number:
            say_ready()
        if select.select([sys.stdin], [], [], 0)[0]:
            break


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
