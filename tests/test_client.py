"""What a client lends and how it decides: policies, services, observers, and what is advertised."""

from __future__ import annotations

import asyncio
import logging
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import Capabilities, Client, RequestError, Update, extension
from antiphon.schema import v1, v1_unstable
from antiphon.services import Answer, Files, Permissions, Rule, Terminals
from antiphon.testing import raw_agent, raw_pair

if TYPE_CHECKING:
    from pathlib import Path

CANCELLED = {"outcome": "cancelled"}


def ask(*options: tuple[str, str]) -> dict[str, Any]:
    return {
        "sessionId": "s1",
        "toolCall": {"toolCallId": "t1"},
        "options": [{"optionId": id_, "name": id_, "kind": kind} for id_, kind in options],
    }


USUAL = (
    ("once", "allow_once"),
    ("always", "allow_always"),
    ("no", "reject_once"),
    ("never", "reject_always"),
)


def selected(option_id: str) -> dict[str, Any]:
    return {"outcome": "selected", "optionId": option_id}


async def decided(client: Client, *options: tuple[str, str]) -> Any:
    """What an agent is answered that asks with these options."""
    async with raw_agent(client) as (_, raw):
        answer = await raw.ask("session/request_permission", ask(*options))
        return answer["result"]["outcome"]


# ------------------------------------------------------------------ permission policies


@pytest.mark.covers("R1-104", "R1-105", "FF-27")
@pytest.mark.parametrize(
    ("policy", "options", "outcome"),
    [
        ("allow", USUAL, selected("once")),
        ("allow", USUAL[::-1], selected("once")),
        ("allow", USUAL[1:], selected("always")),
        ("allow", USUAL[2:], CANCELLED),
        ("allow", (), CANCELLED),
        ("deny", USUAL, selected("no")),
        ("deny", USUAL[::-1], selected("no")),
        ("deny", (USUAL[0], USUAL[3]), selected("never")),
        # Only allowing options and a "no": never the first that is offered (field fault 27).
        ("deny", USUAL[:1], CANCELLED),
        ("deny", USUAL[:2], CANCELLED),
        ("deny", (), CANCELLED),
        ("deny", (("a", "reject_once"), ("b", "reject_once")), selected("a")),
    ],
)
async def test_a_policy_picks_by_kind_and_never_turns_a_no_into_a_yes(
    policy: Any, options: Any, outcome: Any
) -> None:
    assert await decided(Client(permissions=policy), *options) == outcome


@pytest.mark.covers("FF-27")
async def test_the_default_is_to_refuse() -> None:
    assert await decided(Client(), *USUAL) == selected("no")


async def test_a_policy_nobody_knows_is_refused_when_the_client_is_made() -> None:
    with pytest.raises(ValueError, match="Allow"):
        Client(permissions=cast("Any", "Allow"))


@pytest.mark.parametrize(
    ("decision", "outcome"),
    [
        ("always", selected("always")),
        ("never", selected("never")),
        (True, selected("once")),
        (False, selected("no")),
        (None, CANCELLED),
        (
            v1.RequestPermissionResponse(outcome=v1.SelectedPermissionOutcome(option_id="always")),
            selected("always"),
        ),
        (v1.RequestPermissionResponse(outcome=v1.CancelledPermissionOutcome()), CANCELLED),
    ],
)
async def test_a_function_decides_with_whatever_it_may_return(decision: Any, outcome: Any) -> None:
    seen: list[Any] = []

    async def decide(params: v1.RequestPermissionRequest, ctx: Any) -> Any:
        seen.append((params.session_id, params.tool_call.tool_call_id, ctx.session_id))
        return decision

    assert await decided(Client(permissions=decide), *USUAL) == outcome
    assert seen == [("s1", "t1", "s1")]


@pytest.mark.covers("R1-104")
@pytest.mark.parametrize(
    "decision",
    [
        "made up",
        "",
        v1.RequestPermissionResponse(outcome=v1.SelectedPermissionOutcome(option_id="made up")),
        v1.PermissionOption(option_id="no", name="No", kind="reject_once"),
        v1.PermissionOption(option_id="once", name="Yes", kind="allow_once"),
        {"optionId": "once"},
        ["once"],
        1,
        0,
    ],
)
async def test_what_a_function_must_not_return_is_a_no(
    decision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def decide(params: Any, ctx: Any) -> Any:
        return decision

    assert await decided(Client(permissions=decide), *USUAL) == selected("no")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.covers("FF-26")
async def test_a_function_that_raises_refuses_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hard(BaseException):
        """Frameworks derive theirs from it as well."""

    async def broken(params: Any, ctx: Any) -> bool:
        raise RuntimeError("dialog trouble")

    async def hard(params: Any, ctx: Any) -> bool:
        raise Hard("hard trouble")

    async def cancelled(params: Any, ctx: Any) -> bool:
        dialog: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        dialog.cancel("its window was closed")
        return await dialog

    def plain(params: Any, ctx: Any) -> bool:
        raise RuntimeError("plain trouble")

    assert await decided(Client(permissions=broken), *USUAL) == selected("no")
    assert "dialog trouble" in caplog.text
    assert await decided(Client(permissions=hard), *USUAL) == selected("no")
    assert "hard trouble" in caplog.text
    assert await decided(Client(permissions=cancelled), *USUAL) == selected("no")
    assert "its window was closed" in caplog.text
    assert await decided(Client(permissions=plain), *USUAL) == selected("no")
    assert "plain trouble" in caplog.text


async def test_a_function_that_is_not_async_decides_with_what_it_returns() -> None:
    async def later() -> bool:
        return True

    def decide(params: v1.RequestPermissionRequest, ctx: Any) -> Any:
        return answers.pop()

    # What it returns may be something to await, as where it only passes the question on.
    answers: list[Any] = [later(), None, False, True, "always"]
    for outcome in (selected("always"), selected("once"), selected("no"), CANCELLED):
        assert await decided(Client(permissions=decide), *USUAL) == outcome
    assert await decided(Client(permissions=decide), *USUAL) == selected("once")


async def test_a_function_that_takes_its_time_holds_up_nothing_else() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(params: Any, ctx: Any) -> bool:
        asked.set()
        await answer.wait()
        return True

    async with raw_agent(Client(permissions=slow)) as (_, raw):
        raw.send(raw.request("slow", "session/request_permission", ask(*USUAL)))
        await asyncio.wait_for(asked.wait(), 5)
        await raw.round_trip()
        assert not [frame for frame in raw.frames if frame.get("id") == "slow"]
        answer.set()
        assert (await raw.answer_to("slow"))["result"]["outcome"] == selected("once")


async def test_one_policy_decides_and_guards_what_is_lent_in_two_clients(tmp_path: Path) -> None:
    policy = Permissions([Rule("allow", path="yes")])
    files = Files(tmp_path)
    clients = [Client(files=files, permissions=policy) for _ in range(2)]
    for client in clients:
        assert await decided(client, *USUAL) == selected("no")
        async with raw_agent(client) as (_, raw):
            for name, key in (("yes", "result"), ("no", "error")):
                params = {"sessionId": "s", "path": f"{tmp_path}/{name}", "content": ""}
                assert key in await raw.ask("fs/write_text_file", params)
    assert files.guard == policy.guard
    assert [path.name for path in tmp_path.iterdir()] == ["yes"]


def test_two_policies_cannot_guard_one_service(tmp_path: Path) -> None:
    files, terminals = Files(tmp_path), Terminals(tmp_path)
    first = Permissions()
    Client(files=files, terminals=terminals, permissions=first)
    for lent in ({"files": files}, {"terminals": terminals}):
        with pytest.raises(ValueError, match="another policy guards"):
            Client(permissions=Permissions(default="deny"), **cast("Any", lent))
    Client(files=files, terminals=terminals, permissions=first)


def test_a_policy_says_that_it_could_hold_no_write(tmp_path: Path) -> None:
    files = Files(tmp_path, allow_write=True)
    with pytest.raises(ValueError, match=r"no rule would hold a write.*Rule\(\"allow\""):
        Client(files=files, permissions=Permissions([Rule("deny", path="**/.env")]))
    assert files.guard is None
    Client(files=Files(tmp_path, allow_write=False), permissions=Permissions())
    Client(files=files, permissions="deny")


@pytest.mark.parametrize("given", [".", PurePath("a"), True])
def test_a_path_is_no_service(given: Any) -> None:
    with pytest.raises(TypeError, match=r"such as Files\(\)"):
        Client(files=given)
    with pytest.raises(TypeError, match=r"such as Terminals\(\)"):
        Client(terminals=given)


async def test_words_and_functions_guard_nothing(tmp_path: Path) -> None:
    async def decide(params: Any, ctx: Any) -> bool:
        return False

    for permissions in ("deny", "allow", decide):
        files, terminals = Files(tmp_path), Terminals(tmp_path)
        Client(files=files, terminals=terminals, permissions=cast("Any", permissions))
        assert (files.guard, files.guard_reads, terminals.guard) == (None, False, None)


async def test_what_a_policy_remembers_for_a_session_goes_with_it() -> None:
    policy = Permissions(ask=lambda request: Answer(allow=True, remember="session"))
    client = Client(permissions=policy)
    async with raw_agent(client) as (_, raw):
        await raw.ask("session/request_permission", ask(*USUAL))
        assert len(policy.remembered) == 1
        await client.sessions_closed(["s1"])
    assert not policy.remembered


async def test_an_overridden_handler_decides_alone_and_may_answer_with_an_error() -> None:
    class Mine(Client):
        async def request_permission(self, params: Any, ctx: Any) -> v1.RequestPermissionResponse:
            raise RequestError.of(-32603, "no user here", {"reason": "headless"})

    async with raw_agent(Mine(permissions="allow")) as (_, raw):
        answer = await raw.ask("session/request_permission", ask(*USUAL))
    assert answer["error"] == {
        "code": -32603,
        "message": "no user here",
        "data": {"reason": "headless"},
    }


async def test_a_question_without_readable_options_is_refused_before_anybody_is_asked() -> None:
    async def decide(params: Any, ctx: Any) -> bool:
        raise AssertionError

    async with raw_agent(Client(permissions=decide)) as (_, raw):
        for options in (5, [{"optionId": "x"}], None):
            params = {**ask(), "options": options}
            assert (await raw.ask("session/request_permission", params))["error"]["code"] == -32602


# ------------------------------------------------------------------ what is advertised


async def advertised(client: Client, *, unstable: bool = False) -> dict[str, Any]:
    """`params` of the `initialize` that a client sends."""
    from antiphon import connect

    async with raw_pair() as (ours, raw):
        connecting = asyncio.ensure_future(_opened(connect(ours, client=client, unstable=unstable)))
        request = await raw.wait("initialize")
        raw.answer(request, {"protocolVersion": 1})
        await (await connecting).aclose()
        return cast("dict[str, Any]", request["params"])


async def _opened(connecting: Any) -> Any:
    return await connecting


FILES = {"fs": {"readTextFile": True, "writeTextFile": True}}


@pytest.mark.covers("R1-28")
async def test_a_bare_client_offers_nothing_and_says_who_it_is() -> None:
    params = await advertised(Client())
    assert params["protocolVersion"] == 1
    assert params["clientInfo"]["name"] == "antiphon"
    assert params["clientCapabilities"] == {}


async def test_services_are_offered_by_being_given(tmp_path: Path) -> None:
    capabilities = (await advertised(Client(files=Files(tmp_path), terminals=Terminals(tmp_path))))[
        "clientCapabilities"
    ]
    assert capabilities["fs"] == FILES["fs"]
    assert capabilities["terminal"] is True


async def test_a_handler_is_offered_by_being_overridden_terminals_only_all_together() -> None:
    class Reader(Client):
        async def read_text_file(self, params: Any, ctx: Any) -> v1.ReadTextFileResponse:
            return v1.ReadTextFileResponse(content="mine")

        async def create_terminal(self, params: Any, ctx: Any) -> v1.CreateTerminalResponse:
            raise AssertionError

    capabilities = (await advertised(Reader()))["clientCapabilities"]
    assert capabilities == {"fs": {"readTextFile": True}}
    async with raw_agent(Reader()) as (_, raw):
        answer = await raw.ask("fs/read_text_file", {"sessionId": "s", "path": "/x"})
        assert answer["result"] == {"content": "mine"}
        # Four of the five are missing, so the capability is not offered and the fifth not served.
        params = {"sessionId": "s", "command": "true"}
        assert (await raw.ask("terminal/create", params))["error"]["code"] == -32601


async def test_a_handler_of_one_s_own_goes_before_the_service(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("on disk", encoding="utf-8")

    class Unsaved(Client):
        async def read_text_file(self, params: Any, ctx: Any) -> v1.ReadTextFileResponse:
            return v1.ReadTextFileResponse(content="in the editor")

    async with raw_agent(Unsaved(files=Files(tmp_path))) as (_, raw):
        params = {"sessionId": "s", "path": str(tmp_path / "a")}
        answer = await raw.ask("fs/read_text_file", params)
        assert answer["result"] == {"content": "in the editor"}
        written = {**params, "content": "new"}
        assert (await raw.ask("fs/write_text_file", written))["result"] == {}
    assert (tmp_path / "a").read_text(encoding="utf-8") == "new"


async def test_files_that_may_not_be_written_are_offered_for_reading_only() -> None:
    class ReadOnly:
        writable = False

        async def read_text_file(self, params: Any, ctx: Any) -> v1.ReadTextFileResponse:
            return v1.ReadTextFileResponse(content="")

        async def write_text_file(self, params: Any, ctx: Any) -> v1.WriteTextFileResponse:
            raise AssertionError

    client = Client(files=cast("Any", ReadOnly()))
    offered = (await advertised(client))["clientCapabilities"]["fs"]
    assert offered == {"readTextFile": True}
    async with raw_agent(client) as (_, raw):
        params = {"sessionId": "s", "path": "/x", "content": ""}
        assert (await raw.ask("fs/write_text_file", params))["error"]["code"] == -32601


@pytest.mark.covers("R1-22", "R1-154")
async def test_name_and_declared_capabilities_are_sent_as_declared() -> None:
    class Editor(Client):
        info = ("editor", "2.5")
        capabilities = Capabilities(
            elicitation_form=True, notices=True, terminal_auth=True, meta={"example.com": {"x": 1}}
        )

        async def create_elicitation(self, params: Any, ctx: Any) -> v1.ElicitationCancelAction:
            return v1.ElicitationCancelAction()

    params = await advertised(Editor())
    assert params["clientInfo"] == {"name": "editor", "version": "2.5"}
    capabilities = params["clientCapabilities"]
    assert capabilities["elicitation"] == {"form": {}}
    assert capabilities["session"] == {"notices": {}}
    assert capabilities["auth"] == {"terminal": True}
    assert capabilities["_meta"] == {"example.com": {"x": 1}}

    class Titled(Client):
        info = v1.Implementation(name="e", version="1", title="E!")

    assert (await advertised(Titled()))["clientInfo"] == {
        "name": "e",
        "version": "1",
        "title": "E!",
    }


async def test_unstable_capabilities_are_offered_on_an_unstable_connection_only() -> None:
    class Editor(Client):
        capabilities = Capabilities(plan=True, subagents=True)

    assert (await advertised(Editor()))["clientCapabilities"] == {}
    offered = (await advertised(Editor(), unstable=True))["clientCapabilities"]
    assert (offered["plan"], offered["subagents"]) == ({}, {})


# ------------------------------------------------------------------ updates, the end, extensions


async def test_every_session_of_every_connection_is_observed() -> None:
    seen: list[tuple[str, str]] = []
    also: list[str] = []

    class Mine(Client):
        async def session_update(self, params: Any, ctx: Any) -> None:
            also.append(params.session_id)

    def note(update: Update) -> None:
        seen.append((update.session_id, update.text))

    client = Mine(on_update=note)
    for name in ("one", "two"):
        async with raw_agent(client) as (peer, raw):
            for number in range(2):
                opening = asyncio.create_task(peer.new_session(cwd="/"))
                request = await raw.wait("session/new", number + 1)
                raw.answer(request, {"sessionId": f"{name}-{number}"})
                await opening
            raw.send(*(raw.update(f"{name}-{n}", str(n)) for n in (0, 1, 0)))
            await raw.round_trip()
    assert sorted(seen[:3]) == [("one-0", "0"), ("one-0", "0"), ("one-1", "1")]
    assert len(seen) == 6
    assert sorted(also) == sorted(session_id for session_id, _ in seen)


async def test_what_was_lent_to_a_session_is_taken_back_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[tuple[str, str]] = []

    class Service:
        def __init__(self, name: str) -> None:
            self.name = name

        async def release_session(self, session_id: str) -> None:
            ended.append((self.name, session_id))
            if session_id == "bad":
                raise RuntimeError("release trouble")

    client = Client(
        files=cast("Any", Service("files")), terminals=cast("Any", Service("terminals"))
    )
    with caplog.at_level(logging.ERROR, "antiphon.client"):
        await client.sessions_closed(["bad", "good"])
    # One that fails keeps no other from being released.
    assert sorted(ended) == sorted(
        (service, session) for service in ("files", "terminals") for session in ("bad", "good")
    )
    assert "release trouble" in caplog.text
    await Client().sessions_closed(["any"])


async def test_extensions_of_a_client_are_found_by_wire_name_and_kind() -> None:
    class Mine(Client):
        @extension("_vendor/ask")
        async def ask(self, params: Any, ctx: Any) -> Any:
            return {"asked": params}

        @extension("_vendor/tell", kind="notification")
        async def tell(self, params: Any, ctx: Any) -> None:
            return None

    found = Mine().extensions()
    assert set(found) == {("_vendor/ask", "request"), ("_vendor/tell", "notification")}
    assert not Client().extensions()


def test_handlers_that_nobody_implements_are_none() -> None:
    client = Client()
    assert client.find_handler("read_text_file") is None
    assert client.find_handler("create_terminal") is None
    assert client.find_handler("create_elicitation") is None
    assert client.find_handler("no_such_thing") is None
    assert client.find_handler("request_permission") == client.request_permission


_OFFERED = st.lists(
    st.builds(
        v1.PermissionOption,
        option_id=st.sampled_from(["a", "b", "c"]),
        name=st.just("n"),
        kind=st.sampled_from(
            ["allow_once", "allow_always", "reject_once", "reject_always", "else"]
        ),
    ),
    max_size=4,
)


@given(st.sampled_from(["allow", "deny"]), _OFFERED)
async def test_a_fixed_policy_decides_at_once_what_its_handler_would(
    policy: Any, offered: list[v1.PermissionOption]
) -> None:
    client = Client(permissions=policy)
    params = v1_unstable.RequestPermissionRequest(
        session_id="s", options=offered, tool_call=v1.ToolCallUpdate(tool_call_id="t")
    )

    decide = client.decider()
    assert decide is not None
    assert decide(params) == await client.request_permission(params, cast("Any", None))


class Own(Client):
    """Decides by itself, whatever its policy says."""

    async def request_permission(self, params: Any, ctx: Any) -> v1.RequestPermissionResponse:
        return v1.RequestPermissionResponse(outcome=v1.SelectedPermissionOutcome(option_id="never"))


class Served(Client):
    """Decides by itself, by what it serves alone."""

    def find_handler(self, name: str) -> Any:
        return (
            Own().request_permission if name == "request_permission" else super().find_handler(name)
        )


class Lent(Client):
    """Serves what another one does, which has the other policy."""

    def find_handler(self, name: str) -> Any:
        return Client(permissions=lambda _p, _c: "never").find_handler(name)


def _changed() -> Client:
    changed = Client(permissions="allow")
    changed.request_permission = Own().request_permission  # type: ignore[method-assign]
    return changed


@pytest.mark.parametrize("make", [Own, Served, Lent, _changed])
async def test_what_is_served_decides_and_no_policy_in_its_place(make: Any) -> None:
    client = make() if make is _changed else make(permissions="allow")
    assert client.decider() is None
    assert await decided(client, *USUAL) == selected("never")


def test_a_policy_that_is_a_function_is_always_asked() -> None:
    decide, params = Client(permissions=lambda _p, _c: True).decider(), cast("Any", None)

    assert decide is not None
    assert decide(params) is None


@given(st.sampled_from(["allow", "deny"]), st.lists(_OFFERED, min_size=1, max_size=3))
async def test_a_fixed_policy_answers_the_same_whether_or_not_a_view_is_kept(
    policy: Any, asked: list[Any]
) -> None:
    requests = [
        {
            "sessionId": "s1",
            "toolCall": {"toolCallId": "t"},
            "options": msgspec.to_builtins(offered),
        }
        for offered in asked
    ]
    client = Client(permissions=policy)
    async with raw_agent(client) as (peer, raw):
        opening = asyncio.create_task(peer.new_session(cwd="/"))
        raw.answer(await raw.wait("session/new"), {"sessionId": "s1"})
        session = await opening
        plain = [await raw.ask("session/request_permission", request) for request in requests]
        assert not session.view.tool_calls  # looked at from here on
        viewed = [await raw.ask("session/request_permission", request) for request in requests]
        assert "t" in session.view.tool_calls

    assert [answer["result"] for answer in viewed] == [answer["result"] for answer in plain]
