"""What the generator knows of one protocol version, free of JSON schema spelling and of Python text.

A `Model` holds one *entry* per Python name: an `Alias` (strings, numbers, enumerations), a `Record`
(an object with fields, one struct) or a `Union` (alternatives told apart by a tag or by their shape).
Every definition of the JSON is an entry; entries beyond them are union variants that have no
definition of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Basic:
    """A JSON scalar, or `any` JSON value, or an `object` of unspecified members."""

    kind: Literal["str", "int", "float", "bool", "null", "any", "object"]
    minimum: int | None = None
    maximum: int | None = None
    min_length: int | None = None


@dataclass(frozen=True)
class Words:
    """An enumeration. `open_ended` is what the schema says; in Python all of them are open."""

    values: tuple[str | int, ...]
    open_ended: bool


@dataclass(frozen=True)
class Ref:
    """Another entry, by name."""

    name: str


@dataclass(frozen=True)
class ListOf:
    """An array."""

    item: Type


@dataclass(frozen=True)
class MapOf:
    """An object whose members all have values of one type."""

    value: Type


@dataclass(frozen=True)
class Either:
    """Alternatives of different JSON kinds, which need no help to be told apart."""

    options: tuple[Type, ...]


@dataclass(frozen=True)
class ByMethod:
    """Params or result inside an envelope: which of `names` it is depends on the method."""

    names: tuple[str, ...]


MemberKind = Literal["str", "any", "absent"]
Side = Literal["agent", "client", "both"]
Type = Basic | Words | Ref | ListOf | MapOf | Either | ByMethod


@dataclass(frozen=True)
class Field:
    """One member of an object.

    `flags` are the schema's leniency keywords: "D" default on error, "S" skip invalid items,
    "N" default on null.
    """

    wire: str
    python: str
    type: Type
    required: bool
    nullable: bool
    flags: str = ""


@dataclass(frozen=True)
class Alias:
    """A name for a type that needs no class."""

    name: str
    type: Type


@dataclass(frozen=True)
class Record:
    """An object: one struct.

    `fields` is complete, whatever `base` says. `tag` is the (member, value) that marks it as a
    variant of a union and is no field. `some_of`: at least one of these members is required.
    `autotag`: (member, word, member, kind): the first is set to the word where the second holds a
    value of that kind. `of` is the definition whose schema its encoding obeys.
    """

    name: str
    of: str
    fields: tuple[Field, ...]
    tag: tuple[str, str] | None = None
    base: str | None = None
    some_of: tuple[str, ...] = ()
    autotag: tuple[str, str, str, str] | None = None


@dataclass(frozen=True)
class Case:
    """One alternative of a union: `type` None is the unknown variant, kept as it came.

    It applies where the member `key` equals the string `value`, or, with `value` None, where the
    member is a string (`kind` "str"), is there at all ("any") or is not ("absent"); `key` None
    always applies.
    `needs`: the members that the schema requires of an unknown variant all the same.
    """

    type: Type | None
    key: str | None = None
    value: str | None = None
    kind: MemberKind = "str"
    needs: tuple[Field, ...] = ()


@dataclass(frozen=True)
class Union:
    """Alternatives: `tagged` ones msgspec tells apart itself, the others are chosen by shape."""

    name: str
    cases: tuple[Case, ...]
    tagged: bool


Entry = Alias | Record | Union


@dataclass(frozen=True)
class MethodRow:
    """One method: names are entries of the model. Mirrors `antiphon.schema.Method`."""

    name: str
    side: Side
    kind: Literal["request", "notification"]
    params: str
    result: str | None
    gate: str | None
    handler: str
    stable: bool


@dataclass
class Model:
    """One protocol version: entries in the order of the JSON, and its method table."""

    version: str
    definitions: tuple[str, ...]
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    methods: list[MethodRow] = field(default_factory=list[MethodRow])

    def record(self, name: str) -> Record:
        """The record of that name; raises TypeError where the entry is no record."""
        entry = self.entries[name]
        if not isinstance(entry, Record):
            raise TypeError(f"{name} is no record")
        return entry


def references(type_: Type) -> set[str]:
    """Names of the entries that a type mentions directly."""
    match type_:
        case Ref(name):
            return {name}
        case ListOf(inner) | MapOf(inner):
            return references(inner)
        case Either(options):
            return set[str]().union(*(references(option) for option in options))
        case _:
            return set()


def entry_references(entry: Entry) -> set[str]:
    """Names of the entries that an entry mentions directly, its base excluded."""
    match entry:
        case Alias():
            return references(entry.type)
        case Record():
            return set[str]().union(*(references(field.type) for field in entry.fields))
        case Union():
            return set[str]().union(*(references(case.type) for case in entry.cases if case.type))
