"""The scripted agent on the official Python SDK, 0.12.1 and 1.0.0rc3.

`py_sdk_agent.py STATE`: STATE is a JSON file that keeps the sessions for the next process. What it
plays is told by the first word of the prompt; README.md lists the scenes, script.json has the texts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import acp
from acp import schema

STATE = Path(sys.argv[1])
SCRIPT = json.loads((Path(__file__).parent / "script.json").read_text("utf-8"))
# 0.12.1 routes neither session/delete nor logout: it answers them -32601 whatever the agent has.
ROUTES_DELETE = hasattr(acp.Agent, "delete_session")
ROUTES_LOGOUT = hasattr(acp.Agent, "logout")


def wire(model):
    return (
        None if model is None else model.model_dump(mode="json", by_alias=True, exclude_none=True)
    )


def update_of(value):
    """A typed update from its wire form."""
    return schema.SessionNotification.model_validate({"sessionId": "", "update": value}).update


def text_update(text, kind="agent_message_chunk"):
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}}


def not_found(session_id):
    return acp.RequestError(-32002, "Resource not found", {"sessionId": session_id})


class Session:
    def __init__(self, session_id, cwd, more, servers=()):
        self.id = session_id
        self.cwd = cwd
        self.more = list(more or ())
        self.servers = [server.name for server in servers or ()]
        self.title = None
        self.history = []
        self.mode = SCRIPT["modes"]["currentModeId"]
        self.options = json.loads(json.dumps(SCRIPT["config_options"]))
        self.cancelled = asyncio.Event()
        self.running = False
        self.idle = asyncio.Event()
        self.idle.set()

    def setup(self):
        return {
            "modes": {**SCRIPT["modes"], "currentModeId": self.mode},
            "configOptions": self.options,
        }


class ScriptedAgent:
    def __init__(self):
        self.sessions = {}
        self.signed_in = True
        self.client = None
        self.told = []

    def on_connect(self, conn):
        self.conn = conn

    # ------------------------------------------------------------ what is kept

    def saved(self):
        return json.loads(STATE.read_text("utf-8")) if STATE.exists() else {}

    def save(self, session):
        saved = self.saved()
        saved[session.id] = {
            "cwd": session.cwd,
            "more": session.more,
            "title": session.title,
            "history": session.history,
        }
        STATE.write_text(json.dumps(saved), "utf-8")

    def session(self, session_id):
        try:
            return self.sessions[session_id]
        except KeyError:
            raise not_found(session_id) from None

    # ------------------------------------------------------------ the connection

    async def initialize(
        self, protocol_version, client_capabilities=None, client_info=None, **meta
    ):
        self.client = {"capabilities": wire(client_capabilities), "info": wire(client_info)}
        methods = {"list": {}, "resume": {}, "close": {}, "additionalDirectories": {}}
        auth = {}
        if ROUTES_DELETE:
            methods["delete"] = {}
        if ROUTES_LOGOUT:
            auth["logout"] = {}
        return schema.InitializeResponse.model_validate(
            {
                "protocolVersion": min(protocol_version, 1),
                "agentCapabilities": {
                    "loadSession": True,
                    "promptCapabilities": {"image": True, "embeddedContext": True},
                    "sessionCapabilities": methods,
                    "auth": auth,
                },
                # As instances: from a dict 1.0.0rc3 makes a terminal login of a method without a type.
                "authMethods": [
                    schema.AuthMethodAgent.model_validate(method)
                    for method in SCRIPT["auth_methods"]
                ],
                "agentInfo": SCRIPT["agent"],
            }
        )

    async def authenticate(self, method_id, **meta):
        if method_id != "login":
            raise acp.RequestError.invalid_params({"methodId": method_id})
        self.signed_in = True

    async def logout(self, **meta):
        self.signed_in = False
        return schema.LogoutResponse()

    # ------------------------------------------------------------ sessions

    async def new_session(self, cwd, additional_directories=None, mcp_servers=None, **meta):
        if not self.signed_in:
            raise acp.RequestError.auth_required({"authMethods": ["login"]})
        if not Path(cwd).is_absolute():
            raise acp.RequestError.invalid_params({"path": cwd})
        name = f"session-{len(self.saved()) + 1}"
        session = Session(name, cwd, additional_directories, mcp_servers)
        self.sessions[name] = session
        self.save(session)
        # Before the response, as several real agents do.
        await self.send(
            session,
            {
                "sessionUpdate": "available_commands_update",
                "availableCommands": SCRIPT["commands"],
            },
            keep=False,
        )
        return schema.NewSessionResponse.model_validate({"sessionId": name, **session.setup()})

    def reopen(self, session_id, cwd, more):
        saved = self.saved().get(session_id)
        if saved is None:
            raise not_found(session_id)
        if saved["cwd"] != cwd:
            raise acp.RequestError.invalid_params({"cwd": cwd})
        session = Session(session_id, cwd, more)
        session.history, session.title = saved["history"], saved["title"]
        self.sessions[session_id] = session
        return session

    async def load_session(
        self, cwd, session_id, mcp_servers=None, additional_directories=None, **meta
    ):
        session = self.reopen(session_id, cwd, additional_directories)
        for update in session.history:
            await self.send(session, update, keep=False)
        return schema.LoadSessionResponse.model_validate(session.setup())

    async def resume_session(
        self, session_id, cwd, additional_directories=None, mcp_servers=None, **meta
    ):
        session = self.reopen(session_id, cwd, additional_directories)
        return schema.ResumeSessionResponse.model_validate(session.setup())

    async def list_sessions(self, cwd=None, cursor=None, **meta):
        found = [
            {"sessionId": name, "cwd": s["cwd"], "title": s["title"]}
            for name, s in self.saved().items()
            if s is not None and cwd in {None, s["cwd"]}
        ]
        if cursor is not None and not cursor.isdigit():
            raise acp.RequestError.invalid_params({"cursor": cursor})
        start = int(cursor or 0)
        page = {"sessions": found[start : start + 2]}
        if start + 2 < len(found):
            page["nextCursor"] = str(start + 2)
        return schema.ListSessionsResponse.model_validate(page)

    async def close_session(self, session_id, **meta):
        session = self.session(session_id)
        session.cancelled.set()
        await session.idle.wait()
        del self.sessions[session_id]

    async def delete_session(self, session_id, **meta):
        self.sessions.pop(session_id, None)
        # Kept as nothing, so that its id is not given again.
        STATE.write_text(json.dumps({**self.saved(), session_id: None}), "utf-8")
        return schema.DeleteSessionResponse()

    async def set_session_mode(self, session_id, mode_id, **meta):
        session = self.session(session_id)
        if mode_id not in {mode["id"] for mode in SCRIPT["modes"]["availableModes"]}:
            raise acp.RequestError.invalid_params({"modeId": mode_id})
        session.mode = mode_id

    async def set_config_option(self, config_id, session_id, value, **meta):
        session = self.session(session_id)
        for option in session.options:
            if option["id"] == config_id:
                break
        else:
            raise acp.RequestError.invalid_params({"configId": config_id})
        if option["type"] == "boolean":
            valid = isinstance(value, bool)
        else:
            valid = value in {choice["value"] for choice in option["options"]}
        if not valid:
            raise acp.RequestError.invalid_params({"value": value})
        option["currentValue"] = value
        return schema.SetSessionConfigOptionResponse.model_validate(
            {"configOptions": session.options}
        )

    # ------------------------------------------------------------ turns

    async def send(self, session, update, *, keep=True):
        if keep:
            session.history.append(update)
        await self.conn.session_update(session.id, update_of(update))

    async def say(self, session, value):
        text = value if isinstance(value, str) else json.dumps(value)
        await self.send(session, text_update(text))

    async def cancel(self, session_id, **meta):
        if session_id in self.sessions:
            self.sessions[session_id].cancelled.set()

    async def prompt(self, prompt, session_id, **meta):
        session = self.session(session_id)
        if session.running:
            raise acp.RequestError.invalid_request({"sessionId": session_id})
        session.running = True
        session.idle.clear()
        session.cancelled.clear()
        try:
            for block in prompt:
                session.history.append(
                    {"sessionUpdate": "user_message_chunk", "content": wire(block)}
                )
            name, _, rest = prompt[0].text.partition(" ")
            scene = getattr(self, f"scene_{name}", None)
            if scene is None:
                raise acp.RequestError.invalid_params({"scene": name})
            self.prompted, self.meta = prompt, meta
            answer = await scene(session, rest) or {}
            return schema.PromptResponse.model_validate({"stopReason": "end_turn", **answer})
        finally:
            self.save(session)
            session.running = False
            session.idle.set()

    async def scene_stream(self, session, rest):
        for update in SCRIPT["stream"]:
            played = json.loads(json.dumps(update).replace("{cwd}", session.cwd))
            await self.send(session, played)
        session.title = "A scripted turn"
        return {
            "usage": {"totalTokens": 30, "inputTokens": 10, "outputTokens": 20, "thoughtTokens": 5}
        }

    async def scene_echo(self, session, rest):
        for block in self.prompted:
            await self.send(
                session, {"sessionUpdate": "agent_message_chunk", "content": wire(block)}
            )

    async def scene_state(self, session, rest):
        await self.say(
            session,
            {
                "client": self.client,
                "cwd": session.cwd,
                "more": session.more,
                "servers": session.servers,
                "mode": session.mode,
                "options": {o["id"]: o["currentValue"] for o in session.options},
                "meta": self.meta,
                "told": self.told,
            },
        )

    async def scene_burst(self, session, rest):
        # All at once: whatever order they are written in is the order that counts.
        await asyncio.gather(*(self.say(session, f"{n} ") for n in range(int(rest))))

    async def scene_big(self, session, rest):
        await self.say(session, "ä" * int(rest))

    async def scene_permission(self, session, rest):
        call = SCRIPT["permission"]["toolCall"]
        await self.send(session, {"sessionUpdate": "tool_call", **call})
        answer = await self.conn.request_permission(
            session_id=session.id,
            tool_call=schema.ToolCallUpdate.model_validate(call),
            options=[
                schema.PermissionOption.model_validate(option)
                for option in SCRIPT["permission"]["options"]
            ],
        )
        outcome = wire(answer.outcome)
        allowed = outcome.get("optionId") in {"yes", "always"}
        await self.send(
            session,
            {
                "sessionUpdate": "tool_call_update",
                "toolCallId": call["toolCallId"],
                "status": "completed" if allowed else "failed",
            },
        )
        await self.say(session, outcome)
        if outcome["outcome"] == "cancelled":
            return {"stopReason": "cancelled"}
        return None

    async def code_of(self, call):
        """The code of the error that a call is answered with; None for a result."""
        try:
            await call
        except acp.RequestError as error:
            return error.code
        return None

    async def scene_files(self, session, rest):
        cwd, client = session.cwd, self.conn
        whole = await client.read_text_file(session_id=session.id, path=f"{cwd}/notes.txt")
        part = await client.read_text_file(
            session_id=session.id, path=f"{cwd}/notes.txt", line=2, limit=1
        )
        await client.write_text_file(
            session_id=session.id, path=f"{cwd}/new/copy.txt", content=rest + whole.content
        )
        again = await client.read_text_file(session_id=session.id, path=f"{cwd}/new/copy.txt")

        def reading(path):
            return self.code_of(client.read_text_file(session_id=session.id, path=path))

        await self.say(
            session,
            {
                "whole": whole.content,
                "part": part.content,
                "again": again.content,
                "missing": await reading(f"{cwd}/missing.txt"),
                "relative": await reading("notes.txt"),
                "outside": await reading("/etc/hostname"),
                "write outside": await self.code_of(
                    client.write_text_file(
                        session_id=session.id, path=f"{cwd}/../escaped.txt", content="x"
                    )
                ),
            },
        )

    async def scene_tools(self, session, rest):
        """Ask for everything, whatever the client offers."""
        client, name = self.conn, session.id
        await self.say(
            session,
            {
                "read": await self.code_of(
                    client.read_text_file(session_id=name, path=f"{session.cwd}/notes.txt")
                ),
                "write": await self.code_of(
                    client.write_text_file(
                        session_id=name, path=f"{session.cwd}/x.txt", content="x"
                    )
                ),
                "terminal": await self.code_of(
                    client.create_terminal(session_id=name, command="true")
                ),
            },
        )

    async def scene_terminal(self, session, rest):
        client, name = self.conn, session.id
        made = await client.create_terminal(
            session_id=name,
            command="sh",
            args=["-c", 'printf "%s " "$WORD" ü; pwd; echo err >&2; exit 3'],
            env=[schema.EnvVariable(name="WORD", value="a b")],
        )
        terminal = {"session_id": name, "terminal_id": made.terminal_id}
        call = {"toolCallId": "term1", "title": "sh", "kind": "execute", "status": "in_progress"}
        shown = [{"type": "terminal", "terminalId": made.terminal_id}]
        await self.send(session, {"sessionUpdate": "tool_call", **call, "content": shown})
        ended = await client.wait_for_terminal_exit(**terminal)
        output = await client.terminal_output(**terminal)
        await client.release_terminal(**terminal)
        limited = await client.create_terminal(
            session_id=name, command="printf", args=["äöü%s", "äöü"], output_byte_limit=5
        )
        last = {"session_id": name, "terminal_id": limited.terminal_id}
        await client.wait_for_terminal_exit(**last)
        tail = await client.terminal_output(**last)
        await client.release_terminal(**last)
        await self.say(
            session,
            {
                "id": made.terminal_id,
                "exit": wire(ended),
                "output": wire(output),
                "released": await self.code_of(client.terminal_output(**terminal)),
                "limited": wire(tail),
                "missing command": await self.code_of(
                    client.create_terminal(session_id=name, command="no-such-command-here")
                ),
            },
        )

    async def scene_kill(self, session, rest):
        """A command that would run on: killed, then another released, both while being waited for."""
        client, name = self.conn, session.id

        async def running():
            made = await client.create_terminal(
                session_id=name, command="sh", args=["-c", "echo ready; exec sleep 300"]
            )
            terminal = {"session_id": name, "terminal_id": made.terminal_id}
            while True:
                seen = await client.terminal_output(**terminal)
                if "ready" in seen.output:
                    return terminal, seen

        terminal, before = await running()
        waiting = asyncio.gather(*(client.wait_for_terminal_exit(**terminal) for _ in range(2)))
        await client.kill_terminal(**terminal)
        ended = await waiting
        after = await client.terminal_output(**terminal)
        await client.release_terminal(**terminal)
        other, _ = await running()
        wait = asyncio.ensure_future(client.wait_for_terminal_exit(**other))
        await asyncio.sleep(0)
        await client.release_terminal(**other)
        await self.say(
            session,
            {
                "before": wire(before),
                "ended": [wire(end) for end in ended],
                "after": wire(after),
                "released": wire(await wait),
                "gone": await self.code_of(client.kill_terminal(**other)),
            },
        )

    async def scene_slow(self, session, rest):
        await self.say(session, "started")
        await session.cancelled.wait()
        await self.say(session, "stopping")
        return {"stopReason": "cancelled"}

    async def scene_extension(self, session, rest):
        # The SDK puts the underscore before the name.
        answer = await self.conn.ext_method("interop/echo", {"a": [1, None, {"ü": True}]})
        await self.conn.ext_notification("interop/tick", {"n": 1})
        unknown = await self.code_of(self.conn.ext_method("interop/unknown", {}))
        await self.say(session, {"answer": answer, "unknown": unknown})

    async def scene_elicit(self, session, rest):
        form = SCRIPT["elicitation"]
        mode = schema.ElicitationFormSessionMode.model_validate(
            {"sessionId": session.id, "requestedSchema": form["requestedSchema"]}
        )
        answer = await self.conn.create_elicitation(form["message"], mode)
        await self.say(session, wire(answer))

    async def scene_stop(self, session, rest):
        return {"stopReason": rest}

    async def scene_fail(self, session, rest):
        raise acp.RequestError(4242, "Out of quota", {"left": 0})

    async def scene_crash(self, session, rest):
        raise ValueError("a secret")

    async def scene_exit(self, session, rest):
        await self.say(session, "going")
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)

    # ------------------------------------------------------------ extensions

    async def ext_method(self, method, params):
        if method == "interop/echo":
            return {"method": method, "params": params}
        if method == "interop/null":
            return None
        raise acp.RequestError.method_not_found(f"_{method}")

    async def ext_notification(self, method, params):
        self.told.append([method, params])
        if method == "interop/poke":
            await self.send(
                self.session(params["sessionId"]),
                {"sessionUpdate": "session_info_update", "title": params["title"]},
                keep=False,
            )


# Both versions serve close and resume (0.12.1) and elicitation only with the flag.
asyncio.run(acp.run_agent(ScriptedAgent(), use_unstable_protocol=True))
