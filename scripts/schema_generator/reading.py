"""The walk: one official JSON schema file becomes a `Model`.

It knows the handful of shapes that the schema's authors use and raises `Unreadable`, naming the
definition, for anything else, so that a new release cannot slip through half understood.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, cast

from .model import (
    Alias,
    Basic,
    ByMethod,
    Case,
    Either,
    Field,
    ListOf,
    MapOf,
    MemberKind,
    MethodRow,
    Model,
    Record,
    Ref,
    Side,
    Type,
    Union,
    Words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .notes import Notes

Json = dict[str, Any]

FLAGS = {
    "x-deserialize-default-on-error": "D",
    "x-deserialize-skip-invalid-items": "S",
    "x-deserialize-default-on-null": "N",
}
#: Keywords that say nothing about which values are valid, or that the walk reads elsewhere.
SILENT = frozenset(
    {
        "additionalProperties",
        "default",
        "description",
        "discriminator",
        "format",
        "title",
        "unevaluatedProperties",
        "x-docs-ignore",
        "x-method",
        "x-side",
        *FLAGS,
    }
)
SIDES: dict[str, Side] = {"agent": "agent", "client": "client", "both": "both"}
#: The envelope definitions that list messages, and who handles those.
ENVELOPES: tuple[tuple[str, Side], ...] = (
    ("ClientRequest", "agent"),
    ("ClientNotification", "agent"),
    ("AgentRequest", "client"),
    ("AgentNotification", "client"),
    ("ProxyRequest", "both"),
    ("ProxyNotification", "both"),
)
#: What the walk understands; a keyword beyond these may change which values are valid.
KEYWORDS = SILENT | {
    "$ref",
    "allOf",
    "anyOf",
    "const",
    "items",
    "maximum",
    "minLength",
    "minimum",
    "not",
    "oneOf",
    "properties",
    "required",
    "type",
}
#: Listed in every envelope; the library routes extension methods by their name instead.
EXTENSIONS = frozenset({"ExtRequest", "ExtResponse", "ExtNotification"})


class Unreadable(Exception):
    """The schema uses a shape that the walk does not know."""


def read_model(
    document: Json, version: str, notes: Notes, *, stable: frozenset[str] | None = None
) -> Model:
    """Walk one schema document.

    `stable` are the definitions of the stable schema where `document` is the unstable one.
    Raises `Unreadable`.
    """
    return _Walk(document["$defs"], version, notes, stable).run(document)


def snake(name: str) -> str:
    """`sessionId` and `SessionId` → `session_id`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def camel(name: str) -> str:
    """`session_id` → `sessionId`: what msgspec's `rename="camel"` does."""
    head, *rest = name.split("_")
    return head + "".join(word.title() for word in rest)


def pascal(tag: str) -> str:
    """`agent_message_chunk` → `AgentMessageChunk`."""
    return "".join(word.title() for word in re.split(r"[_-]", tag))


def python_name(wire: str) -> str:
    """The field name for a wire member."""
    return "meta" if wire == "_meta" else snake(wire)


class _Walk:
    def __init__(
        self,
        definitions: dict[str, Json],
        version: str,
        notes: Notes,
        stable: frozenset[str] | None,
    ) -> None:
        self.definitions = definitions
        self.notes = notes
        self.stable = stable
        self.model = Model(version, tuple(definitions))
        self.uses = Counter(_uses(definitions))

    def run(self, document: Json) -> Model:
        for name, schema in self.definitions.items():
            try:
                _check_keywords(schema)
                self._definition(name, schema)
            except Unreadable as error:
                msg = f"definition {name}: {error}"
                raise Unreadable(msg) from None
        # Definitions first, in the order of the JSON; a variant may have been made on the way.
        entries = self.model.entries
        if missing := set(self.definitions) - set(entries):
            raise Unreadable(f"definitions left out: {sorted(missing)}")
        self.model.methods = list(self._methods(document))
        return self.model

    # --- definitions

    def _definition(self, name: str, schema: Json) -> None:
        if name in self.model.entries:
            return  # made with the union that it is a variant of
        branches = _branches(schema)
        if "properties" in schema or schema.get("type") == "object":
            if branches:
                self._branched_object(name, schema, branches)
            else:
                self._record(name, name, self._fields(schema))
        elif branches:
            self._alternatives(name, branches)
        elif body := _only_ref(schema):
            self._record(name, name, self._body(body), base=body)
        else:
            type_, nullable = self._type(schema)
            if nullable:
                raise Unreadable("null at the top")
            self._add(Alias(name, type_))

    def _add(self, entry: Alias | Record | Union) -> None:
        if entry.name in self.model.entries:
            raise Unreadable(f"two entries called {entry.name}; name one of them in notes.toml")
        self.model.entries[entry.name] = entry

    def _record(self, name: str, of: str, fields: tuple[Field, ...], **facts: Any) -> Ref:
        names = Counter(field.python for field in fields)
        if twice := [field for field, count in names.items() if count > 1]:
            raise Unreadable(f"{name} has {twice} twice")
        self._add(Record(name, of, fields, **facts))
        return Ref(name)

    # --- objects

    def _fields(self, schema: Json) -> tuple[Field, ...]:
        required = schema.get("required", [])
        fields = [
            self._field(wire, member, required=wire in required)
            for wire, member in schema.get("properties", {}).items()
        ]
        if missing := set(required) - {field.wire for field in fields}:
            raise Unreadable(f"required but not described: {sorted(missing)}")
        return tuple(fields)

    def _field(self, wire: str, schema: Json, *, required: bool) -> Field:
        type_, nullable = self._type(schema)
        flags = "".join(flag for keyword, flag in FLAGS.items() if schema.get(keyword))
        if required and "D" in flags and not isinstance(type_, ListOf):
            raise Unreadable(f"{wire} is required, lenient and no list: what is its default?")
        return Field(wire, python_name(wire), type_, required, nullable, flags)

    def _body(self, name: str) -> tuple[Field, ...]:
        """Fields of a definition that is flattened into a variant, those of its branches too."""
        schema = self.definitions[name]
        if _branches(schema):
            return self._merged(schema)[0]
        return self._fields(schema)

    def _merged(self, schema: Json) -> tuple[tuple[Field, ...], tuple[str, ...]]:
        """Fields of an object and of all its branches; the members of which one must be there."""
        fields = {field.wire: field for field in self._fields(schema)}
        needed: list[str] = []
        for branch in _branches(schema):
            if "not" in branch:
                continue  # the branch for unknown words: nothing that the others do not say
            parts = [branch] if "properties" in branch else []
            if body := _only_ref(branch):
                parts.append(self.definitions[body])
                if "properties" not in branch:
                    needed += self.definitions[body].get("required", [])
            for field in (field for part in parts for field in self._fields(part)):
                fields[field.wire] = _join(fields.get(field.wire), field)
        optional = tuple(
            field if field.wire in schema.get("required", []) else _as_optional(field)
            for field in fields.values()
        )
        return optional, tuple(needed)

    def _branched_object(self, name: str, schema: Json, branches: list[Json]) -> None:
        tags = [_tag(branch) for branch in branches]
        own = schema.get("properties", {})
        if all(tag is None for tag in tags):
            # Alternatives without a mark (in which scope something happens): all in one struct.
            fields, needed = self._merged(schema)
            self._record(name, name, fields, some_of=needed)
        elif all(tag is None or tag[0] in own for tag in tags):
            # The mark is a member of the object itself, so it stays a field.
            fields, _ = self._merged(schema)
            words = tuple(tag[1] for tag in tags if tag)
            key = next(tag[0] for tag in tags if tag)
            self._record(
                name,
                name,
                tuple(
                    Field(f.wire, f.python, Words(words, True), f.required, f.nullable, f.flags)
                    if f.wire == key
                    else f
                    for f in fields
                ),
            )
        elif not any(_only_ref(branch) for branch in branches) and tags[-1] is None:
            self._marked_value(name, schema, branches)
        else:
            self._union(name, branches, shared=self._fields(schema))

    def _marked_value(self, name: str, schema: Json, branches: list[Json]) -> None:
        """One struct whose `value` is of several types, one of which needs a mark beside it."""
        fields = {field.wire: field for field in self._fields(schema)}
        in_each = Counter(wire for branch in branches for wire in branch["required"])
        autotag = None
        for branch in branches:
            mark = _tag(branch)
            for field in self._fields(branch):
                if mark and field.wire == mark[0]:
                    mark_field = Field(
                        field.wire, field.python, Words((mark[1],), True), False, False
                    )
                    fields[field.wire] = mark_field
                else:
                    fields[field.wire] = _join(fields.get(field.wire), field)
                    if mark and isinstance(field.type, Basic):
                        autotag = (mark[0], mark[1], field.wire, field.type.kind)
        always: set[str] = {*schema.get("required", [])}
        always |= {wire for wire, count in in_each.items() if count == len(branches)}
        self._record(
            name,
            name,
            tuple(f if f.wire in always else _as_optional(f) for f in fields.values()),
            autotag=autotag,
        )

    # --- alternatives

    def _alternatives(self, name: str, branches: list[Json]) -> None:
        if all("const" in branch or _is_scalar(branch) for branch in branches) and any(
            "const" in branch for branch in branches
        ):
            values = tuple(branch["const"] for branch in branches if "const" in branch)
            self._add(Alias(name, Words(values, len(values) < len(branches))))
        elif len(branches) == 1:
            self._add(Alias(name, self._type(branches[0])[0]))
        elif all(_is_scalar(branch) or branch.get("type") == "array" for branch in branches):
            if all(branch.get("type") == "array" for branch in branches):
                self._union(name, branches)
            else:
                options = tuple(self._type(branch)[0] for branch in branches)
                self._add(Alias(name, Either(options)))
        else:
            self._union(name, branches)

    def _union(self, name: str, branches: list[Json], shared: tuple[Field, ...] = ()) -> None:
        cases: list[Case] = []
        for branch in branches:
            tag = _tag(branch)
            if "not" in branch:
                key = next(iter(branch["properties"]))
                cases.append(Case(None, key, needs=(*_needed(shared), *self._scope(branch))))
            elif tag:
                cases.append(Case(self._variant(name, branch, tag, shared), *tag))
            else:
                cases.append(self._untagged(name, branch))
        tagged = all(case.type and case.value for case in cases)
        if not tagged:
            cases = self._discriminated(name, cases)
            if closed := self.notes.closed.get(name):
                last = cases.pop()
                if last.key is not None:
                    raise Unreadable(f"notes.toml closes {name}, which has no untagged variant")
                key, word = closed
                cases += [Case(last.type, key, word), Case(last.type, key, kind="absent")]
        self._add(Union(name, tuple(cases), tagged))

    def _scope(self, branch: Json) -> tuple[Field, ...]:
        """What the first alternative inside a branch requires."""
        for scope in _branches(branch):
            if body := _only_ref(scope):
                return _needed(self._fields(self.definitions[body]))
        return ()

    def _variant(
        self, union: str, branch: Json, tag: tuple[str, str], shared: tuple[Field, ...]
    ) -> Ref:
        """The class of a tagged alternative: the body's own where nothing else uses the body."""
        body = _only_ref(branch)
        noted = self.notes.variants.get(f"{union}.{tag[1]}")
        if body is None:
            if noted is None:
                raise Unreadable(f"variant {tag[1]} has no body: name it in notes.toml")
            return self._record(noted, union, shared, tag=tag)
        body_schema = self.definitions[body]
        fields: tuple[Field, ...]
        needed: tuple[str, ...] = ()
        if _tag_inside(body_schema):
            fields = cast("Record", self._made(body)).fields
        elif _branches(body_schema):
            fields, needed = self._merged(body_schema)
        else:
            fields = self._fields(body_schema)
        if self.uses[body] == 1:
            if noted:
                raise Unreadable(
                    f"notes.toml names {union}.{tag[1]}, which is called {body} anyway"
                )
            self.model.entries.pop(body, None)
            return self._record(body, union, (*shared, *fields), tag=tag, some_of=needed)
        if shared or needed:
            raise Unreadable(f"{body} is used elsewhere too")
        return self._record(noted or pascal(tag[1]), union, fields, tag=tag, base=body)

    def _made(self, name: str) -> Alias | Record | Union:
        self._definition(name, self.definitions[name])
        return self.model.entries[name]

    def _untagged(self, union: str, branch: Json) -> Case:
        if "properties" in branch:
            name = union + branch["title"]
            return Case(self._record(name, union, self._fields(branch)))
        return Case(self._type(branch)[0])

    def _discriminated(self, name: str, cases: list[Case]) -> list[Case]:
        """Give the cases without a mark the member that tells them apart.

        The last one needs none where the others have one: it is what remains.
        """
        bare = [case for case in cases if case.type and case.key is None]
        if len(bare) <= 1:
            return cases
        required = {case: self._required_members(case.type) for case in bare}
        found: list[Case] = []
        for case in cases:
            if case not in required:
                found.append(case)
                continue
            others = set[str]().union(*(set(required[other]) for other in bare if other != case))
            own: list[tuple[str, MemberKind]] = [
                (key, kind) for key, kind in required[case].items() if key not in others
            ]
            if not own:
                raise Unreadable(f"{name}: {case.type} has no member of its own")
            found.append(Case(case.type, own[0][0], None, own[0][1]))
        if any(isinstance(case.type, ListOf) for case in bare):
            # An empty list fits all; the first one keeps it, so it is the one without a test.
            first, *rest = found
            return [*rest, Case(first.type)]
        return found

    def _required_members(self, type_: Type | None) -> dict[str, MemberKind]:
        if isinstance(type_, ListOf):
            type_ = type_.item
        if not isinstance(type_, Ref):
            raise Unreadable(f"{type_} cannot be told apart by its members")
        entries = self.model.entries
        record = entries.get(type_.name) or self._made(type_.name)
        if not isinstance(record, Record):
            raise Unreadable(f"{type_.name} is no object")
        members: dict[str, MemberKind] = {}
        for field in _needed(record.fields):
            members[field.wire] = "str" if self._is_string(field.type) else "any"
        return members

    def _is_string(self, type_: Type) -> bool:
        if isinstance(type_, Ref):
            entry = self._made(type_.name)
            return isinstance(entry, Alias) and self._is_string(entry.type)
        return type_ == Basic("str")

    # --- types

    def _type(self, schema: Json) -> tuple[Type, bool]:
        """The type a schema describes, and whether null is legal beside it."""
        schema = {key: value for key, value in schema.items() if key != "description"}
        branches = _branches(schema)
        if branches:
            return self._type_of_branches(branches)
        if ref := schema.get("$ref") or _only_ref(schema):
            return Ref(ref.removeprefix("#/$defs/")), False
        kinds = _kinds(schema)
        nullable = len(kinds) > 1 and "null" in kinds
        kind = next((kind for kind in kinds if kind != "null" or len(kinds) == 1), None)
        match kind:
            case None:
                return Basic("any"), False
            case "null":
                return Basic("null"), False
            case "string" if "const" in schema:
                return Words((schema["const"],), False), nullable
            case "string":
                return Basic("str", min_length=schema.get("minLength")), nullable
            case "boolean":
                return Basic("bool"), nullable
            case "integer":
                return (
                    Basic("int", schema.get("minimum"), schema.get("maximum")),
                    nullable,
                )
            case "number":
                return Basic("float", schema.get("minimum"), schema.get("maximum")), nullable
            case "array":
                return ListOf(self._item(schema["items"])), nullable
            case "object" if isinstance(schema.get("additionalProperties"), dict):
                return MapOf(self._item(schema["additionalProperties"])), nullable
            case "object" if "properties" not in schema:
                return Basic("object"), nullable
            case _:
                raise Unreadable(f"unknown type {kind!r}")

    def _item(self, schema: Json) -> Type:
        type_, nullable = self._type(schema)
        return Either((type_, Basic("null"))) if nullable else type_

    def _type_of_branches(self, branches: list[Json]) -> tuple[Type, bool]:
        rest = [branch for branch in branches if branch.get("type") != "null"]
        nullable = len(rest) < len(branches)
        if len(rest) == 1:
            type_, inner = self._type(rest[0])
            return type_, nullable or inner
        names = [_only_ref(branch) for branch in rest]
        if all(names):
            return ByMethod(tuple(name for name in names if name)), nullable
        raise Unreadable("alternatives inside a member")

    # --- methods

    def _methods(self, document: Json) -> Iterator[MethodRow]:
        for envelope, side in ENVELOPES:
            if envelope in self.definitions:
                for name in self._listed(self.definitions[envelope]["properties"]["params"]):
                    yield self._method(name, side)
        for top in document["anyOf"]:
            if "params" in top.get("properties", {}):
                for name in self._listed(top["properties"]["params"]):
                    yield self._method(name, "both")

    def _listed(self, params: Json) -> list[str]:
        type_, _ = self._type(params)
        names = type_.names if isinstance(type_, ByMethod) else (cast("Ref", type_).name,)
        return [name for name in names if name not in EXTENSIONS]

    def _method(self, params: str, side: Side) -> MethodRow:
        schema = self.definitions[params]
        wire: str = schema["x-method"]
        kind: Literal["request", "notification"] = (
            "request" if params.endswith("Request") else "notification"
        )
        facts = self.notes.of_method(wire, kind)
        word: str = facts.get("side") or schema["x-side"]
        declared = SIDES.get(word)
        if declared is None:
            raise Unreadable(f"{wire}: say in notes.toml which side handles it, {word!r} does not")
        if side not in {"both", declared}:
            raise Unreadable(f"{wire}: its envelope says {side}, its x-side says {declared}")
        result = params.removesuffix("Request") + "Response" if kind == "request" else None
        if result and self.definitions[result].get("x-method") != wire:
            raise Unreadable(f"{result} is no result of {wire}")
        return MethodRow(
            name=wire,
            side=declared,
            kind=kind,
            params=params,
            result=result,
            gate=facts.get("gate"),
            handler=facts.get("handler")
            or snake(params.removesuffix("Request").removesuffix("Notification")),
            stable=self.stable is None or params in self.stable,
        )


def _check_keywords(schema: Json) -> None:
    """Raise `Unreadable` where a schema, or one inside it, has a keyword that is not understood."""
    if unknown := set(schema) - KEYWORDS:
        raise Unreadable(f"unknown keywords {sorted(unknown)}")
    for closing in ("additionalProperties", "unevaluatedProperties"):
        if schema.get(closing) is False:
            raise Unreadable(f"{closing} is false: unknown members are no longer welcome")
    inner = [schema[key] for key in ("items", "not", "additionalProperties") if key in schema]
    inner += schema.get("properties", {}).values()
    for key in ("allOf", "anyOf", "oneOf"):
        inner += schema.get(key, [])
    for part in inner:
        if isinstance(part, dict):
            _check_keywords(cast("Json", part))


def _kinds(schema: Json) -> list[str]:
    kinds: str | list[str] = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def _branches(schema: Json) -> list[Json]:
    return schema.get("anyOf") or schema.get("oneOf") or []


def _only_ref(schema: Json) -> str | None:
    """The definition that `allOf` with one member, or a plain `$ref`, points at."""
    refs = schema.get("allOf", [])
    if len(refs) > 1:
        raise Unreadable("allOf with several members")
    ref = refs[0]["$ref"] if refs else schema.get("$ref")
    return None if ref is None else ref.removeprefix("#/$defs/")


def _tag(branch: Json) -> tuple[str, str] | None:
    """(member, value) of the constant string that marks an alternative."""
    for wire, member in branch.get("properties", {}).items():
        if isinstance(member.get("const"), str) and wire in branch.get("required", []):
            return wire, member["const"]
    return None


def _tag_inside(schema: Json) -> bool:
    """Whether an object has branches whose mark is one of its own members."""
    return any(
        tag and tag[0] in schema.get("properties", {})
        for tag in (_tag(branch) for branch in _branches(schema))
    )


def _is_scalar(branch: Json) -> bool:
    return branch.get("type") in ("string", "integer", "number", "boolean", "null")


def _join(one: Field | None, two: Field) -> Field:
    """A member that two alternatives describe: of either type."""
    if one is None or one.type == two.type:
        return one or two
    if isinstance(one.type, Basic) and one.type.kind == "str" and isinstance(two.type, Words):
        return one
    if isinstance(two.type, Basic) and two.type.kind == "null":
        return one
    return Field(
        one.wire,
        one.python,
        Either((one.type, two.type)),
        one.required and two.required,
        one.nullable or two.nullable,
        one.flags,
    )


def _needed(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    return tuple(field for field in fields if field.required)


def _as_optional(field: Field) -> Field:
    return Field(field.wire, field.python, field.type, False, field.nullable, field.flags)


def _uses(node: object) -> Iterator[str]:
    """Every mention of a definition, one by one."""
    if isinstance(node, dict):
        for key, value in cast("Json", node).items():
            if key == "$ref":
                yield value.removeprefix("#/$defs/")
            else:
                yield from _uses(value)
    elif isinstance(node, list):
        for item in cast("list[object]", node):
            yield from _uses(item)
