"""A form that an agent wants filled in: its fields in order, and whether an answer fits them.

Responsible for reading the requested schema into `Field`s and for checking values against them, by
itself and in bounded time. Showing it is left to whoever asks a person, sending the answer to
`_elicitation`.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec

from antiphon.schema import Unknown, v1
from antiphon.services._context import given
from antiphon.services._pattern import MAX_STEPS, compile_pattern

__all__ = ["Choice", "Field", "Form", "FormError", "FormValue"]

#: What a form's answer may hold.
FormValue: TypeAlias = str | int | float | bool | list[str]
FieldKind: TypeAlias = Literal[
    "string", "integer", "number", "boolean", "choice", "choices", "other"
]

_INT64 = 2**63
#: Steps that making a pattern ready costs, a character.
_COMPILING = 10
_DATE_TIME = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}):(\d{2}):(\d{2})(\.\d{1,9})?([Zz]|[+-](\d{2}):(\d{2}))",
    re.ASCII,
)


class _Steps:
    """What the patterns of one form may cost together: an agent writes as many as it likes."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self, steps: int) -> bool:
        """Whether there is that much left; it is spent then."""
        if steps > self._left:
            return False
        self._left -= steps
        return True


class FormError(ValueError):
    """An answer does not fit its form.

    Attributes:
        problems: what is wrong, by the name of the field: one sentence for a person each.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        super().__init__("; ".join(f"{name}: {problem}" for name, problem in self.problems.items()))


class Choice(msgspec.Struct, frozen=True):
    """One of the values that a field takes, and what a person sees for it."""

    value: str
    title: str
    description: str = ""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a form; the words are the agent's, and are to be shown as such.

    Attributes:
        name: what its value is called in the answer.
        title: what a person sees; the name where the agent gave none.
        description: "" if there is none.
        kind: "choice" takes one of `choices`, "choices" a list of them. "other" is a type that this
            library does not know: it is kept in `schema` as it came, never taken for a known one,
            and has no valid value here (R1-142).
        required: whether an answer must have it.
        default: what to fill in beforehand, or None; it fits the field.
        choices: in the agent's order.
        minimum: least value, or None; the bounds are inclusive.
        maximum: greatest value, or None.
        min_length: of a text in characters, of "choices" in items; or None.
        max_length: likewise.
        pattern: a regular expression (ECMAScript, found anywhere in the text), or None.
        format: "email", "uri", "date", "date-time", or a word that means nothing here; or None.
        schema: the property as it came; `Unknown` for "other", None for a name that is required and
            described nowhere.
    """

    name: str
    title: str
    description: str = ""
    kind: FieldKind
    required: bool = False
    default: FormValue | None = None
    choices: tuple[Choice, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    format: str | None = None
    schema: v1.ElicitationPropertySchema | None = None

    def check(self, value: object) -> FormValue:
        """The value as it goes on the wire.

        A pattern is tried in bounded time; one that would take longer, or that uses look-around and
        the like, is left to the agent, which validates again (R1-131).

        Raises:
            ValueError: it does not fit; the text is one sentence for a person.
        """
        return self._checked(value, _Steps())

    def _checked(self, value: object, steps: _Steps) -> FormValue:
        match self.kind:
            case "string":
                return self._text(value, steps)
            case "integer":
                return cast("int", self._within(_whole(value)))
            case "number":
                return self._within(_number(value))
            case "boolean":
                if not isinstance(value, bool):
                    raise _misfit("is neither yes nor no")
                return value
            case "choice":
                if not isinstance(value, str) or value not in self._values():
                    raise ValueError("is none of the choices")
                return value
            case "choices":
                return self._list(value)
            case "other":
                raise ValueError("is of a kind that is not known here")

    def parse(self, text: str) -> FormValue:
        """The value that a person means by a typed text, checked.

        Numbers as usual; yes, no, y, n, true, false for a boolean; for choices a title, a value, or a
        number from 1 on, several with commas between.

        Raises:
            ValueError: as `check`.
        """
        word = text.strip()
        match self.kind:
            case "integer" | "number":
                return self.check(_typed_number(word, whole=self.kind == "integer"))
            case "boolean":
                known = {"yes": True, "y": True, "true": True, "no": False, "n": False}
                return self.check({**known, "false": False}.get(word.lower()))
            case "choice":
                return self.check(self._chosen(word))
            case "choices":
                parts = [part.strip() for part in word.split(",") if part.strip()]
                whole = self._chosen(word)  # a title may have a comma in it
                return self.check(
                    [whole]
                    if whole is not None and parts
                    else [self._chosen(part) or "" for part in parts]
                )
            case _:
                return self.check(text)

    def _chosen(self, word: str) -> str | None:
        for choice in self.choices:
            if word in {choice.value, choice.title}:
                return choice.value
        fitting = [c.value for c in self.choices if c.title.lower() == word.lower()]
        if len(fitting) == 1:
            return fitting[0]
        if word.isascii() and word.isdigit() and len(word) < 9:
            number = int(word)
            if 1 <= number <= len(self.choices):
                return self.choices[number - 1].value
        return None

    def _values(self) -> set[str]:
        return {choice.value for choice in self.choices}

    def _text(self, value: object, steps: _Steps) -> str:
        if not isinstance(value, str):
            raise _misfit("is no text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("is no valid text") from None
        if self.min_length is not None and len(value) < self.min_length:
            raise ValueError(f"is shorter than {_many(self.min_length, 'character')}")
        if self.max_length is not None and len(value) > self.max_length:
            raise ValueError(f"is longer than {_many(self.max_length, 'character')}")
        if self.format in _FORMATS and not _FORMATS[self.format][0](value):
            raise ValueError(f"is no {_FORMATS[self.format][1]}")
        if self.pattern is not None and steps.take(_COMPILING * len(self.pattern)):
            pattern = compile_pattern(self.pattern)
            if (
                pattern is not None
                and steps.take(pattern.steps(value))
                and pattern.search(value) is False
            ):
                raise ValueError("does not have the form that is asked for")
        return value

    def _within(self, value: float) -> float:
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"is less than {self.minimum}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"is more than {self.maximum}")
        return value

    def _list(self, value: object) -> list[str]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _misfit("is no list of choices")
        items = list(cast("Sequence[object]", value))
        values = self._values()
        if not all(isinstance(item, str) and item in values for item in items):
            raise ValueError("holds what is none of the choices")
        if len(set(items)) < len(items):
            raise ValueError("holds a choice twice")
        if self.min_length is not None and len(items) < self.min_length:
            raise ValueError(f"has fewer than {_many(self.min_length, 'choice')}")
        if self.max_length is not None and len(items) > self.max_length:
            raise ValueError(f"has more than {_many(self.max_length, 'choice')}")
        return cast("list[str]", items)


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A form as an agent asks for it to be filled in.

    Attributes:
        message: why it asks; to be shown (R1-131).
        agent: who asks: the agent's name and version by its own account, or "" (R1-130).
        title: of the whole form, or "".
        description: of the whole form, or "".
        fields: in the agent's order.
        session_id: the session it is about, or "" for a request outside of one.
        tool_call_id: the tool call it is about, or None.
        request_id: the request of ours that it is about (`authenticate`), or None.
        params: the request as it came, with everything this class does not name.
    """

    message: str
    agent: str = ""
    title: str = ""
    description: str = ""
    fields: tuple[Field, ...] = ()
    session_id: str = ""
    tool_call_id: str | None = None
    request_id: int | str | None = None
    params: v1.ElicitationFormMode

    def __getitem__(self, name: str) -> Field:
        """The field of that name. Raises KeyError."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    @property
    def answerable(self) -> bool:
        """Whether it can be accepted at all: not if a field of an unknown kind is required."""
        return not any(field.required and field.kind == "other" for field in self.fields)

    def defaults(self) -> dict[str, FormValue]:
        """What to fill in beforehand, by name."""
        return {
            field.name: list(field.default) if isinstance(field.default, list) else field.default
            for field in self.fields
            if field.default is not None
        }

    def check(self, values: Mapping[str, object]) -> dict[str, FormValue]:
        """The values as they go on the wire, in the form's order.

        None stands for a field that is left out. Nothing is filled in that is not given: defaults are
        a person's to see first. The time that one pattern may take is all that those of a form have.

        Raises:
            FormError: some do not fit, are missing, or belong to no field; all are named.
        """
        names = {field.name for field in self.fields}
        problems: dict[str, str] = {
            str(name): "is no field of this form" for name in values if name not in names
        }
        checked: dict[str, FormValue] = {}
        steps = _Steps()
        for field in self.fields:
            value = values.get(field.name)
            if value is None:
                if field.required:
                    problems[field.name] = "is required"
                continue
            try:
                checked[field.name] = field._checked(value, steps)  # pyright: ignore[reportPrivateUsage]
            except ValueError as error:
                problems[field.name] = str(error)
        if problems:
            raise FormError(problems)
        return checked


def read_form(params: v1.ElicitationFormMode, agent: str) -> Form:
    """The form of a request."""
    schema = params.requested_schema
    properties: Mapping[str, v1.ElicitationPropertySchema] = given(schema.properties, {})
    required = dict.fromkeys(given(schema.required, []))
    steps = _Steps()
    fields = [
        _field(name, of, required=name in required, steps=steps) for name, of in properties.items()
    ]
    fields += [
        Field(name=name, title=name, kind="other", required=True)
        for name in required
        if name not in properties
    ]
    return Form(
        message=params.message,
        agent=agent,
        title=given(schema.title, ""),
        description=given(schema.description, ""),
        fields=tuple(fields),
        session_id=given(params.session_id, ""),
        tool_call_id=given(params.tool_call_id, None),
        request_id=given(params.request_id, None),
        params=params,
    )


def _field(
    name: str, schema: v1.ElicitationPropertySchema, *, required: bool, steps: _Steps
) -> Field:
    if isinstance(schema, Unknown):
        return Field(name=name, title=name, kind="other", required=required, schema=schema)
    facts: dict[str, Any] = {
        "name": name,
        "title": given(schema.title, "") or name,
        "description": given(schema.description, ""),
        "required": required,
        "schema": schema,
    }
    match schema:
        case v1.StringPropertySchema():
            options = given(schema.one_of, None)
            values = given(schema.enum, None)
            if options is not None or values is not None:
                facts["choices"] = _choices(values or () if options is None else options)
            facts.update(
                kind="string" if options is None and values is None else "choice",
                min_length=given(schema.min_length, None),
                max_length=given(schema.max_length, None),
                pattern=given(schema.pattern, None),
                format=given(schema.format, None),
            )
        case v1.NumberPropertySchema() | v1.IntegerPropertySchema():
            facts.update(
                kind="integer" if isinstance(schema, v1.IntegerPropertySchema) else "number",
                minimum=given(schema.minimum, None),
                maximum=given(schema.maximum, None),
            )
        case v1.BooleanPropertySchema():
            facts.update(kind="boolean")
        case v1.MultiSelectPropertySchema():
            items = schema.items
            if isinstance(items, Unknown):
                return Field(kind="other", **facts)
            facts.update(
                kind="choices",
                choices=_choices(
                    items.enum if isinstance(items, v1.StringMultiSelectItems) else items.any_of
                ),
                min_length=given(schema.min_items, None),
                max_length=given(schema.max_items, None),
            )
    field = Field(**facts)
    default = given(schema.default, None)
    if default is None:
        return field
    try:
        fitting = field._checked(default, steps)  # pyright: ignore[reportPrivateUsage]
        return msgspec.structs.replace(field, default=fitting)
    except ValueError:
        return field  # one that does not fit helps nobody to fill it in


def _choices(options: Sequence[str | v1.EnumOption]) -> tuple[Choice, ...]:
    return tuple(
        Choice(option, option)
        if isinstance(option, str)
        else Choice(option.const, option.title or option.const, given(option.description, ""))
        for option in options
    )


def _whole(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _misfit("is no whole number")
    if not -_INT64 <= value < _INT64:
        raise ValueError("is too large a number")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _misfit("is no number")
    if isinstance(value, int):
        return _whole(value)
    if not math.isfinite(value):
        raise _misfit("is no number")
    return value


def _typed_number(word: str, *, whole: bool) -> float | str:
    # Python's own reading takes more than a person means: "1_0", "nan", digits of other scripts.
    if not re.fullmatch(r"[+-]?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?", word, re.ASCII):
        return word
    return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word) if not whole else word


def _misfit(text: str) -> ValueError:
    return ValueError(text)


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _is_email(text: str) -> bool:
    name, at, host = text.rpartition("@")
    return bool(name and at and host) and not re.search(r"[\s\x00-\x1f@]", name + host)


def _is_uri(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    fine = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) and not re.search(r'[\s\x00-\x1f<>"]', text)
    return bool(fine and (parts.netloc or parts.path))


def _is_date(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
        return False
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _is_date_time(text: str) -> bool:
    found = _DATE_TIME.fullmatch(text)
    if found is None or not _is_date(found[1]):
        return False
    hour, minute, second = int(found[2]), int(found[3]), int(found[4])
    offset = found[7] is None or (int(found[7]) < 24 and int(found[8]) < 60)
    return hour < 24 and minute < 60 and second <= 60 and offset  # 60: a leap second


_FORMATS: dict[str | None, Any] = {
    "email": (_is_email, "e-mail address"),
    "uri": (_is_uri, "address with a scheme, such as https://…"),
    "date": (_is_date, "date such as 2026-11-30"),
    "date-time": (_is_date_time, "date and time such as 2026-11-30T12:00:00Z"),
}
