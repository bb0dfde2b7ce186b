"""Unions that msgspec cannot tell apart itself, resolved by the shape of the JSON value.

The generated modules build one class per such union with `choice`; to type checkers it is a plain
union alias. Decoders get `decode_hook`, encoders `encode_hook` (see `_codec`, which also decides
what happens to a value that fits no alternative). Where each alternative has a string of its own and
all else in common, a field of such a union is decoded without the hook: see `Merged`.
"""

from __future__ import annotations

import types
import typing
from typing import Any, ClassVar

import msgspec

from antiphon.schema._method import Wire
from antiphon.schema._report import json_name

__all__ = [
    "Choice",
    "Merged",
    "Unknown",
    "UnknownUpdate",
    "choice",
    "choose",
    "decode_hook",
    "encode_hook",
    "variants",
]

#: (alternative, member, test): it applies where the member equals the test (a string) or is an
#: instance of it (a class), with `NoneType` also where it is absent; with member None always. For a
#: list, its first item is looked at.
Case = tuple[Any, str | None, str | type | None]


_EMPTY: dict[str, Any] = {}


class Unknown:
    """A variant of an open union that this version does not know, kept as it came.

    It is encoded unchanged. Two are equal where their JSON values are.

    Attributes:
        raw: the JSON text.
        reason: why it could not be decoded into something known.
    """

    __slots__ = ("raw", "reason")

    def __init__(self, raw: bytes, reason: str = "") -> None:
        if not raw:
            raise ValueError("an unknown variant needs its JSON text")
        self.raw = raw
        self.reason = reason

    @property
    def data(self) -> Any:
        """The JSON value, decoded anew on each access."""
        return msgspec.json.decode(self.raw)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Unknown):
            return NotImplemented
        if type(self) is not type(other):
            return False
        try:
            return self.raw == other.raw or bool(self.data == other.data)
        except (msgspec.DecodeError, RecursionError):
            return False

    # Like the structs beside it in a list, it is compared by value and has no hash.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(raw={self.raw!r}, reason={self.reason!r})"


class UnknownUpdate(Unknown):
    """A session update of an unknown kind, or of a known kind that does not decode."""

    __slots__ = ()


class Choice(type):
    """Class of the classes that stand for a union at run time.

    `isinstance(value, McpServer)` is true for every member of the union; such a class has no
    instances of its own.
    """

    cases: tuple[Case, ...]
    members: tuple[type, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.members)


def choice(name: str, module: str, *cases: Case) -> Choice:
    """Make the class for a union; the order of the cases is the order in which they are tried."""
    made = Choice(name, (), {"__module__": module, "__slots__": ()})
    made.cases = cases
    classes: list[Any] = [typing.get_origin(case[0]) or case[0] for case in cases]
    made.members = tuple(dict.fromkeys(classes))
    return made


class Merged(Wire):
    """Base of generated structs with the members of all alternatives of a union.

    Private to the decoder, which needs no dict and no hook for it: a quarter of their cost. A field
    declared with it never keeps one: the `__post_init__` of its owner puts the alternative in its
    place, by the rules of `choose`.
    """

    union: ClassVar[Choice]


def variants(kind: Any) -> tuple[type, ...]:
    """The classes that a params or result type stands for: itself, or the members of a union."""
    if isinstance(kind, Choice):
        return kind.members
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return typing.get_args(kind)
    return (kind,)


def choose(kind: Choice, value: Any) -> Any:
    """The alternative of `kind` that a decoded JSON value has the shape of.

    Returns a struct class, a list type, or `Unknown`; raises ValueError where none applies.
    """
    probe: object = value
    if list in kind.members:
        if not isinstance(value, list):
            raise ValueError(f"Expected `array`, got `{json_name(value)}`")
        items = typing.cast("list[object]", value)
        probe = items[0] if items else _EMPTY
    if not isinstance(probe, dict):
        # msgspec adds the path to a ValueError; a TypeError would leave the decoder as it is.
        raise ValueError(f"Expected `object`, got `{json_name(probe)}`")  # noqa: TRY004
    members = typing.cast("dict[str, Any]", probe)
    for alternative, key, test in kind.cases:
        if key is None:
            return alternative
        if key in members or test is types.NoneType:
            found = members.get(key)
            if found == test if isinstance(test, str) else isinstance(found, test or object):
                return alternative
    keys = dict.fromkeys(f"`{case[1]}`" for case in kind.cases if case[1])
    raise ValueError(f"Object fits no variant of {kind.__name__}: look at {' and '.join(keys)}")


def decode_hook(kind: type, value: Any) -> Any:
    """Decode, as `dec_hook` of msgspec, a value of a `Choice` from its JSON value.

    Raises ValueError (which msgspec turns into a ValidationError with the path) where it does not
    fit, NotImplementedError for a type that is no `Choice`.
    """
    if not isinstance(kind, Choice):
        raise NotImplementedError(f"{kind!r} is no wire type")
    alternative = choose(kind, value)
    if alternative is Unknown:
        return Unknown(msgspec.json.encode(value), f"unknown variant of {kind.__name__}")
    try:
        return msgspec.convert(value, alternative, dec_hook=decode_hook)
    except msgspec.ValidationError as error:
        # As a ValidationError it would pass through the outer decoder without the outer path.
        raise ValueError(str(error)) from None


def encode_hook(value: Any) -> Any:
    """Encode, as `enc_hook` of msgspec, an unknown variant: as it came."""
    if isinstance(value, Unknown):
        return msgspec.Raw(value.raw)
    raise NotImplementedError(f"Encoding objects of type {type(value).__name__} is unsupported")
