"""What a client lends an agent, confined, the policy that decides about it, and what it is told.

Each service has handlers named as the client's methods (`read_text_file(params, ctx)`, …), answers
with structs of protocol version 1 and refuses with `RequestError`. The connection, the routing and
what is advertised are left to `runtime` and `Client`. Names are loaded on first use: who lends files
alone loads neither forms nor policies.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.services._call import Call
    from antiphon.services._context import Guard, Operation, ServiceContext
    from antiphon.services._elicitation import Elicitation, UrlRequest
    from antiphon.services._files import Files, Overlay
    from antiphon.services._form import Choice, Field, Form, FormError
    from antiphon.services._permissions import Decision, Permissions
    from antiphon.services._question import Answer, Request
    from antiphon.services._rules import PolicyError, Rule, Verdict
    from antiphon.services._terminals import Terminals

__all__ = [
    "Answer",
    "Call",
    "Choice",
    "Decision",
    "Elicitation",
    "Field",
    "Files",
    "Form",
    "FormError",
    "Guard",
    "Operation",
    "Overlay",
    "Permissions",
    "PolicyError",
    "Request",
    "Rule",
    "ServiceContext",
    "Terminals",
    "UrlRequest",
    "Verdict",
]

_HOMES = {
    "Answer": "_question",
    "Call": "_call",
    "Choice": "_form",
    "Decision": "_permissions",
    "Elicitation": "_elicitation",
    "Field": "_form",
    "Files": "_files",
    "Form": "_form",
    "FormError": "_form",
    "Guard": "_context",
    "Operation": "_context",
    "Overlay": "_files",
    "Permissions": "_permissions",
    "PolicyError": "_rules",
    "Request": "_question",
    "Rule": "_rules",
    "ServiceContext": "_context",
    "Terminals": "_terminals",
    "UrlRequest": "_elicitation",
    "Verdict": "_rules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"antiphon.services.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
