"""`elicitation/create` and `elicitation/complete`, answered by the author's hooks.

Responsible for what a person needs to see of a form or a web address, for checking an answer before it
leaves, and for the bond between an address and its completion. Fails closed: what a hook raises, or
answers wrongly, is "cancel", and nothing is ever fetched or opened here. Leaves the form itself to
`_form`, asking to the hooks, withdrawing a question to the connection, which cancels the task.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import quote, urlsplit

from antiphon._errors import ENDING, InvalidParams
from antiphon.schema import v1, v1_unstable
from antiphon.services._context import given
from antiphon.services._form import Form, FormError, read_form
from antiphon.services._question import answer_of

if TYPE_CHECKING:
    from antiphon.services._context import ServiceContext

__all__ = ["Elicitation", "FormHook", "UrlHook", "UrlRequest"]

logger = logging.getLogger("antiphon.services")

FormAnswer: TypeAlias = (
    "Mapping[str, object] | bool | v1.ElicitationDeclineAction | v1.ElicitationCancelAction | None"
)
UrlAnswer: TypeAlias = "bool | None"
FormHook: TypeAlias = "Callable[[Form, Any], FormAnswer | Awaitable[FormAnswer]]"
UrlHook: TypeAlias = "Callable[[UrlRequest, Any], UrlAnswer | Awaitable[UrlAnswer]]"

#: Addresses whose completion is waited for on one connection; it is optional, so some never come.
MAX_OUTSTANDING = 256
#: Characters of an address: what a person is asked about must be possible to look at.
MAX_URL = 8192


class UrlRequest:
    """A web address that an agent wants opened, outside of the protocol.

    Show `message`, `agent`, all of `ascii_url` and its `host`, get consent, and only then open it, in a
    browser that shares nothing with this process (R1-135, R1-136). Never fetch it to see what it is.

    Attributes:
        message: why it asks.
        agent: who asks: the agent's name and version by its own account, or "".
        url: as it came; `https` or `http`, without spaces, controls and backslashes.
        ascii_url: the same address with nothing in it that could look like something else: the host
            in punycode, other characters percent-encoded. What to show and to open.
        host: in punycode, without port.
        unicode_host: how the host reads, where that is different.
        suspicious: why a person should look twice, any of "http" (not encrypted, and not this
            machine), "punycode" (the host reads as other characters, which may imitate a known name),
            "credentials" (a user name before the host, which may look like one), "ip-address",
            "local" (it leads to this machine).
        elicitation_id: the agent's name for it; nothing else can be read from it (R1-141).
        session_id: the session it is about, or "" for a request outside of one.
        tool_call_id: the tool call it is about, or None.
        request_id: the request of ours that it is about (`authenticate`), or None.
        params: the request as it came.
    """

    def __init__(self, params: v1.ElicitationUrlMode, agent: str = "") -> None:
        self.params = params
        self.message = params.message
        self.agent = agent
        self.elicitation_id = params.elicitation_id
        self.session_id = given(params.session_id, "")
        self.tool_call_id: str | None = given(params.tool_call_id, None)
        self.request_id: int | str | None = given(params.request_id, None)
        self.url = params.url
        self.ascii_url, self.host, self.unicode_host, self.suspicious = _read_url(params.url)
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<UrlRequest {self.ascii_url!r}>"

    @property
    def is_completed(self) -> bool:
        """Whether the agent has said that what the address is for is done."""
        return self._ended.done() and not self._ended.cancelled() and self._ended.result()

    async def completed(self) -> bool:
        """Wait for the agent to say that it is done (`elicitation/complete`).

        True then. False when that cannot come any more: it was declined, the session or the connection
        is closed, another request took its id. Agents need not say it, so bound the wait. May be
        awaited by several, during the hook and after it; cancelling one changes nothing for others.
        """
        return await asyncio.shield(self._ended)

    def end(self, *, completed: bool) -> None:
        """For the service: it is completed, or will never be."""
        if not self._ended.done():
            self._ended.set_result(completed)


class Elicitation:
    """Answers what an agent asks of a person: forms to fill in, and web addresses to open.

    ::

        async def form(form: Form, ctx) -> dict[str, object] | bool | None:
            return await my_dialog(form.message, form.fields, form.defaults())

        Client(elicitation=Elicitation(form=form))

    Only what is given is advertised; the agent's other requests are answered -32602 (R1-128).

    Args:
        form: called with a `Form` and the `ClientContext`. Returns the values by field name, which
            accepts; False to decline; None to cancel (the person dismissed it without choosing). The
            values are checked, and if they do not fit nothing is accepted: "cancel" is sent and the
            mistake is logged. Call `form.check` first to ask again.
        url: called with a `UrlRequest`. Returns True once the person agreed and it is being opened,
            False to decline, None to cancel. What is no absolute http or https address is answered
            -32602 and never shown: opening other schemes starts programs.

    Hooks may be async or plain; a plain one must not block, it holds up the event loop (with
    `antiphon.sync` it may). What they raise is logged and answered "cancel". A hook is cancelled when
    the agent withdraws its question, the turn is cancelled or the link is gone; the request is
    answered once in any case.
    """

    def __init__(self, *, form: FormHook | None = None, url: UrlHook | None = None) -> None:
        if form is None and url is None:
            raise ValueError("give form, url or both: without a hook there is nothing to ask")
        for hook in (form, url):
            if hook is not None and not callable(hook):
                msg = f"a hook is a function, not {hook!r}"  # pyright: ignore[reportUnreachable]
                raise TypeError(msg)
        self.form = form
        self.url = url
        # By connection: an id means nothing on another one (R1-140).
        self._outstanding: weakref.WeakKeyDictionary[Any, dict[str, UrlRequest]] = (
            weakref.WeakKeyDictionary()
        )
        self._watchers: set[asyncio.Task[None]] = set()

    async def create_elicitation(
        self, params: v1_unstable.CreateElicitationRequest, ctx: ServiceContext
    ) -> v1_unstable.CreateElicitationResponse:
        """Answer `elicitation/create`.

        Raises:
            InvalidParams: no hook for this mode, or no web address.
        """
        if isinstance(params, v1.ElicitationFormMode) and self.form is not None:
            return await self._ask_form(self.form, read_form(params, _agent_of(ctx)), ctx)
        if isinstance(params, v1.ElicitationUrlMode) and self.url is not None:
            return await self._ask_url(self.url, UrlRequest(params, _agent_of(ctx)), ctx)
        raise InvalidParams({"reason": "elicitation mode not supported"})

    async def complete_elicitation(
        self, params: v1_unstable.CompleteElicitationNotification, ctx: ServiceContext
    ) -> None:
        """Take note of `elicitation/complete`; unknown and completed ids are ignored (R1-141)."""
        request = self._outstanding.get(_link_of(ctx), {}).pop(params.elicitation_id, None)
        if request is not None:
            request.end(completed=True)

    async def release_session(self, session_id: str) -> None:
        """A session is closed: nothing of it will be completed."""
        for requests in list(self._outstanding.values()):
            for key, request in list(requests.items()):
                if request.session_id == session_id:
                    del requests[key]
                    request.end(completed=False)

    async def _ask_form(
        self, hook: FormHook, form: Form, ctx: ServiceContext
    ) -> v1_unstable.CreateElicitationResponse:
        answer = await _ask(hook, form, ctx)
        if isinstance(answer, Mapping):
            try:
                content = form.check(cast("Mapping[str, object]", answer))
            except FormError:
                logger.exception("an answer that does not fit its form is not sent")
                return v1.ElicitationCancelAction()
            return v1.ElicitationAcceptAction(content=cast("dict[str, Any]", content))
        if isinstance(answer, v1.ElicitationDeclineAction | v1.ElicitationCancelAction):
            return answer
        return _refusal(answer, "form")

    async def _ask_url(
        self, hook: UrlHook, request: UrlRequest, ctx: ServiceContext
    ) -> v1_unstable.CreateElicitationResponse:
        # Before anything is waited for: the completion may stand right behind the request.
        self._remember(request, ctx)
        accepted = False
        try:
            answer = await _ask(hook, request, ctx)
            accepted = answer is True
            return v1.ElicitationAcceptAction() if accepted else _refusal(answer, "url")
        finally:
            if not accepted:
                self._forget(request, ctx)

    def _remember(self, request: UrlRequest, ctx: ServiceContext) -> None:
        link = _link_of(ctx)
        requests = self._outstanding.get(link)
        if requests is None:
            requests = self._outstanding[link] = {}
            self._watch(link)
        before = requests.pop(request.elicitation_id, None)
        if before is None and len(requests) >= MAX_OUTSTANDING:
            before = requests.pop(next(iter(requests)))
        if before is not None:
            before.end(completed=False)
        requests[request.elicitation_id] = request

    def _forget(self, request: UrlRequest, ctx: ServiceContext) -> None:
        requests = self._outstanding.get(_link_of(ctx), {})
        if requests.get(request.elicitation_id) is request:
            del requests[request.elicitation_id]
        request.end(completed=False)

    def _watch(self, link: Any) -> None:
        """When the connection is gone, nothing will be completed any more."""
        wait_closed = getattr(link, "wait_closed", None)
        if wait_closed is None:
            return

        async def watch() -> None:
            try:
                await wait_closed()
            finally:
                for request in self._outstanding.pop(link, {}).values():
                    request.end(completed=False)

        task = asyncio.get_running_loop().create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)


async def _ask(hook: Callable[[Any, Any], Any], question: object, ctx: ServiceContext) -> object:
    """What the hook answers; None for what it raises, unless its task is cancelled."""
    try:
        return await answer_of(hook, question, ctx)
    except ENDING:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        logger.exception("asking a person failed; the question is answered as cancelled")
        return None


def _refusal(answer: object, hook: str) -> v1_unstable.CreateElicitationResponse:
    if answer is False:
        return v1.ElicitationDeclineAction()
    if answer is not None:
        logger.error("the %s hook answered %r, which accepts nothing", hook, answer)
    return v1.ElicitationCancelAction()


def _link_of(ctx: ServiceContext) -> Any:
    """What stands for the connection; services take any context."""
    return getattr(ctx, "connection", None) or type(ctx)


def _agent_of(ctx: ServiceContext) -> str:
    info: Any = getattr(getattr(ctx, "peer", None), "info", None)
    if info is None:
        return ""
    return f"{given(info.title, '') or info.name} {info.version}".strip()


def _read_url(url: str) -> tuple[str, str, str, tuple[str, ...]]:
    """`ascii_url`, `host`, `unicode_host` and `suspicious`.

    Raises:
        InvalidParams: no web address, or one that browsers read differently than we do.
    """
    # Browsers drop tabs and line ends and take a backslash for a slash: then what was shown is not
    # what is opened.
    if len(url) > MAX_URL or any(
        char <= " " or char in '\\<>"' or char == "\x7f" or char.isspace() for char in url
    ):
        raise _no_address()
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        url.encode()
    except ValueError:
        raise _no_address() from None
    if parts.scheme not in {"http", "https"} or not host or "%" in host:
        raise _no_address()
    suspicious: list[str] = []
    ascii_host, unicode_host = _hosts(host)
    local = ascii_host == "localhost" or ascii_host.endswith(".localhost")
    try:
        # Browsers also read 2130706433 and 0x7f.1 as addresses.
        address = ipaddress.ip_address(ascii_host)
    except ValueError:
        last = ascii_host.rstrip(".").rpartition(".")[2]
        if last.isdigit() or last.startswith("0x"):
            suspicious.append("ip-address")
    else:
        local = address.is_loopback
        suspicious.append("ip-address")
    if parts.scheme == "http" and not local:
        suspicious.append("http")
    if local:
        suspicious.append("local")
    if unicode_host:
        suspicious.append("punycode")
    if "@" in parts.netloc:
        suspicious.append("credentials")
    before, _, _ = parts.netloc.rpartition("@")
    place = f"[{ascii_host}]" if ":" in ascii_host else ascii_host
    netloc = f"{quote(before, safe=_SAFE)}@{place}" if before else place
    if port is not None:
        netloc += f":{port}"
    rest = url[len(parts.scheme) + 3 + len(parts.netloc) :]
    return (
        f"{parts.scheme}://{netloc}{quote(rest, safe=_SAFE)}",
        ascii_host,
        unicode_host,
        tuple(suspicious),
    )


_SAFE = "%/:?#[]@!$&'()*+,;=-._~"


def _hosts(host: str) -> tuple[str, str]:
    """The host in punycode, and how it reads where that is different."""
    try:
        ascii_host = host.encode("idna").decode().lower() if not host.isascii() else host
    except UnicodeError:
        raise _no_address() from None
    if ".." in ascii_host or any(not (c.isalnum() or c in "-._:") for c in ascii_host):
        raise _no_address()
    if not any(label.startswith("xn--") for label in ascii_host.split(".")):
        return ascii_host, ""
    try:
        return ascii_host, ascii_host.encode().decode("idna")
    except UnicodeError:
        return ascii_host, ascii_host


def _no_address() -> InvalidParams:
    return InvalidParams({"reason": "no web address", "field": "url"})
