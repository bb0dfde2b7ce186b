"""The forgiving path: what is right in a message that does not decode strictly, with a report.

Responsible for building typed values out of untyped JSON by the leniency flags of the schema
(acp-v1 §19): a malformed optional value becomes absent ("D"), a bad list item is left out ("S"),
an explicit null becomes the default ("N"), an update of no known kind becomes `UnknownUpdate`, and
what the schema keeps strict stays strict. Leaves to `_codec` when this path is taken (only after
the strict decoder has refused) and to the generated modules which field has which flag.

For each type a plan, a small function, is built once from msgspec's own view of the type. A message
is walked once, from the top down; nothing is decoded twice, so time is linear in its size.

Source: DESIGN §3.1, acp-v1 §19 and §20, field faults 31 and 32.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import UNSET, inspect

from antiphon.schema._choice import Merged, Unknown, UnknownUpdate, choose
from antiphon.schema._report import JSON_NAMES, FieldError, Repair, is_array, is_object, json_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["UPDATE_TAG", "OutOfRange", "Walk", "forgive"]

#: The tag field of session updates, the one union whose unknown variants are kept everywhere.
UPDATE_TAG = "sessionUpdate"

#: Where a value stands: the path of its parent and the last step; None is the root. A step is a
#: member's wire name, an index, or None for a key that the peer made up (it is never repeated).
Path: TypeAlias = "tuple[Path, str | int | None] | None"

#: Takes an untyped value, where it stands and the walk; returns the typed value or raises `Invalid`.
Plan: TypeAlias = "Callable[[Any, Path, Walk], Any]"

_JSON_TYPES: dict[type[inspect.Type], type] = {
    inspect.DictType: dict,
    inspect.ListType: list,
    inspect.StrType: str,
    inspect.BoolType: bool,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.NoneType: type(None),
}


class OutOfRange:
    """Stands in untyped JSON for a number that no Python type holds as it is, such as 1e999."""


class Walk:
    """What goes along while one message is walked.

    Attributes:
        source: the JSON text of the message.
        repairs: what was repaired so far.
        out_of_range: whether the message holds an `OutOfRange` somewhere.
        lax: whether a required member with a default on error may be missing altogether.
    """

    __slots__ = ("lax", "out_of_range", "repairs", "source")

    def __init__(self, source: bytes, *, out_of_range: bool, lax: bool) -> None:
        self.source = source
        self.repairs: list[Repair] = []
        self.out_of_range = out_of_range
        self.lax = lax

    def note(self, path: Path, reason: str) -> None:
        """Report one repair."""
        self.repairs.append(Repair(_render(path), reason))

    def text_of(self, value: Any, path: Path) -> bytes:
        """The JSON text of the value at `path`: the peer's own for the root and its members.

        Deeper it is written anew. Finding it would take a pass over the message for each value.
        """
        if path is None:
            return self.source
        parent, step = path
        if parent is None and isinstance(step, str):
            members = msgspec.json.decode(self.source, type=dict[str, msgspec.Raw])
            return bytes(members[step])
        return msgspec.json.encode(_any(value, path, self))


class Invalid(Exception):
    """A value that its plan refuses; caught by the nearest field or list that is lenient."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


def forgive(kind: Any, value: Any, walk: Walk) -> Any:
    """The typed value of `kind` that untyped JSON stands for; what was repaired is in `walk`.

    Raises `FieldError` where a strict part is wrong, `RecursionError` for absurd nesting.
    """
    try:
        return _plan_for(kind)(value, None, walk)
    except Invalid as invalid:
        raise FieldError(_render(invalid.path), invalid.reason) from None


# Finished plans by type. A plan stands in the drafts before its parts do, because structs refer to
# each other, also in circles; other threads see only what is finished.
_plans: dict[Any, Plan] = {}
_drafts: dict[Any, Plan] = {}
_building = threading.Lock()


def _plan_for(kind: Any) -> Plan:
    plan = _plans.get(kind)
    if plan is not None:
        return plan
    with _building:
        try:
            plan = _plan(inspect.type_info(kind))
            _plans.update(_drafts)
        finally:
            _drafts.clear()
        _plans[kind] = plan
    return plan


def _plan(kind: inspect.Type, *, skip: bool = False) -> Plan:
    """The plan of one type; `skip`: where it is an array, bad items are left out of it."""
    match kind:
        case inspect.Metadata():
            return _plan(kind.type, skip=skip)
        case inspect.AnyType():
            return _any
        case inspect.NoneType():
            return _exactly(type(None), "null")
        case inspect.BoolType():
            return _exactly(bool, "bool")
        case inspect.StrType(min_length=shortest, max_length=None, pattern=None):
            return _string(shortest or 0)
        case inspect.IntType(ge=least, gt=None, le=most, lt=None, multiple_of=None):
            return _integer(least, most)
        case inspect.FloatType(ge=None, gt=None, le=None, lt=None, multiple_of=None):
            return _number
        case inspect.ListType(min_length=None, max_length=None):
            return _array(_plan(kind.item_type), skip=skip)
        case inspect.DictType(min_length=None, max_length=None):
            return _map(_plan(kind.value_type))
        case inspect.StructType(array_like=False, forbid_unknown_fields=False):
            return _struct(kind)
        case inspect.CustomType():
            return _choice(kind.cls)
        case inspect.UnionType():
            return _union(kind, skip=skip)
        case _:
            msg = f"the schema uses what the forgiving path does not know: {kind!r}"
            raise AssertionError(msg)


def _any(value: Any, path: Path, walk: Walk) -> Any:
    if walk.out_of_range and _holds_out_of_range(value):
        raise Invalid(path, "Number out of range")
    return value


def _holds_out_of_range(value: Any) -> bool:
    if is_object(value):
        return any(map(_holds_out_of_range, value.values()))
    if is_array(value):
        return any(map(_holds_out_of_range, value))
    return isinstance(value, OutOfRange)


def _exactly(kind: type, name: str) -> Plan:
    def plan(value: Any, path: Path, _walk: Walk) -> Any:
        if type(value) is kind:
            return value
        raise _unexpected(name, value, path)

    return plan


def _string(shortest: int) -> Plan:
    def plan(value: Any, path: Path, _walk: Walk) -> str:
        if type(value) is not str:
            raise _unexpected("str", value, path)
        if len(value) < shortest:
            raise Invalid(path, f"Expected `str` of length >= {shortest}")
        return value

    return plan


def _integer(least: int | None, most: int | None) -> Plan:
    def plan(value: Any, path: Path, walk: Walk) -> int:
        if type(value) is float and value.is_integer():
            # JSON has one kind of number, and some writers put 3.0 for 3.
            walk.note(path, "Expected `int`, got `float`")
            value = int(value)
        if type(value) is not int:
            raise _unexpected("int", value, path)
        if least is not None and value < least:
            raise Invalid(path, f"Expected `int` >= {least}")
        if most is not None and value > most:
            raise Invalid(path, f"Expected `int` <= {most}")
        return value

    return plan


def _number(value: Any, path: Path, _walk: Walk) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise Invalid(path, "Number out of range") from None
    raise _unexpected("float", value, path)


def _array(item_plan: Plan, *, skip: bool) -> Plan:
    def plan(value: Any, path: Path, walk: Walk) -> list[Any]:
        if not is_array(value):
            raise _unexpected("array", value, path)
        if not skip:
            return [item_plan(item, (path, index), walk) for index, item in enumerate(value)]
        kept: list[Any] = []
        for index, item in enumerate(value):
            mark = len(walk.repairs)
            try:
                kept.append(item_plan(item, (path, index), walk))
            except Invalid as invalid:
                _give_up(invalid, walk, mark)
        return kept

    return plan


def _map(value_plan: Plan) -> Plan:
    def plan(value: Any, path: Path, walk: Walk) -> dict[str, Any]:
        if not is_object(value):
            raise _unexpected("object", value, path)
        return {key: value_plan(item, (path, None), walk) for key, item in value.items()}

    return plan


class _Member(NamedTuple):
    """One member of a struct: its names, its plan and what is done about its absence or defects."""

    wire: str
    name: str
    plan: Plan
    required: bool
    #: "D" among the flags: a defect makes it absent.
    lenient: bool
    #: "N" among the flags: null makes it absent.
    nullable: bool
    #: Makes the value of a required member that counts as absent; None where there is none.
    empty: Callable[[], Any] | None
    #: An older wire name that is understood where this one is missing.
    alias: str | None


# Where documentation and schema name a member differently (acp-v1 §20), by tag.
_ALIASES = {"current_mode_update": {"currentModeId": "modeId"}}


def _members(kind: inspect.StructType) -> Iterator[_Member]:
    flags = _flags(kind.cls)
    aliases = _ALIASES.get(str(kind.tag), {})
    for field in kind.fields:
        flag = flags.get(field.name, "")
        yield _Member(
            wire=field.encode_name,
            name=field.name,
            plan=_plan(field.type, skip="S" in flag),
            required=field.required,
            lenient="D" in flag,
            nullable="N" in flag,
            empty=list if isinstance(field.type, inspect.ListType) else None,
            alias=aliases.get(field.encode_name),
        )


def _flags(cls: type) -> dict[str, str]:
    """The leniency flags of a struct's fields, from the `FORGIVING` table of its module."""
    table: dict[type, dict[str, str]] = getattr(sys.modules[cls.__module__], "FORGIVING", {})
    return table.get(cls, {})


def _struct(kind: inspect.StructType) -> Plan:
    cls: Any = kind.cls
    if issubclass(cls, Merged):
        return _choice(cls.union)
    if (known := _plans.get(cls) or _drafts.get(cls)) is not None:
        return known
    tag_field, tag = kind.tag_field, kind.tag
    members: list[_Member] = []

    def plan(value: Any, path: Path, walk: Walk) -> Any:
        if not is_object(value):
            raise _unexpected("object", value, path)
        if tag_field is not None and value.get(tag_field, tag) != tag:
            raise Invalid((path, tag_field), "Wrong variant")
        fields: dict[str, Any] = {}
        for member in members:
            item = _taken(value, member, path, walk)
            if item is UNSET:
                continue
            mark = len(walk.repairs)
            try:
                fields[member.name] = member.plan(item, (path, member.wire), walk)
            except Invalid as invalid:
                if not member.lenient or (member.required and member.empty is None):
                    raise
                _give_up(invalid, walk, mark)
                if member.empty is not None and member.required:
                    fields[member.name] = member.empty()
        try:
            return cls(**fields)
        except (TypeError, ValueError) as error:  # from a `__post_init__`
            raise Invalid(path, str(error)) from None

    _drafts[cls] = plan
    members.extend(_members(kind))
    return plan


def _taken(found: dict[str, Any], member: _Member, path: Path, walk: Walk) -> Any:
    """The untyped value of a member; UNSET where it is absent and may be."""
    item = found.get(member.wire, UNSET)
    if item is UNSET and member.alias is not None and member.alias in found:
        walk.note((path, member.wire), f"Taken from `{member.alias}`")
        item = found[member.alias]
    if item is None and member.nullable:
        walk.note((path, member.wire), "Null counts as absent")
        return member.empty() if member.required and member.empty is not None else UNSET
    if item is UNSET and member.required:
        if not (walk.lax and member.lenient and member.empty is not None):
            raise Invalid((path, member.wire), "Missing required field")
        walk.note((path, member.wire), "Missing required field")
        return member.empty()
    return item


def _choice(cls: Any) -> Plan:
    plans: dict[Any, Plan] = {}

    def plan(value: Any, path: Path, walk: Walk) -> Any:
        try:
            alternative = choose(cls, value)
        except ValueError as error:
            raise Invalid(path, str(error)) from None
        if alternative is Unknown:
            return Unknown(walk.text_of(value, path), f"unknown variant of {cls.__name__}")
        return plans[alternative](value, path, walk)

    _drafts[cls] = plan
    plans.update(
        (alternative, _plan(inspect.type_info(alternative)))
        for alternative, _, _ in cls.cases
        if alternative is not Unknown
    )
    return plan


def _union(kind: inspect.UnionType, *, skip: bool) -> Plan:
    by_type: dict[type, Plan] = {}
    structs: list[inspect.StructType] = []
    for member in kind.types:
        json_type: type
        match member:
            case inspect.AnyType():
                return _any
            case inspect.StructType():
                structs.append(member)
                continue
            case inspect.CustomType():
                json_type = list if list in cast("Any", member.cls).members else dict
            case inspect.LiteralType():
                continue  # an enumeration that is open: `str` stands beside it
            case _:
                json_type = _JSON_TYPES[type(member)]
        by_type[json_type] = _plan(member, skip=skip)
    if structs:
        by_type[dict] = _struct(structs[0]) if len(structs) == 1 else _tagged(structs)
    names = [JSON_NAMES[json_type] for json_type in by_type]
    if float in by_type:
        by_type.setdefault(int, by_type[float])
    values = [plan for json_type, plan in by_type.items() if json_type is not type(None)]
    # Where only one type is possible its plan words the refusal, and may read 3.0 as 3. Where there
    # is a choice, as for request ids, nothing is coerced.
    otherwise = values[0] if len(values) == 1 else None

    def plan(value: Any, path: Path, walk: Walk) -> Any:
        chosen = by_type.get(value.__class__, otherwise)
        if chosen is None:
            raise _unexpected(" | ".join(names), value, path)
        return chosen(value, path, walk)

    return plan


def _tagged(structs: list[inspect.StructType]) -> Plan:
    """Structs of one tag field; an update of none of them is kept as `UnknownUpdate`."""
    tag_field = str(structs[0].tag_field)
    by_tag = {struct.tag: _struct(struct) for struct in structs}

    def plan(value: Any, path: Path, walk: Walk) -> Any:
        if not is_object(value):
            raise _unexpected("object", value, path)
        if tag_field not in value:
            raise Invalid((path, tag_field), "Missing required field")
        tag = value[tag_field]
        if type(tag) is not str:
            raise _unexpected("str", tag, (path, tag_field))
        if tag not in by_tag:
            raise Invalid((path, tag_field), "Unknown variant")
        return by_tag[tag](value, path, walk)

    def plan_or_keep(value: Any, path: Path, walk: Walk) -> Any:
        mark = len(walk.repairs)
        try:
            return plan(value, path, walk)
        except Invalid as invalid:
            text = walk.text_of(value, path)
            return UnknownUpdate(text, str(_give_up(invalid, walk, mark)))

    return plan_or_keep if tag_field == UPDATE_TAG else plan


def _give_up(invalid: Invalid, walk: Walk, mark: int) -> FieldError:
    """Report what made a value unusable, in place of the repairs made inside it."""
    del walk.repairs[mark:]
    walk.note(invalid.path, invalid.reason)
    return FieldError(_render(invalid.path), invalid.reason)


def _unexpected(expected: str, value: Any, path: Path) -> Invalid:
    return Invalid(path, f"Expected `{expected}`, got `{json_name(value)}`")


def _render(path: Path) -> str:
    """`path` as text, in the notation that msgspec uses."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(
            f".{step}" if isinstance(step, str) else f"[{'...' if step is None else step}]"
        )
    return "$" + "".join(reversed(steps))
