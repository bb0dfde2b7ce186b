"""The scripted agent on Antiphon, written with the verbs that an agent's author has.

`our_agent.py STATE [RECORD]`: STATE is a JSON file that keeps the sessions for the next process,
RECORD takes every frame. What it plays is told by the first word of the prompt; README.md lists the
scenes, script.json has the texts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon import (
    Agent,
    AgentContext,
    AuthRequired,
    Capabilities,
    InvalidParams,
    RequestError,
    ResourceNotFound,
    Turn,
    extension,
    serve_stdio,
)
from antiphon.journal import SqliteJournal
from antiphon.schema import UNSET, UnknownUpdate, decode, decode_update, encode, v1, v1_unstable

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from antiphon.sessions import Terminal

Json = dict[str, Any]

STATE = Path(sys.argv[1])
SCRIPT: Json = json.loads((Path(__file__).parent / "script.json").read_text("utf-8"))


def wire(value: object) -> Any:
    return json.loads(encode(value))


def typed(kind: Any, value: object) -> Any:
    return decode(kind, json.dumps(value).encode())


class Saved:
    """The sessions on disk, by id."""

    def __init__(self) -> None:
        #: None for one that was deleted, so that its id is not given again.
        self.all: dict[str, Json | None] = (
            json.loads(STATE.read_text("utf-8")) if STATE.exists() else {}
        )

    def write(self) -> None:
        STATE.write_text(json.dumps(self.all), "utf-8")

    def of(self, session_id: str, cwd: str) -> Json:
        saved = self.all.get(session_id)
        if saved is None:
            raise ResourceNotFound({"sessionId": session_id})
        if saved["cwd"] != cwd:
            raise InvalidParams({"cwd": cwd})
        return saved


class ScriptedAgent(Agent):
    info = v1.Implementation(**SCRIPT["agent"])
    capabilities = Capabilities(
        image=True,
        embedded_context=True,
        additional_directories=True,
        auth_methods=[v1.AuthMethodAgent(**method) for method in SCRIPT["auth_methods"]],
        modes=[typed(v1.SessionMode, mode) for mode in SCRIPT["modes"]["availableModes"]],
        config_options=typed(list[v1_unstable.SessionConfigOption], SCRIPT["config_options"]),
    )

    def __init__(self) -> None:
        self.signed_in = True
        self.saved = Saved()
        self.servers: dict[str, list[str]] = {}
        self.told: list[list[Any]] = []

    # ------------------------------------------------------------ the connection

    async def authenticate(
        self, params: v1.AuthenticateRequest, ctx: AgentContext
    ) -> v1.AuthenticateResponse:
        if params.method_id != "login":
            raise InvalidParams({"methodId": params.method_id})
        self.signed_in = True
        return v1.AuthenticateResponse()

    async def logout(self, params: v1.LogoutRequest, ctx: AgentContext) -> v1.LogoutResponse:
        self.signed_in = False
        return v1.LogoutResponse()

    # ------------------------------------------------------------ sessions

    async def new_session(
        self, params: v1_unstable.NewSessionRequest, ctx: AgentContext
    ) -> v1.NewSessionResponse:
        if not self.signed_in:
            raise AuthRequired({"authMethods": ["login"]})
        name = f"session-{len(self.saved.all) + 1}"
        self.saved.all[name] = {"cwd": params.cwd, "title": None, "history": []}
        self.saved.write()
        self.servers[name] = [wire(server)["name"] for server in params.mcp_servers]
        commands = typed(list[v1.AvailableCommand], SCRIPT["commands"])
        ctx.after_response(lambda: ctx.session(name).commands(commands))
        return v1_unstable.NewSessionResponse(
            session_id=name,
            modes=self.initial_modes() or UNSET,
            config_options=self.initial_config_options(),
        )

    async def load_session(
        self, params: v1_unstable.LoadSessionRequest, ctx: AgentContext
    ) -> v1.LoadSessionResponse:
        for update in self.saved.of(params.session_id, params.cwd)["history"]:
            replayed = decode_update(json.dumps(update).encode())
            assert not isinstance(replayed, UnknownUpdate)
            await ctx.update(replayed)
        return v1_unstable.LoadSessionResponse(
            modes=self.initial_modes() or UNSET, config_options=self.initial_config_options()
        )

    async def resume_session(
        self, params: v1_unstable.ResumeSessionRequest, ctx: AgentContext
    ) -> v1.ResumeSessionResponse:
        self.saved.of(params.session_id, params.cwd)
        return v1_unstable.ResumeSessionResponse(
            modes=self.initial_modes() or UNSET, config_options=self.initial_config_options()
        )

    async def list_sessions(
        self, params: v1_unstable.ListSessionsRequest, ctx: AgentContext
    ) -> v1.ListSessionsResponse:
        found = [
            v1.SessionInfo(session_id=name, cwd=saved["cwd"], title=saved["title"])
            for name, saved in self.saved.all.items()
            if saved is not None and params.cwd in {UNSET, None, saved["cwd"]}
        ]
        cursor = params.cursor or "0"
        if not cursor.isdigit():
            raise InvalidParams({"cursor": cursor})
        start = int(cursor)
        more = start + 2 < len(found)
        return v1.ListSessionsResponse(
            sessions=found[start : start + 2], next_cursor=str(start + 2) if more else UNSET
        )

    async def close_session(
        self, params: v1.CloseSessionRequest, ctx: AgentContext
    ) -> v1.CloseSessionResponse:
        ctx.session()  # unknown: not found
        return v1.CloseSessionResponse()

    async def delete_session(
        self, params: v1.DeleteSessionRequest, ctx: AgentContext
    ) -> v1.DeleteSessionResponse:
        self.saved.all[params.session_id] = None
        self.saved.write()
        return v1.DeleteSessionResponse()

    # ------------------------------------------------------------ turns

    async def prompt(self, turn: Turn) -> str | v1.PromptResponse | None:
        for block in turn.blocks:
            self.keep(turn, {"sessionUpdate": "user_message_chunk", "content": wire(block)})
        first = turn.blocks[0]
        assert isinstance(first, v1.TextContent)
        name, _, rest = first.text.partition(" ")
        scene = getattr(self, f"scene_{name}", None)
        if scene is None:
            raise InvalidParams({"scene": name})
        try:
            answer: str | v1.PromptResponse | None = await scene(turn, rest)
            return answer
        finally:
            self.saved.write()

    def keep(self, turn: Turn, *updates: Json) -> None:
        """For whoever loads the session."""
        self.saved.of(turn.session_id, turn.cwd)["history"].extend(updates)

    async def scene_stream(self, turn: Turn, rest: str) -> v1.PromptResponse:
        stream = json.loads(json.dumps(SCRIPT["stream"]).replace("{cwd}", turn.cwd))
        await turn.think("Let me look.")
        await turn.send(
            v1.AgentMessageChunk(
                content=v1.TextContent(text="Hello "), message_id="m1", meta=stream[1]["_meta"]
            )
        )
        await turn.say(stream[2]["content"]["text"], message_id="m1")
        await turn.plan([("Read", "in_progress", "high"), ("Write", "pending", "low")])
        notes = f"{turn.cwd}/notes.txt"
        async with turn.tool(
            "Edit notes.txt",
            kind="edit",
            tool_call_id="t1",
            status="pending",
            locations=[(notes, 2)],
            raw_input={"path": "notes.txt", "n": 1.5, "deep": [True, "x"]},
        ) as tool:
            await tool.update(status="in_progress")
            await tool.update(
                status="completed",
                content=[v1.Diff(path=notes, old_text="beta\n", new_text="BETA\n"), "done"],
                raw_output={"ok": True},
            )
        await turn.plan([("Read", "completed", "high"), ("Write", "completed", "low")])
        for update in stream[8:12]:
            await turn.say(typed(v1.ContentBlock, update["content"]))
        await turn.session.set_mode("code")
        await turn.usage(used=1200, size=200_000, cost=(0.25, "USD"))
        await turn.session.info(title="A scripted turn", updated_at="2030-01-02T03:04:05Z")
        self.keep(turn, *stream)
        self.saved.of(turn.session_id, turn.cwd)["title"] = "A scripted turn"
        return v1_unstable.PromptResponse(
            stop_reason="end_turn",
            usage=v1_unstable.Usage(
                total_tokens=30, input_tokens=10, output_tokens=20, thought_tokens=5
            ),
        )

    async def scene_echo(self, turn: Turn, rest: str) -> None:
        for block in turn.blocks:
            await turn.say(block)
            self.keep(turn, {"sessionUpdate": "agent_message_chunk", "content": wire(block)})

    async def scene_state(self, turn: Turn, rest: str) -> None:
        session, client = turn.session, turn.peer.info
        modes = session.modes
        options = wire(session.config_options or [])
        meta = turn.params.meta
        await self.say(
            turn,
            {
                "client": {
                    "capabilities": wire(turn.client_capabilities),
                    "info": None if client is None else wire(client),
                },
                "cwd": turn.cwd,
                "more": list(session.additional_directories),
                "servers": self.servers.get(turn.session_id, []),
                "mode": None if modes is None else modes.current_mode_id,
                "options": {option["id"]: option["currentValue"] for option in options},
                "meta": meta or {},
                "told": self.told,
            },
        )

    async def scene_burst(self, turn: Turn, rest: str) -> None:
        for n in range(int(rest)):
            await turn.say(f"{n} ")
            content = {"type": "text", "text": f"{n} "}
            self.keep(turn, {"sessionUpdate": "agent_message_chunk", "content": content})

    async def scene_big(self, turn: Turn, rest: str) -> None:
        await turn.say("ä" * int(rest))

    async def scene_permission(self, turn: Turn, rest: str) -> None:
        call: Json = SCRIPT["permission"]["toolCall"]
        options = typed(list[v1.PermissionOption], SCRIPT["permission"]["options"])
        async with turn.tool(
            call["title"],
            kind=call["kind"],
            status=call["status"],
            tool_call_id=call["toolCallId"],
        ) as tool:
            answer = await turn.ask_permission(tool, options)
            await tool.update(status="completed" if answer.allowed else "failed")
        chosen = {"outcome": "selected", "optionId": answer.option_id}
        await self.say(turn, chosen if answer.option_id else {"outcome": "cancelled"})

    async def scene_files(self, turn: Turn, rest: str) -> None:
        cwd = turn.cwd
        whole = await turn.read_text_file(f"{cwd}/notes.txt")
        part = await turn.read_text_file(f"{cwd}/notes.txt", line=2, limit=1)
        await turn.write_text_file(f"{cwd}/new/copy.txt", rest + whole)
        again = await turn.read_text_file(f"{cwd}/new/copy.txt")
        await self.say(
            turn,
            {
                "whole": whole,
                "part": part,
                "again": again,
                "missing": await self.code_of(turn.read_text_file(f"{cwd}/missing.txt")),
                "relative": await self.code_of(turn.read_text_file("notes.txt")),
                "outside": await self.code_of(turn.read_text_file("/etc/hostname")),
                "write outside": await self.code_of(
                    turn.write_text_file(f"{cwd}/../escaped.txt", "x")
                ),
            },
        )

    async def scene_tools(self, turn: Turn, rest: str) -> None:
        """Ask for everything; what the client does not offer fails here and sends nothing."""

        async def create() -> None:
            async with turn.run("true"):
                pass

        await self.say(
            turn,
            {
                "read": await self.code_of(turn.read_text_file(f"{turn.cwd}/notes.txt")),
                "write": await self.code_of(turn.write_text_file(f"{turn.cwd}/x.txt", "x")),
                "terminal": await self.code_of(create()),
            },
        )

    async def code_of(self, call: Awaitable[object]) -> int | str | None:
        """The code of the error that a call ends with, or its name; None for a result."""
        try:
            await call
        except RequestError as error:
            return error.code
        except FileNotFoundError:  # what -32002 becomes
            return -32002
        except Exception as error:
            return type(error).__name__
        return None

    async def scene_terminal(self, turn: Turn, rest: str) -> None:
        line = 'printf "%s " "$WORD" ü; pwd; echo err >&2; exit 3'
        async with turn.run("sh", ["-c", line], env={"WORD": "a b"}) as terminal:
            await turn.send(
                v1.ToolCall(
                    tool_call_id="term1",
                    title="sh",
                    kind="execute",
                    status="in_progress",
                    content=[terminal.as_content()],
                )
            )
            ended = await terminal.wait()
            output = await terminal.output()
        async with turn.run("printf", ["äöü%s", "äöü"], output_byte_limit=5) as limited:
            await limited.wait()
            tail = await limited.output()
        # Characters that come in halves, of which some clients show what they have so far.
        halves = r"printf '\342'; sleep 0.02; printf '\202\254\n'; sleep 0.02"
        again = f"for i in 1 2 3 4 5 6 7 8 9 10; do {halves}; done; exit 4"
        async with turn.run("sh", ["-c", again]) as streamed:
            pieces = [text async for text in streamed]

        async def missing() -> None:
            async with turn.run("no-such-command-here"):
                pass

        await self.say(
            turn,
            {
                "id": terminal.id,
                "exit": {"exitCode": ended.exit_code, "signal": ended.signal},
                "output": wire(output),
                "released": await self.code_of(terminal.output()),
                "limited": wire(tail),
                "streamed": {
                    "pieces": pieces,
                    "gaps": streamed.gaps,
                    "exit": streamed.status and streamed.status.exit_code,
                },
                "missing command": await self.code_of(missing()),
            },
        )

    async def scene_kill(self, turn: Turn, rest: str) -> None:
        """A command that would run on: killed, then another released, both while being waited for."""

        async def ready(terminal: Terminal) -> v1_unstable.TerminalOutputResponse:
            while True:
                seen = await terminal.output()
                if "ready" in seen.output:
                    return seen

        command = ("sh", ["-c", "echo ready; exec sleep 300"])
        async with turn.run(*command) as terminal:
            before = await ready(terminal)
            waiting = asyncio.gather(terminal.wait(), terminal.wait())
            await asyncio.sleep(0)
            await terminal.kill()
            ended = await waiting
            after = await terminal.output()
        async with turn.run(*command) as other:
            await ready(other)
            wait = asyncio.ensure_future(other.wait())
            await asyncio.sleep(0)
        released = await wait
        await self.say(
            turn,
            {
                "before": wire(before),
                "ended": [{"exitCode": end.exit_code, "signal": end.signal} for end in ended],
                "after": wire(after),
                "released": {"exitCode": released.exit_code, "signal": released.signal},
                "gone": await self.code_of(other.kill()),
            },
        )

    async def scene_slow(self, turn: Turn, rest: str) -> None:
        await turn.say("started")
        await turn.wait_cancelled()
        await turn.say("stopping")

    async def scene_busy(self, turn: Turn, rest: str) -> None:
        """Cancelled while it waits for a command; leaving the block releases the terminal."""
        async with turn.run("sleep", ["300"]) as terminal:
            await turn.say("started")
            waiting = turn.start_soon(terminal.wait())
            await turn.wait_cancelled()
            waiting.cancel()

    async def scene_extension(self, turn: Turn, rest: str) -> None:
        answer = await turn.peer.request_extension("_interop/echo", {"a": [1, None, {"ü": True}]})
        await turn.peer.notify_extension("_interop/tick", {"n": 1})
        unknown = await self.code_of(turn.peer.request_extension("_interop/unknown", {}))
        await self.say(turn, {"answer": answer, "unknown": unknown})

    async def scene_elicit(self, turn: Turn, rest: str) -> None:
        form: Json = SCRIPT["elicitation"]
        schema = typed(v1.ElicitationSchema, form["requestedSchema"])
        await self.say(turn, wire(await turn.elicit(form["message"], schema)))

    async def scene_stop(self, turn: Turn, rest: str) -> str:
        return rest

    async def scene_fail(self, turn: Turn, rest: str) -> None:
        raise RequestError.of(4242, "Out of quota", {"left": 0})

    async def scene_crash(self, turn: Turn, rest: str) -> None:
        msg = "a secret"
        raise ValueError(msg)

    async def scene_exit(self, turn: Turn, rest: str) -> None:
        await turn.say("going")
        await turn.peer.request_extension("_interop/echo", {})  # answered: what was said is there
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)

    async def say(self, turn: Turn, value: object) -> None:
        await turn.say(json.dumps(value))

    # ------------------------------------------------------------ extensions

    @extension("_interop/echo")
    async def echo(self, params: Any, ctx: AgentContext) -> Json:
        return {"method": ctx.method, "params": params}

    @extension("_interop/null")
    async def null(self, params: Any, ctx: AgentContext) -> None:
        return None

    @extension("_interop/tick", kind="notification")
    async def tick(self, params: Any, ctx: AgentContext) -> None:
        self.told.append([ctx.method, params])

    @extension("_interop/poke", kind="notification")
    async def poke(self, params: Any, ctx: AgentContext) -> None:
        self.told.append([ctx.method, params])
        await ctx.session(params["sessionId"]).info(title=params["title"])


if __name__ == "__main__":
    serve_stdio(
        ScriptedAgent(),
        record=sys.argv[2] if len(sys.argv) > 2 else None,
        journal=SqliteJournal(sys.argv[3]) if len(sys.argv) > 3 else None,
    )
