"""`Elicitation`: hooks answer, what does not fit never leaves, and addresses are bound to their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import antiphon.sync
from antiphon import Agent, Client, Turn
from antiphon.schema import v1
from antiphon.services import Elicitation, Form, UrlRequest
from antiphon.testing import joined, raw_agent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from antiphon import AgentPeer
    from antiphon.testing import RawPeer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "age": {"type": "integer"}},
    "required": ["name"],
}
FORM = {"mode": "form", "message": "Who?", "requestedSchema": SCHEMA}
CANCEL = {"action": "cancel"}
DECLINE = {"action": "decline"}


def nothing(*_: Any) -> Any:
    """A hook that dismisses."""


def url(address: str = "https://example.com/login", id_: str = "e1", **more: Any) -> dict[str, Any]:
    return {"mode": "url", "message": "Sign in", "url": address, "elicitationId": id_, **more}


@contextlib.asynccontextmanager
async def asking(**hooks: Any) -> AsyncGenerator[tuple[AgentPeer, RawPeer]]:
    named = {"agentInfo": {"name": "odd", "title": "The Odd One", "version": "3"}}
    client = Client(elicitation=Elicitation(**hooks))
    async with raw_agent(client, initialized=named) as pair:
        yield pair


async def answer_of(raw: RawPeer, params: dict[str, Any], **scope: Any) -> dict[str, Any]:
    answer = await raw.ask("elicitation/create", {**(scope or {"sessionId": "s"}), **params})
    result: dict[str, Any] = answer.get("result") or answer["error"]
    return result


# ------------------------------------------------------------------ what is offered


@pytest.mark.covers("R1-128")
@pytest.mark.parametrize(
    ("hooks", "offered", "refused"),
    [
        ({"form": nothing}, {"form": {}}, url()),
        ({"url": nothing}, {"url": {}}, FORM),
        (
            {"form": nothing, "url": nothing},
            {"form": {}, "url": {}},
            {**FORM, "mode": "telepathy"},
        ),
    ],
)
async def test_only_what_is_given_is_offered_and_served(
    hooks: dict[str, Any], offered: dict[str, Any], refused: dict[str, Any]
) -> None:
    async with asking(**hooks) as (_, raw):
        assert raw.frames[0]["params"]["clientCapabilities"]["elicitation"] == offered
        assert (await answer_of(raw, refused))["code"] == -32602


def test_an_elicitation_without_a_hook_or_with_no_function_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="form, url or both"):
        Elicitation()
    with pytest.raises(TypeError, match="a function"):
        Elicitation(form="ask me")  # type: ignore[arg-type]


async def test_a_client_that_answers_by_itself_offers_what_it_says() -> None:
    class Own(Client):
        async def create_elicitation(self, params: Any, ctx: Any) -> Any:
            return v1.ElicitationDeclineAction()

    async with raw_agent(Own(elicitation=Elicitation(form=nothing))) as (_, raw):
        assert "elicitation" not in raw.frames[0]["params"]["clientCapabilities"]


# ------------------------------------------------------------------ forms


@pytest.mark.covers("R1-130", "R1-131")
async def test_a_form_names_the_agent_its_message_and_its_scope() -> None:
    seen: list[Form] = []

    def hook(form: Form, ctx: Any) -> None:
        seen.append(form)

    async with asking(form=hook) as (_, raw):
        await answer_of(raw, FORM, sessionId="s", toolCallId="t")
        await answer_of(raw, FORM, requestId=7)

    assert [(f.message, f.session_id, f.tool_call_id, f.request_id) for f in seen] == [
        ("Who?", "s", "t", None),
        ("Who?", "", None, 7),
    ]
    assert {f.agent for f in seen} == {"The Odd One 3"}


@pytest.mark.covers("R1-130", "R1-131")
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"name": "Jo", "age": 3.0}, {"action": "accept", "content": {"name": "Jo", "age": 3}}),
        ({"name": "Jo", "age": None}, {"action": "accept", "content": {"name": "Jo"}}),
        (False, DECLINE),
        (None, CANCEL),
        (v1.ElicitationDeclineAction(), DECLINE),
        (v1.ElicitationCancelAction(), CANCEL),
        ({"name": "J"}, CANCEL),
        ({}, CANCEL),
        ({"name": "Jo", "more": "x"}, CANCEL),
        (True, CANCEL),
        ("yes", CANCEL),
        (v1.ElicitationAcceptAction(content={"name": "J"}), CANCEL),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
async def test_what_a_hook_answers_is_sent_only_if_it_fits(
    given: Any, sent: dict[str, Any], plain: bool
) -> None:
    async def hook(form: Form, ctx: Any) -> Any:
        return given

    def plainly(*_: Any) -> Any:
        return given

    async with asking(form=plainly if plain else hook) as (_, raw):
        assert await answer_of(raw, FORM) == sent


async def test_what_a_hook_raises_cancels_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(form: Form, ctx: Any) -> Any:
        raise OSError("a secret path")

    async def gives_up(form: Form, ctx: Any) -> Any:
        raise asyncio.CancelledError

    with caplog.at_level(logging.ERROR):
        for hook in (broken, gives_up):
            async with asking(form=hook) as (_, raw):
                assert await answer_of(raw, FORM) == CANCEL
    assert "a secret path" in caplog.text


# ------------------------------------------------------------------ withdrawn


class Dialog:
    """A hook that stays open until it is cancelled."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, question: Any, ctx: Any) -> Any:
        self.open.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.mark.parametrize("params", [FORM, url()], ids=["form", "url"])
async def test_a_question_that_the_agent_withdraws_closes_its_dialog(
    params: dict[str, Any],
) -> None:
    dialog = Dialog()
    async with asking(form=dialog, url=dialog) as (_, raw):
        raw.send(raw.request(5, "elicitation/create", {"sessionId": "s", **params}))
        await asyncio.wait_for(dialog.open.wait(), 5)
        raw.send(raw.notification("$/cancel_request", {"requestId": 5}))
        answer = await raw.answer_to(5)

        assert answer["error"]["code"] == -32800
        await asyncio.wait_for(dialog.ended.wait(), 5)
        await raw.round_trip()
        assert [frame.get("id") for frame in raw.frames].count(5) == 1


@pytest.mark.covers("R1-92")
async def test_cancelling_the_turn_answers_its_forms_with_cancel_once() -> None:
    dialog = Dialog()
    client = Client(elicitation=Elicitation(form=dialog))
    async with raw_agent(client) as (peer, raw):
        opening = asyncio.ensure_future(_new_session(peer))
        raw.answer(await raw.wait("session/new"), {"sessionId": "s"})
        session = await opening
        async with session.prompt("x") as turn:
            prompt = await raw.wait("session/prompt")
            raw.send(raw.request(5, "elicitation/create", {"sessionId": "s", **FORM}))
            await asyncio.wait_for(dialog.open.wait(), 5)
            await session.cancel(backstop=None)
            assert (await raw.answer_to(5))["result"] == CANCEL
            await asyncio.wait_for(dialog.ended.wait(), 5)
            # One that comes while the turn is being stopped is not shown at all.
            dialog.open.clear()
            assert await answer_of(raw, FORM) == CANCEL
            assert not dialog.open.is_set()
            raw.answer(prompt, {"stopReason": "cancelled"})
            async for _ in turn:
                pass
        assert [frame.get("id") for frame in raw.frames].count(5) == 1


async def _new_session(peer: AgentPeer) -> Any:
    return await peer.new_session(cwd="/")


async def test_a_lost_link_closes_the_dialog() -> None:
    dialog = Dialog()
    async with asking(form=dialog) as (_, raw):
        raw.send(raw.request(5, "elicitation/create", {"sessionId": "s", **FORM}))
        await asyncio.wait_for(dialog.open.wait(), 5)
    assert dialog.ended.is_set()


# ------------------------------------------------------------------ addresses


class Links:
    """Accepts every address, and keeps it."""

    def __init__(self, answer: bool | None = True) -> None:
        self.seen: list[UrlRequest] = []
        self._answer = answer

    def __call__(self, request: UrlRequest, ctx: Any) -> bool | None:
        self.seen.append(request)
        return self._answer


@pytest.mark.covers("R1-130", "R1-135")
@pytest.mark.parametrize(
    ("given", "sent"), [(True, {"action": "accept"}), (False, DECLINE), (None, CANCEL), (1, CANCEL)]
)
async def test_only_true_accepts_an_address(given: Any, sent: dict[str, Any]) -> None:
    links = Links(given)
    async with asking(url=links) as (_, raw):
        assert await answer_of(raw, url()) == sent

    (request,) = links.seen
    assert (request.message, request.url, request.host) == (
        "Sign in",
        "https://example.com/login",
        "example.com",
    )
    assert request.agent == "The Odd One 3"


@pytest.mark.covers("R1-141")
async def test_a_completion_ends_its_own_address_and_others_mean_nothing() -> None:
    links = Links()
    async with asking(url=links) as (_, raw):
        for id_ in ("e1", "e2"):
            await answer_of(raw, url(id_=id_))
        first, second = links.seen
        for id_ in ("nobody's", "e2", "e2"):
            raw.send(raw.notification("elicitation/complete", {"elicitationId": id_}))
        assert await asyncio.wait_for(second.completed(), 5)
        await raw.round_trip()
        assert (first.is_completed, second.is_completed) == (False, True)
        waiting = asyncio.ensure_future(first.completed())
        await asyncio.sleep(0)
    assert await asyncio.wait_for(waiting, 5) is False


async def test_a_completion_right_behind_its_request_is_not_lost() -> None:
    async def hook(request: UrlRequest, ctx: Any) -> bool:
        return await asyncio.wait_for(request.completed(), 5)

    async with asking(url=hook) as (_, raw):
        raw.send(
            raw.request(5, "elicitation/create", {"requestId": 1, **url()}),
            raw.notification("elicitation/complete", {"elicitationId": "e1"}),
        )
        assert (await raw.answer_to(5))["result"] == {"action": "accept"}


async def test_what_was_declined_can_not_be_completed() -> None:
    links = Links(answer=False)
    async with asking(url=links) as (_, raw):
        await answer_of(raw, url())
        raw.send(raw.notification("elicitation/complete", {"elicitationId": "e1"}))
        await raw.round_trip()

        assert await links.seen[0].completed() is False


@pytest.mark.covers("R1-141")
async def test_an_id_means_nothing_on_another_connection() -> None:
    links = Links()
    elicitation = Elicitation(url=links)
    async with (
        raw_agent(Client(elicitation=elicitation)) as (_, one),
        raw_agent(Client(elicitation=elicitation)) as (_, other),
    ):
        await answer_of(one, url())
        other.send(other.notification("elicitation/complete", {"elicitationId": "e1"}))
        await other.round_trip()
        assert not links.seen[0].is_completed


async def test_a_flood_of_addresses_is_forgotten_from_its_beginning() -> None:
    links = Links()
    async with asking(url=links) as (_, raw):
        for number in range(300):
            await answer_of(raw, url(id_=str(number)))
        await answer_of(raw, url(id_="299"))

        assert await links.seen[0].completed() is False
        assert await links.seen[299].completed() is False  # another has taken its id
        raw.send(raw.notification("elicitation/complete", {"elicitationId": "299"}))
        assert await asyncio.wait_for(links.seen[300].completed(), 5)


@pytest.mark.covers("R1-136")
@pytest.mark.parametrize(
    ("address", "shown", "host", "reads", "suspicious"),
    [
        ("https://Example.com:8443/a?b=c#d", "https://example.com:8443/a?b=c#d", "example.com", "", ()),
        ("http://example.com/", "http://example.com/", "example.com", "", ("http",)),
        ("http://localhost:80/x", "http://localhost:80/x", "localhost", "", ("local",)),
        ("http://127.0.0.1/", "http://127.0.0.1/", "127.0.0.1", "", ("ip-address", "local")),
        ("https://[::1]:5/", "https://[::1]:5/", "::1", "", ("ip-address", "local")),
        ("https://2130706433/", "https://2130706433/", "2130706433", "", ("ip-address",)),
        ("https://google.com@evil.example/", "https://google.com@evil.example/", "evil.example", "", ("credentials",)),
        ("https://xn--pple-43d.com/", "https://xn--pple-43d.com/", "xn--pple-43d.com", "аpple.com", ("punycode",)),
        ("https://аpple.com/", "https://xn--pple-43d.com/", "xn--pple-43d.com", "аpple.com", ("punycode",)),
        ("https://example.com/\u202egnp", "https://example.com/%E2%80%AEgnp", "example.com", "", ()),
        ("https://example.com/ä%20?ö", "https://example.com/%C3%A4%20?%C3%B6", "example.com", "", ()),
    ],
)  # fmt: skip
async def test_an_address_is_shown_as_what_it_is(
    address: str, shown: str, host: str, reads: str, suspicious: tuple[str, ...]
) -> None:
    links = Links()
    async with asking(url=links) as (_, raw):
        await answer_of(raw, url(address))

    (request,) = links.seen
    assert request.url == address
    assert (request.ascii_url, request.host, request.unicode_host) == (shown, host, reads)
    assert request.suspicious == suspicious


@pytest.mark.covers("R1-135")
@pytest.mark.parametrize(
    "address",
    [
        "", "example.com", "/login", "javascript:alert(1)", "file:///etc/passwd", "data:text/html,x",
        "vscode://x/y", "https://", "https:///x", "https://a b/", "https://good.com\\@evil.com/",
        "https://good.com\t.evil.com/", "https://good.com\n/", "https://[::1/", "https://a:99999/",
        "https://a\u3000b/", "https://%65vil.com/", "https://a<b>/", "ftp://a/", "https://a..b/",
        "https://evil\u2100.com/", "https://x/" + "a" * 8200,
    ],
)  # fmt: skip
async def test_what_is_no_web_address_is_refused_and_never_shown(address: str) -> None:
    links = Links()
    async with asking(url=links) as (_, raw):
        answer = await answer_of(raw, json.loads(json.dumps(url(address))))

    assert answer.get("code") == -32602
    assert not links.seen


async def test_a_session_that_is_closed_completes_nothing() -> None:
    links = Links()
    elicitation = Elicitation(url=links)
    async with raw_agent(Client(elicitation=elicitation)) as (_, raw):
        await answer_of(raw, url(id_="a"), sessionId="s")
        await answer_of(raw, url(id_="b"), sessionId="t")
        await elicitation.release_session("s")

        assert await links.seen[0].completed() is False
        assert not links.seen[1]._ended.done()


# ------------------------------------------------------------------ both of ours, and without async


async def test_our_own_agent_gets_what_was_filled_in() -> None:
    answers: list[Any] = []

    class Asking(Agent):
        async def prompt(self, turn: Turn) -> None:
            schema = v1.ElicitationSchema(
                properties={"name": v1.StringPropertySchema()}, required=["name"]
            )
            answers.append(await turn.elicit("Who?", schema))

    client = Client(elicitation=Elicitation(form=lambda form, _: {"name": form.message}))
    async with joined(Asking(), client) as peer:
        session = await peer.new_session(cwd="/")
        await session.prompt("x")

    assert answers == [v1.ElicitationAcceptAction(content={"name": "Who?"})]


def test_a_plain_hook_may_block_where_there_is_no_async(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(_AGENT)
    threads: list[str] = []

    def form(form: Form, ctx: Any) -> dict[str, object]:
        threads.append(threading.current_thread().name)
        return {"name": "Jo"}

    client = Client(elicitation=Elicitation(form=form))
    with antiphon.sync.spawn([sys.executable, str(agent)], client=client) as peer:
        result = peer.new_session(cwd=str(tmp_path)).prompt("x").run()

    assert result.text == "Jo"
    assert threads == [threading.main_thread().name]


_AGENT = """
from antiphon import Agent, serve_stdio
from antiphon.schema import v1

class Asking(Agent):
    async def prompt(self, turn):
        schema = v1.ElicitationSchema(properties={"name": v1.StringPropertySchema()})
        answer = await turn.elicit("Who?", schema)
        await turn.say(answer.content["name"])

serve_stdio(Asking())
"""
