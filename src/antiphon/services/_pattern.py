"""Matching the `pattern` of a form's field: a regular expression that the agent wrote.

Responsible for an answer in bounded time, whatever the expression: it is turned into states that are
all followed at once, so that the cost is their number times the length of the text, where a
backtracking engine can take ages over `(a+)+$`. Understands the common part of ECMAScript's
expressions; for the rest (look-around, back-references, property classes) `compile_pattern` gives
None, and nobody may say that a text does not fit. What a form is, `_form` knows.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

__all__ = ["MAX_STEPS", "Pattern", "compile_pattern"]

#: States of one expression, its repetitions written out.
MAX_STATES: Final = 1000
#: Groups within groups: the parser calls itself for each.
MAX_DEPTH: Final = 30
#: States (and ranges of classes) times characters that one match may look at; about 0.2 s.
MAX_STEPS: Final = 300_000
#: Characters of an expression.
MAX_LENGTH: Final = 1000

_Ranges: TypeAlias = "tuple[tuple[int, int], ...]"

_DIGIT: _Ranges = ((48, 57),)
_WORD: _Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: _Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_END: _Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES: Final = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS: Final = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "0": 0}
_SYNTAX: Final = "^$\\.*+?()[]{}|/-"


class _Beyond(Exception):
    """The expression is wrong, too large, or uses what is not understood here."""


def compile_pattern(text: str) -> Pattern | None:
    """The expression made ready, or None for one that is not evaluated here."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        return Pattern(_Parser(text).program())
    except _Beyond:
        return None


class Pattern:
    """An expression that can be tried on texts.

    A state is ("char", ranges, negated), ("split", a, b), ("jump", a), ("assert", name) or ("match",);
    `a` and `b` are distances.
    """

    def __init__(self, program: list[tuple[Any, ...]]) -> None:
        self._program = program
        #: What one character may cost: each state, and each range of a class.
        self._cost = sum(len(step[1]) if step[0] == "char" else 1 for step in program) + 1

    def steps(self, text: str) -> int:
        """The most states and ranges that trying it on a text looks at."""
        return self._cost * (len(text) + 1)

    def search(self, text: str) -> bool | None:
        """Whether it is found anywhere in `text`, as JSON Schema wants; None if that would cost too much."""
        if self.steps(text) > MAX_STEPS:
            return None
        current: set[int] = set()
        for at in range(len(text) + 1):
            states = self._closure(current | {0}, text, at)
            if len(self._program) - 1 in states:
                return True
            if at == len(text):
                break
            code = ord(text[at])
            current = {
                state + 1
                for state in states
                if (step := self._program[state])[0] == "char"
                and any(low <= code <= high for low, high in step[1]) is not step[2]
            }
        return False

    def _closure(self, states: set[int], text: str, at: int) -> set[int]:
        """What is reached from these states without reading a character."""
        found: set[int] = set()
        left = list(states)
        while left:
            state = left.pop()
            if state in found:
                continue
            found.add(state)
            step = self._program[state]
            match step[0]:
                case "split":
                    left += (state + step[1], state + step[2])
                case "jump":
                    left.append(state + step[1])
                case "assert" if _holds(step[1], text, at):
                    left.append(state + 1)
                case _:
                    pass
        return found


def _holds(name: str, text: str, at: int) -> bool:
    match name:
        case "^":
            return at == 0
        case "$":
            return at == len(text)
        case _:
            before = at > 0 and _is_word(text[at - 1])
            after = at < len(text) and _is_word(text[at])
            return (before is not after) is (name == "b")


def _is_word(char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in _WORD)


class _Parser:
    """Recursive descent; each part gives its states, so that repeating it is writing it again."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def program(self) -> list[tuple[Any, ...]]:
        states = self._alternatives()
        if self._at < len(self._text):
            raise _Beyond  # a ")" too many
        return [*states, ("match",)]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise _Beyond
        self._at += 1
        return char

    def _take(self, words: str) -> bool:
        if self._text.startswith(words, self._at):
            self._at += len(words)
            return True
        return False

    def _alternatives(self) -> list[tuple[Any, ...]]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Beyond
        states = self._sequence()
        while self._take("|"):
            other = self._sequence()
            states = _checked(
                [("split", 1, len(states) + 2), *states, ("jump", len(other) + 1), *other]
            )
        self._depth -= 1
        return states

    def _sequence(self) -> list[tuple[Any, ...]]:
        states: list[tuple[Any, ...]] = []
        while self._peek() not in {"", "|", ")"}:
            states = _checked([*states, *self._repeated(self._atom())])
        return states

    def _atom(self) -> list[tuple[Any, ...]]:
        char = self._next()
        match char:
            case "(":
                if self._take("?") and not self._take(":") and not self._named():
                    raise _Beyond  # looks around, or sets flags
                states = self._alternatives()
                if not self._take(")"):
                    raise _Beyond
                return states
            case "[":
                return [self._class()]
            case ".":
                return [("char", _LINE_END, True)]
            case "^" | "$":
                return [("assert", char)]
            case "\\":
                if self._peek() in {"b", "B"}:
                    return [("assert", self._next())]
                ranges, negated = self._escape()
                return [("char", ranges, negated)]
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise _Beyond
            case _:
                return [("char", ((ord(char), ord(char)),), False)]

    def _named(self) -> bool:
        if not self._take("<") or self._peek() in {"", "=", "!"}:
            return False
        end = self._text.find(">", self._at)
        if end < 0 or not self._text[self._at : end].isidentifier():
            return False
        self._at = end + 1
        return True

    def _repeated(self, part: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        least, most = 1, 1
        match self._peek():
            case "*":
                least, most = 0, -1
                self._at += 1
            case "+":
                least, most = 1, -1
                self._at += 1
            case "?":
                least, most = 0, 1
                self._at += 1
            case "{":
                self._at += 1
                least, most = self._counts()
            case _:
                return part
        self._take("?")  # how much is taken first changes nothing about whether there is a match
        if self._peek() in {"*", "+", "?", "{"}:
            raise _Beyond
        if max(least, most) * (len(part) + 2) > MAX_STATES:
            raise _Beyond
        size = len(part)
        states = part * least
        if most < 0:
            return [*states, ("split", 1, size + 2), *part, ("jump", -size - 1)]
        for left in range(most - least, 0, -1):
            states = [*states, ("split", 1, left * (size + 1)), *part]
        return states

    def _counts(self) -> tuple[int, int]:
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at : max(end, self._at)].partition(",")
        self._at = end + 1
        if end < 0 or not _is_count(least) or (most and not _is_count(most)):
            raise _Beyond
        if not comma:
            return int(least), int(least)
        if not most:
            return int(least), -1
        if int(most) < int(least):
            raise _Beyond
        return int(least), int(most)

    def _class(self) -> tuple[Any, ...]:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._member(ranges)
            if low is None or self._peek() != "-" or self._text[self._at + 1 : self._at + 2] == "]":
                if low is not None:
                    ranges.append((low, low))
                continue
            self._at += 1
            high = self._member(ranges)
            if high is None or high < low:
                raise _Beyond
            ranges.append((low, high))
        return ("char", tuple(ranges), negated)

    def _member(self, ranges: list[tuple[int, int]]) -> int | None:
        """One character of a class; a class within is added to `ranges`, and None."""
        char = self._next()
        if char != "\\":
            return ord(char)
        if self._take("b"):
            return 8
        found, negated = self._escape()
        if negated:
            raise _Beyond
        if len(found) == 1 and found[0][0] == found[0][1]:
            return found[0][0]
        ranges += found
        return None

    def _escape(self) -> tuple[_Ranges, bool]:
        char = self._next()
        if char.lower() in _CLASSES:
            return _CLASSES[char.lower()], char.isupper()
        if char == "0" and self._peek().isdigit():
            raise _Beyond
        if char in _CONTROLS:
            code = _CONTROLS[char]
        elif char in {"x", "u"}:
            digits = self._text[self._at : self._at + (2 if char == "x" else 4)]
            self._at += len(digits)
            if len(digits) < 2 or not all(c in "0123456789abcdefABCDEF" for c in digits):
                raise _Beyond
            if char == "u" and len(digits) < 4:
                raise _Beyond
            code = int(digits, 16)
            if 0xD800 <= code < 0xE000:
                raise _Beyond
        elif char in _SYNTAX:
            code = ord(char)
        else:
            raise _Beyond
        return ((code, code),), False


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4


def _checked(states: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    if len(states) > MAX_STATES:
        raise _Beyond
    return states
