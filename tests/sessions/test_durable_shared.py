"""Several connections on one session: what each may do, and what the others see of it."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from antiphon import Capabilities, Durability, Limits, extension
from antiphon.journal import Grant, MemoryJournal
from antiphon.schema import v1
from tests.sessions.test_durable_link import Gated
from tests.sessions.test_durable_router import (
    NEW,
    Failing,
    Scripted,
    Steered,
    attach,
    client,
    opened,
    prompt,
    prompt_of,
    records,
    rider,
    shown,
    steer,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from antiphon import Turn
    from antiphon.journal import AttachContext, Record, SessionLog
    from antiphon.testing import RawPeer


def load(session_id: str, **members: Any) -> dict[str, Any]:
    return {"sessionId": session_id, **NEW, **members}


class Door:
    """A policy that lets in whom it is told to, and takes its time."""

    def __init__(self) -> None:
        self.open = True
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()

    async def __call__(self, context: AttachContext) -> Grant:
        self.asked.set()
        await self.answer.wait()
        if not self.open:
            raise PermissionError
        return Grant({"id": "somebody"}, context.session_id, "test")


async def waiting_turn(raw: RawPeer, agent: Scripted, text: str = "wait") -> str:
    session_id = await opened(raw)
    raw.send(raw.request("p", "session/prompt", prompt_of(session_id, text)))
    await agent.waiting.wait()
    return session_id


# -------------------------------------------------------------------------------- who may


@pytest.mark.covers("AP10")
@pytest.mark.parametrize("how", ["session/load", "_raxol/session.load", "session/resume"])
async def test_who_is_not_let_in_yet_can_do_nothing_meanwhile(how: str) -> None:
    agent, door = Steered(), Door()
    durability = Durability(MemoryJournal(), policy=door)
    async with client(agent, durability) as origin, client(agent, durability) as raw:
        session_id = await waiting_turn(origin, agent)
        door.open = False
        door.answer.clear()
        door.asked.clear()
        about = {"sessionId": session_id}
        raw.send(raw.request("l", how, load(session_id)))
        await door.asked.wait()
        raw.send(
            raw.notification("session/cancel", about),
            raw.request("s", "_raxol/session.steer", {**about, "text": "x", "expectedTurnId": 1}),
            raw.request("m", "session/set_mode", {**about, "modeId": "code"}),
            raw.request("p", "session/prompt", prompt_of(session_id, "x")),
        )
        refused = [await raw.answer_to(id_) for id_ in ("s", "m", "p")]
        door.answer.set()
        denied = await raw.answer_to("l")

        assert {answer["error"]["message"] for answer in refused} == {"the session is being loaded"}
        assert denied["error"] == {"code": -32000, "message": "attach denied"}
        assert not agent.turns[0].cancelled
        assert agent.steered == []
        agent.go.set()
        assert (await origin.answer_to("p"))["result"] == {"stopReason": "end_turn"}


class Extended(Scripted):
    """Has a method of its own."""

    @extension("_test/secret")
    async def secret(self, params: Any, ctx: Any) -> dict[str, Any]:
        return {"cwd": ctx.session().cwd}


@pytest.mark.covers("AP10")
async def test_an_extension_of_a_session_is_for_who_was_let_in() -> None:
    now, door = [1000.0], Door()

    async def for_a_while(context: AttachContext) -> Grant:
        grant = await door(context)
        grant.expires_at = 2000
        return grant

    durability = Durability(
        MemoryJournal(),
        policy=for_a_while,
        clock=lambda: now[0],
        default_role="observer",
    )
    agent = Extended()
    async with client(agent, durability) as origin, client(agent, durability) as raw:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
        about = {"sessionId": session_id}
        door.answer.clear()
        raw.send(raw.request("l", "session/load", load(session_id)))
        early = await raw.ask("_test/secret", about)
        door.answer.set()
        await raw.answer_to("l")
        let_in = await raw.ask("_test/secret", about)
        now[0] = 2000.0
        late = await raw.ask("_test/secret", about)

        assert early["error"]["message"] == "the session is being loaded"
        assert let_in["result"] == {"cwd": "/work"}
        assert late["error"] == {"code": -32000, "message": "attach denied"}


class Keeper(Scripted):
    """An agent that keeps sessions itself, besides its journal."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []

    async def load_session(self, params: Any, ctx: Any) -> v1.LoadSessionResponse:
        self.did.append("load")
        return v1.LoadSessionResponse()

    async def resume_session(self, params: Any, ctx: Any) -> v1.ResumeSessionResponse:
        self.did.append("resume")
        return v1.ResumeSessionResponse()

    async def list_sessions(self, params: Any, ctx: Any) -> v1.ListSessionsResponse:
        self.did.append("list")
        return v1.ListSessionsResponse(sessions=[])

    async def delete_session(self, params: Any, ctx: Any) -> v1.DeleteSessionResponse:
        self.did.append("delete")
        return v1.DeleteSessionResponse()

    async def close_session(self, params: Any, ctx: Any) -> v1.CloseSessionResponse:
        self.did.append("close")
        return v1.CloseSessionResponse()


@pytest.mark.covers("AP10")
async def test_the_policy_decides_for_the_agents_own_handlers_too() -> None:
    agent, door = Keeper(), Door()
    async with client(agent, Durability(MemoryJournal(), policy=door)) as raw:
        for is_open in (False, True):
            door.open = is_open
            for name in ("load", "resume", "list", "delete", "close"):
                params = {} if name == "list" else {"sessionId": "theirs"}
                if name in ("load", "resume"):
                    params.update(NEW)
                answer = await raw.ask(f"session/{name}", params)
                assert ("result" in answer) is is_open, (name, answer)
            assert agent.did == (["load", "resume", "list", "delete", "close"] if is_open else [])


@pytest.mark.covers("CDI-6")
@pytest.mark.parametrize("left", ["detached", "attached", "probed", "lagging"])
async def test_a_grant_ends_whatever_has_become_of_its_attach(left: str) -> None:
    now = [1000.0]

    def for_a_while(context: AttachContext) -> Grant:
        return Grant({"id": "guest"}, context.session_id, "test", expires_at=2000)

    agent, journal = Scripted(), MemoryJournal()
    durability = Durability(journal, policy=for_a_while, clock=lambda: now[0])
    async with client(agent, durability) as origin, client(agent, durability) as raw:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
        (origin_link,) = durability.links(session_id)
        await attach(raw, session_id, historyPolicy="none" if left == "probed" else "tip")
        (link,) = (link for link in durability.links(session_id) if link is not origin_link)
        if left == "detached":
            raw.send(raw.notification("_raxol/session.detach", {"sessionId": session_id}))
            await raw.round_trip()
        elif left == "lagging" and link.attached is not None:
            link.attached.lagged()
        assert "result" in await prompt(raw, session_id, "two")
        now[0] = 2000.0
        refused = await prompt(raw, session_id, "three")

        assert refused["error"] == {"code": -32000, "message": "attach denied"}


@pytest.mark.covers("CDI-6")
async def test_a_probe_takes_nothing_from_who_is_let_in_already() -> None:
    now = [1000.0]

    def by_capability(context: AttachContext) -> Grant:
        ends = 2000 if context.capability == "short" else None
        return Grant({"id": str(context.capability)}, context.session_id, "test", expires_at=ends)

    agent, journal = Scripted(), MemoryJournal()
    durability = Durability(
        journal, policy=by_capability, clock=lambda: now[0], roles={"short": "observer"}
    )
    async with client(agent, durability) as origin, client(agent, durability) as raw:
        session_id = await opened(origin)
        await prompt(origin, session_id, "one")
        await attach(raw, session_id, capability="long")
        await attach(raw, session_id, capability="short", historyPolicy="none")
        now[0] = 3000.0

        assert "result" in await prompt(raw, session_id, "two")


# -------------------------------------------------------------------------------- prompts


async def test_an_own_prompt_that_nobody_was_shown_hides_no_later_one() -> None:
    agent, journal = Scripted(), MemoryJournal()
    async with client(agent, journal) as one, client(agent, journal) as other:
        session_id = await opened(one)
        await prompt(one, session_id, "first")  # it is not attached, and is shown no copy
        for raw in (one, other):
            await raw.ask("session/load", load(session_id))
            raw.forget()
        await prompt(other, session_id, "second")
        await one.round_trip()

        assert [item[1] for item in shown(one.frames) if isinstance(item, tuple)] == [
            "second",
            "second",
        ]
        one.forget()
        await prompt(one, session_id, "third", "p")
        assert [item[1] for item in shown(one.frames)[:-1]] == ["third"]


@pytest.mark.covers("J6")
async def test_a_turn_that_lost_its_writer_is_still_the_only_one() -> None:
    agent, journal = Scripted(), Failing()
    durability = Durability(journal)
    async with client(agent, durability) as one, client(agent, durability) as other:
        session_id = await waiting_turn(one, agent, "one wait two")
        await attach(other, session_id)
        journal.full = True
        await one.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"})
        journal.full = False
        refused = await prompt(other, session_id, "x")
        assert refused["error"]["message"] == "prompt already in flight"
        deleted = await other.ask("session/delete", {"sessionId": session_id})
        assert deleted["error"]["message"] == "prompt already in flight"

        agent.go.set()
        await one.answer_to("p")
        assert "result" in await prompt(other, session_id, "y")
        assert durability.open_turn(session_id) is None


async def test_a_connection_that_does_not_read_lags_once_its_turn_is_over() -> None:
    agent = Scripted()
    durability = Durability(MemoryJournal(), credit=16)
    limits = Limits(cancel_backstop=0.01)
    async with (
        client(agent, durability, limits=limits) as one,
        client(agent, durability) as other,
    ):
        session_id = await opened(one)
        await attach(one, session_id)
        await attach(other, session_id)
        one.send(one.request("p", "session/prompt", prompt_of(session_id, "wait x")))
        await agent.waiting.wait()
        (link,) = (link for link in durability.links(session_id) if link.session.turn is not None)
        turn = agent.turns[0]
        link.connection.pause_writing()
        agent.go.set()
        other.send(other.notification("session/cancel", {"sessionId": session_id}))
        await turn.wait_over()
        for _ in range(20):
            assert "result" in await prompt(other, session_id, "y")

        assert link.attached is not None
        assert len(link.attached._inbox) < 16 + 8
        link.connection.resume_writing()
        await one.wait("_raxol/session.lagged")


# -------------------------------------------------------------------------------- steers


async def test_a_steer_that_was_accepted_is_handed_on_whoever_waits_for_the_answer() -> None:
    agent, journal = Steered(), Gated()
    async with client(agent, journal) as raw:
        session_id = await waiting_turn(raw, agent)
        await raw.round_trip()
        journal.asked.clear()
        journal.gate.clear()
        params = {"sessionId": session_id, "text": "left", "expectedTurnId": 1, "clientMsgId": "m"}
        raw.send(raw.request("s", "_raxol/session.steer", params))
        await journal.asked.wait()
        raw.send(raw.notification("$/cancel_request", {"requestId": "s"}))
        assert (await raw.answer_to("s"))["error"]["code"] == -32800
        journal.gate.set()
        again = await raw.ask("_raxol/session.steer", params)

        assert again["result"]["outcome"] == "duplicate"
        agent.go.set()
        await raw.answer_to("p")
        assert agent.steered == ["left"]


class Renamed(Steered):
    """Every session has the same id."""

    async def new_session(self, params: Any, ctx: Any) -> v1.NewSessionResponse:
        return v1.NewSessionResponse(session_id="again")


async def test_a_session_that_is_made_anew_knows_nothing_of_the_deleted_one() -> None:
    agent, journal = Renamed(), MemoryJournal()
    durability = Durability(journal)
    async with client(agent, durability) as raw:
        for _ in range(2):
            agent.go.clear()
            agent.waiting.clear()
            session_id = await opened(raw)
            raw.send(raw.request("p", "session/prompt", prompt_of(session_id, "wait")))
            await agent.waiting.wait()
            answer = await steer(raw, session_id, expectedTurnId=1, text="x", clientMsgId="m")
            assert answer["outcome"] == "accepted"
            agent.go.set()
            await raw.answer_to("p")
            raw.forget()
            assert len(await records(journal, session_id)) == 5
            await raw.ask("session/delete", {"sessionId": session_id})
            assert await journal.sessions() == []


async def test_what_was_accepted_in_sessions_that_are_gone_is_kept_in_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.sessions._durability._STEERED", 3)
    agent = Steered()
    durability = Durability(MemoryJournal())
    for _ in range(8):
        agent.go.clear()
        agent.waiting.clear()
        async with client(agent, durability) as raw:
            session_id = await waiting_turn(raw, agent)
            assert (await steer(raw, session_id, expectedTurnId=1))["outcome"] == "accepted"
            assert (await steer(raw, session_id, expectedTurnId=1))["outcome"] == "stale"
            agent.go.set()
            await raw.answer_to("p")

    assert len(durability._steers) == 3


# -------------------------------------------------------------------------------- modes, options


async def test_a_mode_that_one_connection_sets_is_the_sessions_on_every_other() -> None:
    agent = Scripted()
    durability = Durability(MemoryJournal())
    async with client(agent, durability) as one, client(agent, durability) as other:
        session_id = await opened(one)
        await prompt(one, session_id, "x")
        await other.ask("session/load", load(session_id))
        await one.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"})
        await prompt(other, session_id, "x")
        modes = agent.turns[-1].session.modes
        assert modes is not None
        assert modes.current_mode_id == "code"
        await agent.turns[-1].session.set_mode("ask")
        modes = agent.turns[0].session.modes
        assert modes is not None
        assert modes.current_mode_id == "ask"


class Slow(MemoryJournal):
    """Looks for the latest of a kind as slowly as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = asyncio.Event()
        self.go = asyncio.Event()

    async def open(self, session_id: str) -> SessionLog:
        log = await super().open(session_id)
        latest = log.latest

        async def slow(tags: Collection[str]) -> dict[str, Record]:
            records = await latest(tags)
            if "current_mode_update" in tags:
                self.looked.set()
                await self.go.wait()
            return records

        return cast("SessionLog", _With(log, slow))


class _With:
    """A log that looks for the latest in another way."""

    def __init__(self, log: SessionLog, latest: Any) -> None:
        self._log = log
        self.latest = latest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


async def test_a_mode_that_is_set_during_a_load_is_the_one_that_is_answered() -> None:
    agent, journal = Scripted(), Slow()
    async with client(agent, journal) as one, client(agent, journal) as other:
        session_id = await opened(one)
        await prompt(one, session_id, "x")
        other.send(other.request("l", "session/load", load(session_id)))
        await journal.looked.wait()
        await one.ask("session/set_mode", {"sessionId": session_id, "modeId": "code"})
        journal.go.set()
        answer = await other.answer_to("l")

        assert answer["result"]["modes"]["currentModeId"] == "code"


class Optional(Scripted):
    """Has an option that not every client can show."""

    capabilities = Capabilities(
        config_options=(
            v1.SessionConfigBoolean(id="loud", name="Loud", current_value=True),
            v1.SessionConfigSelect(
                id="size",
                name="Size",
                current_value="1",
                options=[
                    v1.SessionConfigSelectOption(value="1", name="1"),
                    v1.SessionConfigSelectOption(value="2", name="2"),
                ],
            ),
        )
    )


@pytest.mark.parametrize("who", ["client", "agent"])
async def test_options_survive_a_client_that_is_not_shown_all_of_them(who: str) -> None:
    agent, durability = Optional(), Durability(MemoryJournal())
    booleans: dict[str, Any] = {"session": {"configOptions": {"boolean": {}}}}
    async with client(agent, durability) as one, client(agent, durability, booleans) as other:
        session_id = await opened(one)
        await prompt(one, session_id, "x")
        await other.ask("session/load", load(session_id))
        other.forget()
        if who == "client":
            about = {"sessionId": session_id, "configId": "size", "value": "2"}
            answer = await one.ask("session/set_config_option", about)
            assert [o["id"] for o in answer["result"]["configOptions"]] == ["size"]
        else:
            session = agent.turns[0].session
            assert session.config_options is not None
            await session.set_config_options(session.config_options)
        update = (await other.wait("session/update"))["params"]["update"]
        assert [o["id"] for o in update["configOptions"]] == ["loud", "size"]
        loud: dict[str, Any] = {"sessionId": session_id, "configId": "loud", "value": False}
        assert "result" in await other.ask("session/set_config_option", loud)
    async with client(agent, durability, booleans) as third:
        answer = await third.ask("session/load", load(session_id))
        kept = {o["id"]: o["currentValue"] for o in answer["result"]["configOptions"]}
        assert kept == {"loud": False, "size": "2" if who == "client" else "1"}


# -------------------------------------------------------------------------------- deletion


async def test_a_session_that_is_deleted_while_another_attaches_does_not_begin_anew() -> None:
    agent, journal = Scripted(), Gated()
    durability = Durability(journal)
    async with client(agent, durability) as one:
        session_id = await opened(one)
        await prompt(one, session_id, "x")
    await durability.writers.settled()
    async with client(agent, durability) as one, client(agent, durability) as other:
        for _ in range(30):  # wherever the deletion comes between
            one.send(one.request("d", "session/delete", {"sessionId": session_id}))
            other.send(other.request("l", "_raxol/session.load", load(session_id, **rider())))
            for id_, raw in (("d", one), ("l", other)):
                await raw.answer_to(id_)
                raw.forget()
        assert await journal.sessions() == []


async def test_a_deletion_that_nobody_waits_for_goes_on_and_no_turn_begins_meanwhile() -> None:
    agent, journal = Scripted(), Gated()
    durability = Durability(journal)
    async with client(agent, durability) as one, client(agent, durability) as other:
        session_id = await opened(one)
        await prompt(one, session_id, "x")
        await attach(other, session_id)
        journal.gate.clear()
        one.send(one.request("m", "session/set_mode", {"sessionId": session_id, "modeId": "code"}))
        await one.round_trip()
        assert not one.responses("m")  # what is answered is kept
        about = {"sessionId": session_id}
        for id_ in ("first", "second"):
            other.send(other.request(id_, "session/delete", about))
            begun = len(durability._tasks)
            while len(durability._tasks) == begun:
                await asyncio.sleep(0)
            other.send(other.notification("$/cancel_request", {"requestId": id_}))
            assert (await other.answer_to(id_))["error"]["code"] == -32800
            refused = await prompt(one, session_id, "y")
            assert refused["error"]["message"] == "the session is being deleted"
        journal.gate.set()
        await one.answer_to("m")
        await durability.writers.settled()
        gone = await prompt(one, session_id, "z")

        assert gone["error"]["code"] == -32002
        assert await journal.sessions() == []


# -------------------------------------------------------------------------------- at the same time


def ask(raw: RawPeer, what: str, session_id: str, id_: str) -> bool:
    """Send something about a session; whether it has an answer."""
    about: dict[str, Any] = {"sessionId": session_id}
    match what:
        case "session/cancel" | "_raxol/session.detach":
            raw.send(raw.notification(what, about))
            return False
        case "session/prompt":
            about = prompt_of(session_id, "a b")
        case "session/set_mode":
            about["modeId"] = "code"
        case "session/resume" | "session/load":
            about = load(session_id)
        case "_raxol/session.load":
            about = load(session_id, **rider())
        case "_raxol/session.steer":
            about.update(expectedTurnId=1, text="x")
        case "session/list":
            about = {}
        case "session/new":
            about = NEW
        case _:
            pass
    raw.send(raw.request(id_, what, about))
    return True


_ANYTHING = (
    "session/prompt",
    "session/cancel",
    "session/close",
    "session/delete",
    "session/set_mode",
    "session/resume",
    "session/load",
    "session/list",
    "session/new",
    "_raxol/session.load",
    "_raxol/session.steer",
    "_raxol/session.detach",
)


class Closing(Steered):
    """Lets its sessions be closed."""

    async def close_session(self, params: Any, ctx: Any) -> v1.CloseSessionResponse:
        return v1.CloseSessionResponse()


@pytest.mark.parametrize("seed", [*range(24), 53, 91, 123, 127, 431])
async def test_whatever_clients_ask_at_once_each_is_answered_once_and_nothing_is_left(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(seed)
    agent, journal = Closing(), Gated()
    agent.go.set()
    durability = Durability(journal, outlive=chance.random() < 0.5, credit=chance.choice([4, 1024]))
    limits = Limits(cancel_backstop=0.05)

    async def life(name: int, session_id: str) -> None:
        async with client(agent, durability, limits=limits) as raw:
            asked: list[str] = []
            for number in range(25):
                id_ = f"{name}-{number}"
                if ask(raw, chance.choice(_ANYTHING), session_id, id_):
                    asked.append(id_)
                if asked and chance.random() < 0.15:
                    about = {"requestId": chance.choice(asked)}
                    raw.send(raw.notification("$/cancel_request", about))
                for _ in range(chance.choice([0, 0, 1, 3, 10])):
                    await asyncio.sleep(0)
                if chance.random() < 0.05:
                    journal.gate.clear()
                    asyncio.get_running_loop().call_later(0.002, journal.gate.set)
            if chance.random() < 0.5:
                for id_ in asked:
                    await raw.answer_to(id_)
                    assert len(raw.responses(id_)) == 1

    async with client(agent, durability, limits=limits) as first:
        session_id = await opened(first)
        await prompt(first, session_id, "x")
        await asyncio.gather(*(life(name, session_id) for name in range(4)))
    journal.gate.set()
    await durability.aclose()

    assert durability.links(session_id) == ()
    assert durability.open_turn(session_id) is None
    assert (durability._links, durability.writers._places) == ({}, {})
    for info in await journal.sessions():
        kinds = [record.kind for record in await records(journal, info.session_id)]
        turns = [kind for kind in kinds if kind.startswith("turn")]
        assert kinds[0] == "session_created"
        assert turns == ["turn_started", "turn_completed"] * (len(turns) // 2)
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.parametrize("opened_before", [True, False])
@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_a_session_that_is_closed_under_an_attach_leaves_nothing(
    *, opened_before: bool, steps: int
) -> None:
    agent, journal = Keeper(), Gated()
    durability = Durability(journal)
    async with client(agent, durability) as origin, client(agent, durability) as raw:
        session_id = await opened(origin)
        for _ in range(10):
            await prompt(origin, session_id, "x")
        if opened_before:
            await attach(raw, session_id, historyPolicy="none")
        raw.send(raw.request("l", "_raxol/session.load", load(session_id, **rider())))
        for _ in range(steps):
            await asyncio.sleep(0)
        await raw.ask("session/close", {"sessionId": session_id})
        await raw.answer_to("l")
        await prompt(origin, session_id, "x")  # who listens no more is noticed

        writer = durability.writers.get(session_id)
        assert writer is not None
        links = durability.links(session_id)
        attached = [link.attached for link in links if link.attached is not None]
        assert [tail for tail in attached if not writer.publishes_to(tail)] == []
        assert len(writer._seats) == len(attached)
    await durability.writers.settled()
    assert durability.links(session_id) == ()
    assert durability.writers.get(session_id) is None


@pytest.mark.parametrize("steps", range(8))
async def test_an_attach_that_fails_takes_no_session_from_another(steps: int) -> None:
    agent, journal = Scripted(), Gated()
    async with client(agent, journal) as origin, client(agent, journal) as raw:
        session_id = await opened(origin)
        await prompt(origin, session_id, "x")
        ahead = load(session_id, **rider(fromOffset=9999))
        raw.send(raw.request("l", "_raxol/session.load", ahead))
        for _ in range(steps):
            await asyncio.sleep(0)
        answer = await attach(raw, session_id)

        assert "error" in await raw.answer_to("l")
        assert "result" in answer
        assert "result" in await prompt(raw, session_id, "y")


async def test_attaches_that_are_replaced_at_once_are_let_go_of() -> None:
    agent, durability = Scripted(), Durability(MemoryJournal())
    async with client(agent, durability) as raw:
        session_id = await opened(raw)
        await prompt(raw, session_id, "x")
        for number in range(30):
            params = load(session_id, **rider(historyPolicy="tip"))
            raw.send(raw.request(f"l{number}", "_raxol/session.load", params))
        for number in range(30):
            assert "result" in await raw.answer_to(f"l{number}")
        writer = durability.writers.get(session_id)

        assert writer is not None
        assert len(writer._seats) == 1


async def test_a_turn_that_does_not_end_does_not_keep_the_journal_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("antiphon.sessions._durability._PATIENCE", 2)

    class Deaf(Scripted):
        async def prompt(self, turn: Turn) -> None:
            self.waiting.set()
            while not self.go.is_set():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    continue

    agent, journal = Deaf(), MemoryJournal()
    durability = Durability(journal, outlive=True)
    async with client(agent, durability) as raw:
        session_id = await waiting_turn(raw, agent)
    await durability.aclose()

    assert "left behind" in caplog.text
    assert (await records(journal, session_id))[-1].data["outcome"] == "orphaned"
    agent.go.set()
    while durability.open_turn(session_id) is not None:
        await asyncio.sleep(0)
