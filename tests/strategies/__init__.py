"""Hypothesis strategies for every definition of the official schema, from the generator's own walk.

Each example is a *pair*: a JSON value and the typed value that decoding it must give, built side by
side from the same model, so that neither depends on the decoder under test.

- plain: the JSON is valid by the official schema;
- `unknown_members=True`: members that no definition names are added wherever an object is typed,
  and the typed value is as if they were not there;
- `odd=True`: what real peers do wrong and the schema's leniency flags forgive: wrong types and null
  in lenient members, bad items in lenient lists, unknown words in closed enumerations, `3.0` for an
  integer; the typed value is what remains after repair.

A definition that only lists messages (`AgentRequest`, …) gets params as plain JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st
from msgspec import UNSET
from schema_generator.command import load_models
from schema_generator.model import (
    Alias,
    Basic,
    ByMethod,
    Case,
    Either,
    Field,
    ListOf,
    MapOf,
    Model,
    Record,
    Ref,
    Type,
    Union,
    Words,
)

from antiphon.schema import Unknown

__all__ = [
    "Pair",
    "definitions",
    "json_texts",
    "json_values",
    "pairs",
    "python_type",
    "typed",
    "untyped_json",
]

MAX_ITEMS = 3
#: Integers that every peer can hold, and that are exact as floating point numbers.
SAFE = 2**53


class Pair(NamedTuple):
    """A JSON value and what it must decode to."""

    json: Any
    typed: Any


@functools.cache
def models() -> dict[str, Model]:
    """Both models, read from the pinned official files."""
    return load_models()


def definitions(version: str = "v1") -> tuple[str, ...]:
    """Names of all definitions of a version, "v1" or "v1_unstable"."""
    return models()[version].definitions


def python_type(name: str, version: str = "v1") -> Any:
    """What the generated module has under that name: a struct, a union, or a scalar type."""
    return getattr(importlib.import_module(f"antiphon.schema.{version}"), name)


def pairs(
    name: str, version: str = "v1", *, unknown_members: bool = False, odd: bool = False
) -> st.SearchStrategy[Pair]:
    """Examples of a definition, as JSON and as typed value."""
    return _builder(version, unknown_members, odd=odd).entry(name)


def json_values(
    name: str, version: str = "v1", *, unknown_members: bool = False, odd: bool = False
) -> st.SearchStrategy[Any]:
    """JSON values of a definition."""
    return pairs(name, version, unknown_members=unknown_members, odd=odd).map(
        lambda pair: pair.json
    )


def json_texts(
    name: str, version: str = "v1", *, unknown_members: bool = False, odd: bool = False
) -> st.SearchStrategy[bytes]:
    """JSON texts of a definition, as bytes."""
    return json_values(name, version, unknown_members=unknown_members, odd=odd).map(
        lambda value: json.dumps(value, ensure_ascii=False).encode()
    )


def typed(name: str, version: str = "v1") -> st.SearchStrategy[Any]:
    """Typed values of a definition: struct instances, strings, numbers."""
    return pairs(name, version).map(lambda pair: pair.typed)


def untyped_json() -> st.SearchStrategy[Any]:
    """Any JSON value of modest size."""
    return _ANY


_INTEGERS = st.integers(-SAFE, SAFE)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_TEXT = st.text(max_size=12)
_ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | _INTEGERS | _FLOATS | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)
_OBJECT: st.SearchStrategy[dict[str, Any]] = st.dictionaries(_TEXT, _ANY, max_size=2)


@functools.cache
def _builder(version: str, unknown_members: bool, *, odd: bool) -> _Builder:
    return _Builder(models()[version], unknown_members, odd)


@functools.cache
def _member_names(version: str) -> frozenset[str]:
    """Every member that any definition names: an unknown member is none of them."""
    names = {"jsonrpc"}
    for entry in models()[version].entries.values():
        if isinstance(entry, Record):
            names |= {field.wire for field in entry.fields}
            names |= {entry.tag[0]} if entry.tag else set[str]()
    return frozenset(names)


def _same(value: object) -> Pair:
    return Pair(value, value)


@dataclass(frozen=True)
class _Builder:
    model: Model
    unknown_members: bool
    odd: bool
    made: dict[str, st.SearchStrategy[Pair]] = dataclasses.field(
        default_factory=dict[str, "st.SearchStrategy[Pair]"]
    )

    def entry(self, name: str) -> st.SearchStrategy[Pair]:
        if name not in self.made:
            self.made[name] = st.deferred(lambda: self._entry(name))
        return self.made[name]

    def _entry(self, name: str) -> st.SearchStrategy[Pair]:
        match self.model.entries[name]:
            case Alias(type=type_):
                return self.of(type_)
            case Record() as record:
                return self._record(record)
            case Union(cases=cases) as union:
                return st.one_of([self._case(union, case) for case in cases])

    def of(self, type_: Type) -> st.SearchStrategy[Pair]:
        """Examples of a type."""
        match type_:
            case Ref(name):
                return self.entry(name)
            case Words():
                return self._words(type_)
            case Basic("int"):
                low = -SAFE if type_.minimum is None else type_.minimum
                high = SAFE if type_.maximum is None else type_.maximum
                exact = st.integers(low, high).map(_same)
                return exact | exact.map(_as_float) if self.odd else exact
            case Basic():
                return self._scalar(type_).map(_same)
            case ListOf(item):
                return st.lists(self.of(item), max_size=MAX_ITEMS).map(_unzip)
            case MapOf(value):
                return st.dictionaries(_TEXT, self.of(value), max_size=MAX_ITEMS).map(
                    lambda members: Pair(
                        {key: pair.json for key, pair in members.items()},
                        {key: pair.typed for key, pair in members.items()},
                    )
                )
            case Either(options):
                # Told apart by their JSON kind, so none of them may be odd.
                plain = self._plain(self.unknown_members)
                return st.one_of([plain.of(option) for option in options])
            case ByMethod(names):
                plain = self._plain()
                return (
                    st.sampled_from(names).flatmap(plain.entry).map(lambda pair: _same(pair.json))
                )

    def _plain(self, unknown_members: bool = False) -> _Builder:
        return _builder(self.model.version, unknown_members, odd=False)

    @staticmethod
    def _scalar(type_: Basic) -> st.SearchStrategy[Any]:
        match type_.kind:
            case "str":
                return st.text(min_size=type_.min_length or 0, max_size=12)
            case "float":
                return _FLOATS | st.integers(-1000, 1000)
            case "bool":
                return st.booleans()
            case "null":
                return st.none()
            case "object":
                return _OBJECT
            case _:
                return _ANY

    def _words(self, type_: Words) -> st.SearchStrategy[Pair]:
        known = st.sampled_from(type_.values).map(_same)
        if not (type_.open_ended or self.odd):
            return known
        other = _INTEGERS if isinstance(type_.values[0], int) else _TEXT
        return known | other.map(_same)

    # --- objects

    def _record(self, record: Record) -> st.SearchStrategy[Pair]:
        kind = python_type(record.name, self.model.version)

        @st.composite
        def example(draw: st.DrawFn) -> Pair:
            there: dict[str, Any] = {}
            given: dict[str, Any] = {}
            if record.tag:
                there[record.tag[0]] = record.tag[1]
            needed = draw(st.sampled_from(record.some_of)) if record.some_of else None
            for field in record.fields:
                if field.required or field.wire == needed or draw(st.booleans()):
                    there[field.wire], value = draw(self._field(field))
                    if value is not UNSET:
                        given[field.python] = value
            self._mark(record, there, given)
            return Pair(draw(self._with_unknown(there)), kind(**given))

        return example()

    @staticmethod
    def _mark(record: Record, there: dict[str, Any], given: dict[str, Any]) -> None:
        """Set the mark that a value of a certain kind needs beside it."""
        if record.autotag:
            mark, word, member, _ = record.autotag
            if isinstance(there[member], bool):
                there[mark] = given[mark] = word

    def _field(self, field: Field) -> st.SearchStrategy[Pair]:
        value = self.of(field.type)
        if field.nullable:
            value = st.just(Pair(None, None)) | value
        if not self.odd:
            return value
        absent: Any = [] if field.required else UNSET
        if "S" in field.flags and isinstance(field.type, ListOf):
            value = value | self._with_bad_items(field.type.item)
        if "D" in field.flags:
            bad = self.wrong(field.type)
            if not field.nullable and field.type != Basic("any"):
                bad = bad | st.none()
            value = value | bad.map(lambda json: Pair(json, absent))
        if "N" in field.flags:
            value = value | st.just(Pair(None, absent))
        return value

    def _with_bad_items(self, item: Type) -> st.SearchStrategy[Pair]:
        bad = self.wrong(item).map(lambda json: (json, False))
        good = self.of(item).map(lambda pair: (pair, True))
        return st.lists(good | bad, max_size=MAX_ITEMS + 1).map(
            lambda items: Pair(
                [item.json if kept else item for item, kept in items],
                [item.typed for item, kept in items if kept],
            )
        )

    def _with_unknown(self, members: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        if not self.unknown_members:
            return st.just(members)
        taken = _member_names(self.model.version)
        names = _TEXT.filter(lambda name: name not in taken)
        extra = st.dictionaries(names, _ANY, max_size=2)
        return extra.flatmap(
            lambda more: st.permutations([*members.items(), *more.items()]).map(dict)
        )

    # --- unions

    def _case(self, union: Union, case: Case) -> st.SearchStrategy[Pair]:
        if case.type is not None:
            return self.of(case.type)
        known = {other.value for other in union.cases}
        tag = _TEXT.filter(lambda word: word not in known)
        key = case.key
        assert key

        @st.composite
        def example(draw: st.DrawFn) -> Pair:
            plain = self._plain()
            members = {key: draw(tag)}
            for field in case.needs:
                members[field.wire] = draw(plain.of(field.type)).json
            taken = _member_names(self.model.version)
            more = draw(
                st.dictionaries(_TEXT.filter(lambda name: name not in taken), _ANY, max_size=2)
            )
            json_value = {**members, **more}
            return Pair(json_value, Unknown(msgspec.json.encode(json_value)))

        return example()

    # --- values that do not decode

    def wrong(self, type_: Type) -> st.SearchStrategy[Any]:
        """JSON values, null excluded, that are no value of a type even after repair."""
        match type_:
            case Ref(name):
                return self._wrong_entry(name)
            case Words(values):
                return _not("str") if isinstance(values[0], str) else _not("int", "float")
            case Basic("any") | ByMethod():
                return st.nothing()
            case Basic("int"):
                return _not("int", "float")
            case Basic("float"):
                return _not("int", "float")
            case Basic("object") | MapOf():
                return _not("object")
            case Basic(kind):
                return _not(kind)
            case ListOf():
                return _not("array")
            case Either():
                return st.nothing()

    def _wrong_entry(self, name: str) -> st.SearchStrategy[Any]:
        match self.model.entries[name]:
            case Alias(type=type_):
                return self.wrong(type_)
            case Record() as record:
                return _not("object") | self._incomplete(record)
            case Union(cases=cases, tagged=tagged):
                if any(isinstance(case.type, ListOf) for case in cases):
                    return _not("array")
                incomplete = [
                    self._incomplete(self.model.record(case.type.name))
                    for case in cases
                    if isinstance(case.type, Ref)
                ]
                foreign = st.fixed_dictionaries({cases[0].key or "": st.just("no such kind")})
                return st.one_of([_not("object"), *incomplete, *([foreign] if tagged else [])])

    def _incomplete(self, record: Record) -> st.SearchStrategy[Any]:
        """The record without one of its required members, or with null there."""
        strict = [
            f for f in record.fields if f.required and not f.nullable and f.type != Basic("any")
        ]
        if not strict:
            return st.nothing()

        @st.composite
        def example(draw: st.DrawFn) -> dict[str, Any]:
            plain = self._plain()
            members: dict[str, Any] = dict(draw(plain._record(record)).json)
            field = draw(st.sampled_from(strict))
            if field.flags or draw(st.booleans()):
                del members[field.wire]
            else:
                members[field.wire] = draw(self.wrong(field.type))
            return members

        return example()


def _not(*kinds: str) -> st.SearchStrategy[Any]:
    """JSON values of other kinds, null excluded."""
    every: dict[str, st.SearchStrategy[Any]] = {
        "str": _TEXT,
        "int": _INTEGERS,
        "float": st.floats(0.1, 0.9),
        "bool": st.booleans(),
        "array": st.lists(_ANY, max_size=1),
        "object": st.dictionaries(st.sampled_from(["odd", "x"]), _ANY, max_size=1),
    }
    return st.one_of([values for kind, values in every.items() if kind not in kinds])


def _as_float(pair: Pair) -> Pair:
    return Pair(float(pair.json), pair.typed)


def _unzip(items: list[Pair]) -> Pair:
    return Pair([item.json for item in items], [item.typed for item in items])
