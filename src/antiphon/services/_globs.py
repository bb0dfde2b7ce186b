"""Globs of the rule language: for texts, and for paths component by component.

Pure, and linear for practical purposes: no pattern makes a hostile subject expensive, because what
stands between two stars is searched once, leftmost, and never again. What a glob is matched with is
`_rules`' business.

In a text `*` is any number of characters, `?` is one, `[abc]`, `[a-z]` and `[!abc]` are one of (or
none of) a set; `[*]` is a star. In a path all that stays within a component, and a component `**` is
any number of components, none included. Names that begin with a dot are names like any other.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GlobError", "PathGlob", "escape", "names_of", "outside_sets", "text_glob"]

_STAR: Final = None
_ALTERNATIVES: Final = re.compile(r"\{[^{}]*,[^{}]*\}")
_SETS: Final = re.compile(r"\[!?.[^]]*\]", re.DOTALL)
_MAGIC: Final = re.compile(r"[*?\[]")


class GlobError(ValueError):
    """What is wrong with a glob, for whoever wrote it."""


def escape(text: str) -> str:
    """The glob that matches exactly this text."""
    escaped = _MAGIC.sub(r"[\g<0>]", text)
    # Taken for a list of alternatives otherwise, which globs do not have.
    return escaped.replace("{", "[{]")


def outside_sets(glob: str) -> str:
    """The glob with its sets emptied: what stands in it for itself, and the stars."""
    return _SETS.sub("[]", glob)


def text_glob(glob: str, *, ignore_case: bool = False) -> Callable[[str], bool]:
    """Whether a whole text matches, as a function.

    Raises:
        GlobError: it is empty, or a set is not closed or runs backwards, or alternatives in braces.
    """
    if not glob:
        raise GlobError("an empty glob matches nothing")
    if found := _ALTERNATIVES.search(outside_sets(glob)):
        raise GlobError(
            f"{glob!r}: {found[0]} is no list of alternatives here; write several globs, "
            "or [{] for the brace itself"
        )
    if not ignore_case and not _MAGIC.search(glob):
        return glob.__eq__
    pattern = re.compile(_translate(glob), re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    return lambda text: pattern.match(text) is not None


def _translate(glob: str) -> str:
    parts = [""]
    at = 0
    while at < len(glob):
        character = glob[at]
        at += 1
        if character == "*":
            if parts[-1] or len(parts) == 1:
                parts.append("")
        elif character == "?":
            parts[-1] += "."
        elif character == "[":
            one, at = _set(glob, at)
            parts[-1] += one
        else:
            parts[-1] += re.escape(character)
    if len(parts) == 1:
        return rf"{parts[0]}\Z"
    first, *middle, last = parts
    # Atomic: the leftmost place will do, so no other is tried when what follows does not match.
    return first + "".join(f"(?>.*?{part})" for part in middle) + rf".*{last}\Z"


def _set(glob: str, at: int) -> tuple[str, int]:
    """The set that begins after the bracket before `at`, and where the glob goes on."""
    negated = glob.startswith("!", at)
    start = at + negated
    # As a first member, a closing bracket is one.
    end = glob.find("]", start + 1)
    if end < 0:
        raise GlobError(f"{glob!r}: the set is not closed; write [[] for the bracket itself")
    members, found = glob[start:end], ""
    while members:
        if len(members) > 2 and members[1] == "-":
            low, high, members = members[0], members[2], members[3:]
            if low > high:
                raise GlobError(f"{glob!r}: {low}-{high} runs backwards")
            found += f"{re.escape(low)}-{re.escape(high)}"
        else:
            found += re.escape(members[0])
            members = members[1:]
    return f"[{'^' if negated else ''}{found}]", end + 1


def names_of(path: str) -> list[str]:
    """The components of an absolute, normalised path."""
    return [name for name in path.split("/") if name]


class PathGlob:
    """A glob of paths.

    Attributes:
        relative: it is to be matched with what comes after a root, not with a whole path.

    Args:
        glob: absolute, relative, or below the home (`~/`).
        home: what `~` is.
        ignore_case: take upper and lower case for the same.

    Raises:
        GlobError: no glob, or one that could never match a normalised path.
    """

    __slots__ = ("_parts", "relative")

    def __init__(self, glob: str, *, home: str, ignore_case: bool = False) -> None:
        if glob.startswith("~"):
            if glob != "~" and not glob.startswith("~/"):
                raise GlobError(f"{glob!r}: only your own home, ~/, has a name here")
            if not home.startswith("/"):
                raise GlobError(f"{glob!r}: there is no home directory")
            prefix, glob = names_of(home), glob[1:] or "/"
        else:
            prefix = []
        self.relative = not glob.startswith("/")
        if not glob:
            raise GlobError("an empty glob matches nothing")
        if "\0" in glob:
            raise GlobError("no path holds a NUL")
        if glob.endswith("/") and glob != "/":
            raise GlobError(
                f"{glob!r} ends in a slash: write {glob + '**'!r} for all below the directory "
                f"and itself, {glob.rstrip('/')!r} for the directory alone"
            )
        parts: list[list[Callable[[str], bool]]] = [
            [text_glob(escape(name), ignore_case=ignore_case) for name in prefix]
        ]
        for component in glob.split("/"):
            if component == "..":
                raise GlobError(f"{glob!r}: a path has no '..' when it is matched")
            if component in {"", "."}:
                continue
            if component == "**":
                parts.append([])
                continue
            if "**" in component:
                raise GlobError(f"{glob!r}: ** stands alone between slashes")
            try:
                parts[-1].append(text_glob(component, ignore_case=ignore_case))
            except GlobError as error:
                # A slash inside a set has cut it in two.
                raise GlobError(f"in {glob!r}: {error}") from error
        self._parts = parts

    def matches(self, names: Sequence[str]) -> bool:
        """Whether these components match, all of them."""
        first, *others = self._parts
        if not others:
            return len(names) == len(first) and _fits(first, names, 0)
        *middle, last = others
        end = len(names) - len(last)
        at = len(first)
        if at > end or not _fits(first, names, 0) or not _fits(last, names, end):
            return False
        for part in middle:
            at = _found(part, names, at, end)
            if at < 0:
                return False
            at += len(part)
        return True


def _found(part: Sequence[Callable[[str], bool]], names: Sequence[str], at: int, end: int) -> int:
    """Where these stand one after the other, from `at`, before `end`; -1 if nowhere."""
    if not part:
        return at
    last = end - len(part)
    # A name without stars is looked for as such: an agent may name thousands of directories.
    plain = getattr(part[0], "__self__", None)
    while at <= last:
        if isinstance(plain, str):
            try:
                at = names.index(plain, at, last + 1)
            except ValueError:
                return -1
        if _fits(part, names, at):
            return at
        at += 1
    return -1


def _fits(part: Sequence[Callable[[str], bool]], names: Sequence[str], at: int) -> bool:
    return all(
        matches(name) for matches, name in zip(part, names[at : at + len(part)], strict=True)
    )
