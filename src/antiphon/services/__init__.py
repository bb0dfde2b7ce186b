"""What a client lends an agent, confined, the policy that decides about it, and what it is told.

Each service has handlers named as the client's methods (`read_text_file(params, ctx)`, …), answers
with structs of protocol version 1 and refuses with `RequestError`. The connection, the routing and
what is advertised are left to `runtime` and `Client`.
"""

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
