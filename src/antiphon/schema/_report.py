"""What is said about JSON that is not as its type wants it: repairs, errors, names of JSON types.

Responsible for the words and their shape only. Leaves to `_forgiving` to find what is wrong; it is a
module of its own so that a process that meets nothing wrong never loads that one.
"""

from __future__ import annotations

from typing import Any, Final, TypeGuard

import msgspec

__all__ = ["JSON_NAMES", "FieldError", "Repair", "is_array", "is_object", "json_name"]

#: The JSON type of a decoded value, by class, as error texts name it.
JSON_NAMES: Final[dict[type, str]] = {
    dict: "object",
    list: "array",
    str: "str",
    bool: "bool",
    int: "int",
    float: "float",
    type(None): "null",
}


def json_name(value: Any) -> str:
    """The JSON type of a decoded value. What no Python type holds was a number (`OutOfRange`)."""
    return JSON_NAMES.get(value.__class__, "number out of range")


class Repair(msgspec.Struct, frozen=True):
    """One thing that was wrong in a message and did not stop it.

    Attributes:
        path: where, in wire names, e.g. "$.content[3].title"; keys of free maps show as "[...]".
        reason: what was wrong, e.g. "Expected `str`, got `int`". Never holds a value of the input.
    """

    path: str
    reason: str


class FieldError(msgspec.ValidationError):
    """JSON that its type does not allow, and that no leniency rule covers.

    Attributes:
        path: where, in wire names, e.g. "$.sessionId".
        reason: what was wrong. Like `str()` of the error it never holds a value of the input, so
            that it can be sent to the peer.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{reason} - at `{path}`")
        self.path = path
        self.reason = reason


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a decoded value is a JSON object."""
    return type(value) is dict


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Whether a decoded value is a JSON array."""
    return type(value) is list
