"""A policy as text: TOML, read strictly.

What a key means is `_rules`' business; here a text becomes rules and settings, or one error that says
where it is wrong. Nothing is guessed: a key that is not known may be a rule that its author relies on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from antiphon.services._rules import (
    MAX_RULES,
    WORDS,
    Policy,
    PolicyError,
    Rule,
    check_deadline,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Settings", "read_policy", "read_policy_file"]

#: Bytes of a policy's file.
MAX_BYTES: Final = 1 << 20

_TOP: Final = ("default", "reads", "deadline", "rule")
_KEYS: Final = tuple(field.name for field in msgspec.structs.fields(Rule))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy's text says: the rules, and what `Permissions` takes beside them."""

    policy: Policy
    deadline: float | None = None


def read_policy_file(path: str | os.PathLike[str]) -> Settings:
    """A policy from a file.

    Raises:
        PolicyError: it cannot be read, is longer than 1 MiB, no UTF-8, or no policy.
    """
    name = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise PolicyError(f"cannot be read: {problem}", file=name) from error
    if len(content) > MAX_BYTES:
        raise PolicyError(f"longer than {MAX_BYTES} bytes", file=name)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"line {line} is not UTF-8", file=name) from error
    return read_policy(text, file=name)


def read_policy(text: str, *, file: str | None = None) -> Settings:
    """A policy from its text.

    Raises:
        PolicyError: it is no policy; `file` is named in it.
    """
    if len(text) > MAX_BYTES:
        raise PolicyError(f"longer than {MAX_BYTES} characters", file=file)
    import tomllib  # only who has a file pays for it

    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise PolicyError(f"not TOML: {problem}", file=file) from error
    try:
        return _settings(tables, file)
    except PolicyError as error:
        if error.file is not None or file is None:
            raise
        raise PolicyError(error.problem, file=file, rule=error.rule, key=error.key) from error


def _settings(tables: Mapping[str, Any], file: str | None) -> Settings:
    _known(tables, _TOP, "")
    deadline = tables.get("deadline")
    if deadline is not None:
        deadline = check_deadline(deadline)
    found: object = tables.get("rule", [])
    if not isinstance(found, list):
        raise PolicyError("rules are tables in double brackets: [[rule]]", key="rule")
    items = cast("list[object]", found)
    if len(items) > MAX_RULES:
        raise PolicyError(f"{len(items)} rules; at most {MAX_RULES} are tried in order")
    rules = [_rule(number, item, file) for number, item in enumerate(items, 1)]
    policy = Policy(rules, default=tables.get("default", "ask"), reads=tables.get("reads", "allow"))
    return Settings(policy=policy, deadline=deadline)


def _rule(number: int, item: object, file: str | None) -> Rule:
    if not isinstance(item, dict):
        raise PolicyError("a rule is a table: [[rule]]", rule=f"rule {number}")
    table = cast("dict[str, Any]", item)
    name: object = table.get("name")
    where = f"rule {number} ({name!r})" if isinstance(name, str) and name else f"rule {number}"
    _known(table, _KEYS, where)
    if "decision" not in table:
        words = ", ".join(repr(word) for word in WORDS)
        raise PolicyError(f"missing; one of {words}", rule=where, key="decision")
    for key in ("kind", "title", "path", "command", "cwd", "session", "env"):
        if table.get(key) == []:
            raise PolicyError(
                "an empty list matches nothing; leave the key out", rule=where, key=key
            )
    try:
        return Rule(**table)
    except PolicyError as error:
        raise PolicyError(error.problem, file=file, rule=where, key=error.key) from error


def _known(table: Mapping[str, Any], keys: Iterable[str], rule: str) -> None:
    for key in table:
        if key not in keys:
            known = ", ".join(keys)
            shown = key if key.isidentifier() else repr(key)
            raise PolicyError(f"no such key; there are: {known}", rule=rule, key=shown)
