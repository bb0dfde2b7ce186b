"""What a client lends an agent, confined: files and terminals.

Each service has handlers named as the client's methods (`read_text_file(params, ctx)`, …), answers
with structs of protocol version 1 and refuses with `RequestError`. The connection, the routing and
what is advertised are left to `runtime` and `Client`.
"""

from antiphon.services._context import Guard, Operation, ServiceContext
from antiphon.services._files import Files
from antiphon.services._terminals import Terminals

__all__ = ["Files", "Guard", "Operation", "ServiceContext", "Terminals"]
