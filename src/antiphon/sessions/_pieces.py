"""What is new in a command's output, when all that can be seen is its end, again and again.

`terminal/output` answers the last bytes of what a command has written. Responsible for finding in each
such answer what the one before did not have, and for knowing where something may be missing. There is
no clock, message or task in here. Leaves asking, and when, to `Terminal`.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pieces"]

#: Characters that two answers must have in common to be taken for neighbours. Fewer may be chance:
#: many lines begin and end alike.
SURE: Final = 64
#: Places that are tried, so that output that repeats itself costs no more than other output.
_TRIES: Final = 64
#: A character of UTF-8 is four bytes at most, of which three can be there.
_CUT: Final = 3
#: What stands in a text for the bytes of half a character.
_BROKEN: Final = "\ufffd"


class Pieces:
    """Cuts a growing output into pieces, from what is seen of its end.

    The pieces are parts of the output, in order, and none overlaps another. Between two of them nothing
    is missing, unless the second came with `gap`. Memory: the last answer.

    Attributes:
        gap: whether output may be missing between the last piece and what was given before it.
        gaps: how often that was so.
    """

    def __init__(self) -> None:
        self.gap = False
        self.gaps = 0
        self._seen = ""
        self._complete = True  # `_seen` is all that was written until then
        self._doubt = False  # something may be missing after the last piece

    def take(self, output: str, *, truncated: bool, last: bool = False) -> str:
        """The next piece, "" if there is none, of an answer of `terminal/output`.

        Args:
            output: the end of the output, or all of it.
            truncated: whether it begins later than the output did.
            last: whether nothing follows. Until then half a character at the end (U+FFFD, as clients
                show it) is held back, since it may become whole.
        """
        if truncated:
            output = _without_broken_start(output)
        if not last:
            output = _without_broken_end(output)
        seen, self._seen = self._seen, output
        complete, self._complete = self._complete, not truncated
        if complete and not truncated and output.startswith(seen):
            piece = output[len(seen) :]
        else:
            common, sure = overlap(seen, output)
            self._doubt = self._doubt or not sure
            piece = output[common:]
        if piece or (last and self._doubt):
            self.gap, self._doubt = self._doubt, False
            self.gaps += self.gap
        return piece


def overlap(before: str, after: str) -> tuple[int, bool]:
    """How many characters of `after` are the end of `before`, and whether that is certain.

    It is the largest number that is possible. It is not certain if it is small, or if `after` repeats
    itself so that a smaller one is possible as well.
    """
    most = min(len(before), len(after))
    if most < SURE:
        return _short_overlap(before, after, most), False
    probe = before[-SURE:]
    found: list[int] = []
    end = most
    for _ in range(_TRIES):
        start = after.rfind(probe, 0, end)
        if start < 0:
            break
        end = start + SURE
        if before.endswith(after[:end]):
            found.append(end)
            if len(found) > 1:
                break
        end -= 1
    else:
        return (found[0], False) if found else (0, False)
    if not found:
        return _short_overlap(before, after, SURE - 1), False
    return found[0], len(found) == 1


def _short_overlap(before: str, after: str, most: int) -> int:
    return next((n for n in range(most, 0, -1) if before.endswith(after[:n])), 0)


def _without_broken_end(text: str) -> str:
    for _ in range(_CUT):
        text = text.removesuffix(_BROKEN)
    return text


def _without_broken_start(text: str) -> str:
    for _ in range(_CUT):
        text = text.removeprefix(_BROKEN)
    return text
