"""A client on the official Python SDK, 0.12.1 and 1.0.0rc3, that plays every scene with an agent.

`py_sdk_client.py CWD AGENT [ARGUMENT ...]` prints one JSON object, a member for each step; what a
step cannot do is its `failed`. test_our_agent.py asserts what is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import acp
from acp import schema

CWD = Path(sys.argv[1])
AGENT = sys.argv[2:]
SCRIPT = json.loads((Path(__file__).parent / "script.json").read_text("utf-8"))
LIMIT = 8 << 20  # bytes of a line; asyncio's own limit of 64 KiB ends at the first long one


def wire(model):
    return (
        None if model is None else model.model_dump(mode="json", by_alias=True, exclude_none=True)
    )


def block(value):
    """A typed content block from its wire form."""
    request = {"sessionId": "", "prompt": [value]}
    return schema.PromptRequest.model_validate(request).prompt[0]


def said(text):
    return [block({"type": "text", "text": text})]


async def refusal(call):
    """What a call is refused with."""
    try:
        return {"result": wire(await call)}
    except acp.RequestError as error:
        return {"code": error.code, "message": str(error), "data": error.data}


class Command:
    """A command in a terminal of this client."""

    def __init__(self, process, limit):
        self.process = process
        self.limit = limit
        self.output = b""
        self.truncated = False
        self.ended = asyncio.ensure_future(self.read())

    async def read(self):
        while chunk := await self.process.stdout.read(65536):
            self.output += chunk
            if self.limit is not None and len(self.output) > self.limit:
                self.truncated = True
                self.output = self.output[-self.limit :]
        await self.process.wait()

    def status(self):
        code = self.process.returncode
        if code is None:
            return None
        return {"signal": signal.Signals(-code).name} if code < 0 else {"exitCode": code}

    def kill(self):
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Host:
    """What this client lends, decides and notes down."""

    def __init__(self):
        self.updates = {}
        self.news = asyncio.Condition()
        self.decision = "yes"
        self.asked = []
        self.being_asked = asyncio.Event()
        self.thinking = None
        self.form = SCRIPT["answer"]
        self.elicited = []
        self.ticks = []
        self.commands = {}
        #: Set to let the handler of an update wait for it before it notes the update.
        self.waits = {}

    async def session_update(self, session_id, update, **meta):
        text = getattr(getattr(update, "content", None), "text", None)
        if text in self.waits:
            await self.waits[text].wait()
        self.updates.setdefault(session_id, []).append(wire(update))
        async with self.news:
            self.news.notify_all()

    async def seen(self, session_id, found):
        """Wait until an update of the session is what is looked for."""
        async with self.news:
            await self.news.wait_for(lambda: any(map(found, self.updates.get(session_id, []))))

    async def request_permission(self, session_id, tool_call, options, **meta):
        self.asked.append(
            {
                "sessionId": session_id,
                "toolCall": wire(tool_call),
                "options": [wire(option) for option in options],
            }
        )
        self.being_asked.set()
        if self.thinking is not None:
            await self.thinking.wait()
        if self.decision is None:
            outcome = {"outcome": "cancelled"}
        else:
            outcome = {"outcome": "selected", "optionId": self.decision}
        return schema.RequestPermissionResponse.model_validate({"outcome": outcome})

    # ------------------------------------------------------------ files

    def path(self, name):
        path = Path(os.path.normpath(name))
        if not path.is_absolute() or not path.is_relative_to(CWD):
            raise acp.RequestError.invalid_params({"path": name})
        return path

    async def read_text_file(self, session_id, path, line=None, limit=None, **meta):
        try:
            content = self.path(path).read_bytes().decode()
        except FileNotFoundError:
            raise acp.RequestError.resource_not_found(path) from None
        lines = content.split("\n")
        start = (line or 1) - 1
        if line is not None or limit is not None:
            end = None if limit is None else start + limit
            content = "".join(f"{text}\n" for text in lines[start:end])
        return schema.ReadTextFileResponse(content=content)

    async def write_text_file(self, session_id, path, content, **meta):
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode())

    # ------------------------------------------------------------ terminals

    async def create_terminal(
        self, session_id, command, args=None, env=None, cwd=None, output_byte_limit=None, **meta
    ):
        try:
            process = await asyncio.create_subprocess_exec(
                command,
                *(args or ()),
                cwd=cwd or CWD,
                env={**os.environ, **{v.name: v.value for v in env or ()}},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise acp.RequestError.invalid_params({"command": command}) from None
        name = f"terminal-{len(self.commands)}"
        self.commands[name] = Command(process, output_byte_limit)
        return schema.CreateTerminalResponse(terminal_id=name)

    def command(self, terminal_id):
        if self.commands.get(terminal_id) is None:
            raise acp.RequestError.resource_not_found(terminal_id)
        return self.commands[terminal_id]

    async def terminal_output(self, session_id, terminal_id, **meta):
        command = self.command(terminal_id)
        answer = {
            "output": command.output.decode("utf-8", "ignore"),
            "truncated": command.truncated,
        }
        if command.ended.done():
            answer["exitStatus"] = command.status()
        return schema.TerminalOutputResponse.model_validate(answer)

    async def wait_for_terminal_exit(self, session_id, terminal_id, **meta):
        command = self.command(terminal_id)
        await asyncio.shield(command.ended)
        return schema.WaitForTerminalExitResponse.model_validate(command.status())

    async def kill_terminal(self, session_id, terminal_id, **meta):
        self.command(terminal_id).kill()

    async def release_terminal(self, session_id, terminal_id, **meta):
        command = self.command(terminal_id)
        self.commands[terminal_id] = None
        command.kill()
        await command.ended

    # ------------------------------------------------------------ the rest

    async def create_elicitation(self, message, mode, **meta):
        self.elicited.append({"message": message, **wire(mode)})
        if self.form is None:
            return schema.DeclineElicitationResponse(action="decline")
        return schema.AcceptElicitationResponse(action="accept", content=self.form)

    async def ext_method(self, method, params):
        if method != "interop/echo":
            raise acp.RequestError.method_not_found(f"_{method}")
        return {"method": method, "params": params}

    async def ext_notification(self, method, params):
        self.ticks.append([method, params])


class Connection:
    """An agent that was started, and this client's end of it."""

    def __init__(self, capabilities):
        self.capabilities = capabilities
        self.host = Host()

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            *AGENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LIMIT
        )
        # The flag: without it neither version shows elicitation requests to the handler.
        self.agent = acp.connect_to_agent(
            self.host, self.process.stdin, self.process.stdout, use_unstable_protocol=True
        )
        self.initialized = await self.agent.initialize(
            protocol_version=acp.PROTOCOL_VERSION,
            client_capabilities=schema.ClientCapabilities.model_validate(self.capabilities),
            client_info=schema.Implementation.model_validate(SCRIPT["client"]),
        )
        return self

    async def __aexit__(self, kind, error, trace):
        for command in self.host.commands.values():
            if command is not None:
                command.kill()
        await self.agent.close()
        self.process.stdin.close()
        try:
            self.status = await asyncio.wait_for(self.process.wait(), 5)
        except TimeoutError:
            self.process.kill()
            self.status = "did not end"

    async def raw(self, method, params):
        """What the SDK has no call for, or would not let out of the house."""
        return await self.agent._conn.send_request(method, params)

    async def delete(self, session_id):
        # 0.12.1 has no call for it.
        return await self.raw("session/delete", {"sessionId": session_id})

    async def logout(self):
        # 0.12.1 has no call for it.
        return await self.raw("logout", {})

    async def opened(self, cwd=CWD, **more):
        session = await self.agent.new_session(cwd=str(cwd), mcp_servers=[], **more)
        kinds = {"available_commands_update"}
        await self.host.seen(session.session_id, lambda u: u["sessionUpdate"] in kinds)
        return session.session_id

    async def turn(self, session_id, prompt):
        """A whole turn: its answer, and the updates that were there when the answer was."""
        updates = self.host.updates.setdefault(session_id, [])
        before = len(updates)
        blocks = said(prompt) if isinstance(prompt, str) else prompt
        response = await self.agent.prompt(session_id=session_id, prompt=blocks)
        return {"response": wire(response), "updates": updates[before:]}

    async def told(self, session_id, prompt):
        turn = await self.turn(session_id, prompt)
        return json.loads(turn["updates"][-1]["content"]["text"])


# ---------------------------------------------------------------- the steps


async def step_initialize(link):
    return wire(link.initialized)


async def step_new(link):
    more = CWD / "more"
    more.mkdir(exist_ok=True)
    server = schema.McpServerStdio.model_validate(
        {"name": "files", "command": "/bin/true", "args": [], "env": []}
    )
    response = await link.agent.new_session(
        cwd=str(CWD), mcp_servers=[server], additional_directories=[str(more)]
    )
    await link.host.seen(response.session_id, lambda u: "availableCommands" in u)
    answer = await link.agent.prompt(
        session_id=response.session_id, prompt=said("state"), traceparent="00-1", x=[1, {"y": None}]
    )
    updates = link.host.updates[response.session_id]
    return {
        "response": wire(response),
        "updates": updates[:-1],
        "state": json.loads(updates[-1]["content"]["text"]),
        "stop": answer.stop_reason,
    }


async def step_stream(link):
    return await link.turn(await link.opened(), "stream")


async def step_echo(link):
    return await link.turn(await link.opened(), [block(value) for value in SCRIPT["blocks"]])


async def step_burst(link):
    turn = await link.turn(await link.opened(), "burst 1000")
    return "".join(update["content"]["text"] for update in turn["updates"])


async def step_big(link):
    session = await link.opened()
    big = await link.turn(session, "big 300000")
    echo = await link.turn(session, "echo " + "ö" * 300_000)
    return [
        update["content"]["text"] == text
        for turn, text in ((big, "ä" * 300_000), (echo, "echo " + "ö" * 300_000))
        for update in turn["updates"]
    ]


async def step_permission(link):
    session, report = await link.opened(), {}
    for decision in ("yes", "always", "no", "not offered", None):
        link.host.decision = decision
        turn = await link.turn(session, "permission")
        report[str(decision)] = {**turn, "asked": link.host.asked.pop()}
    link.host.decision = "yes"
    return report


async def step_files(link):
    return await link.told(await link.opened(), "files ü\u2028\r\n")


async def step_terminal(link):
    turn = await link.turn(await link.opened(), "terminal")
    left = [name for name, command in link.host.commands.items() if command is not None]
    return {**turn, "left": left}


async def step_kill(link):
    told = await link.told(await link.opened(), "kill")
    left = [name for name, command in link.host.commands.items() if command is not None]
    return {**told, "left": left}


async def step_cancel(link):
    session = await link.opened()
    turn = asyncio.ensure_future(link.turn(session, "slow"))
    await link.host.seen(session, lambda u: u.get("content", {}).get("text") == "started")
    await link.agent.cancel(session_id=session)
    return {"turn": await turn, "after": await link.turn(session, "echo")}


async def step_cancel_permission(link):
    session, host = await link.opened(), link.host
    host.thinking, host.decision = asyncio.Event(), None
    host.being_asked.clear()
    turn = asyncio.ensure_future(link.turn(session, "permission"))
    await host.being_asked.wait()
    await link.agent.cancel(session_id=session)
    host.thinking.set()
    report = await turn
    host.thinking, host.decision = None, "yes"
    return report


async def step_cancel_command(link):
    """Cancelled while a command runs: the agent releases its terminal."""
    session = await link.opened()
    turn = asyncio.ensure_future(link.turn(session, "busy"))
    await link.host.seen(session, lambda u: u.get("content", {}).get("text") == "started")
    await link.agent.cancel(session_id=session)
    report = await turn
    left = [name for name, command in link.host.commands.items() if command is not None]
    return {**report, "left": left}


async def step_modes(link):
    session, agent = await link.opened(), link.agent
    await agent.set_session_mode(session_id=session, mode_id="code")
    await agent.set_config_option(session_id=session, config_id="model", value="deep")
    last = await agent.set_config_option(session_id=session, config_id="verbose", value=True)

    def option(name, value):
        return refusal(agent.set_config_option(session_id=session, config_id=name, value=value))

    return {
        "options": wire(last)["configOptions"],
        "unknown mode": await refusal(agent.set_session_mode(session_id=session, mode_id="zz")),
        "unknown option": await option("zz", "deep"),
        "unknown value": await option("model", "zz"),
        "state": await link.told(session, "state"),
    }


async def step_extension(link):
    session, agent = await link.opened(), link.agent
    params = {"a": [1, None, {"ü": True}]}
    echo = await agent.ext_method("interop/echo", params)
    null = await agent.ext_method("interop/null", {})
    unknown = await refusal(agent.ext_method("interop/unknown", {}))
    await agent.ext_notification("interop/tick", {"n": 2})
    await agent.ext_notification("interop/nobody", {})
    told = await link.told(session, "extension")
    await agent.ext_notification("interop/poke", {"sessionId": session, "title": "Poked"})
    await link.host.seen(session, lambda u: u.get("title") == "Poked")
    state = await link.told(session, "state")
    return {
        "echo": echo,
        "null": null,
        "unknown": unknown,
        "told": told,
        "ticks": link.host.ticks,
        "state": state["told"],
    }


async def step_elicit(link):
    session, host = await link.opened(), link.host
    accepted = await link.told(session, "elicit")
    host.form = None
    declined = await link.told(session, "elicit")
    host.form = SCRIPT["answer"]
    return {"accepted": accepted, "declined": declined, "elicited": host.elicited}


async def step_side_by_side(link):
    sessions = [await link.opened() for _ in range(3)]
    slow = asyncio.ensure_future(link.turn(sessions[0], "slow"))
    await link.host.seen(sessions[0], lambda u: u.get("content", {}).get("text") == "started")
    bursts = await asyncio.gather(*(link.turn(name, "burst 200") for name in sessions[1:]))
    await link.agent.cancel(session_id=sessions[0])
    await slow
    return ["".join(u["content"]["text"] for u in burst["updates"]) for burst in bursts]


async def step_errors(link):
    session, agent = await link.opened(), link.agent

    def prompt(text, name=session):
        return refusal(agent.prompt(session_id=name, prompt=said(text)))

    slow = asyncio.ensure_future(link.turn(session, "slow"))
    await link.host.seen(session, lambda u: u.get("content", {}).get("text") == "started")
    second = await prompt("echo")
    await agent.cancel(session_id=session)
    await slow
    audio = block({"type": "audio", "data": "c291bmQ=", "mimeType": "audio/wav"})
    return {
        "second prompt": second,
        "own error": await prompt("fail"),
        "crash": await prompt("crash"),
        "unknown session": await prompt("echo", "no such session"),
        "unknown scene": await prompt("no-such-scene"),
        "audio": await refusal(agent.prompt(session_id=session, prompt=[audio])),
        "relative cwd": await refusal(agent.new_session(cwd="here", mcp_servers=[])),
        "relative directory": await refusal(
            agent.new_session(cwd=str(CWD), mcp_servers=[], additional_directories=["more"])
        ),
        "unknown method": await refusal(link.raw("no/such", {})),
        "no prompt": await refusal(link.raw("session/prompt", {"sessionId": session})),
        "text for blocks": await refusal(
            link.raw("session/prompt", {"sessionId": session, "prompt": "x"})
        ),
        "no cwd": await refusal(link.raw("session/new", {"mcpServers": []})),
        "second initialize": await refusal(agent.initialize(protocol_version=acp.PROTOCOL_VERSION)),
        "mode of nobody": await refusal(
            agent.set_session_mode(session_id="no such session", mode_id="code")
        ),
        "after": (await link.turn(session, "echo"))["updates"],
    }


async def step_stops(link):
    session = await link.opened()
    return [
        (await link.turn(session, f"stop {reason}"))["response"]["stopReason"]
        for reason in ("max_tokens", "max_turn_requests", "refusal")
    ]


async def step_auth(link):
    agent = link.agent
    await link.logout()
    signed_out = await refusal(agent.new_session(cwd=str(CWD), mcp_servers=[]))
    unknown = await refusal(agent.authenticate(method_id="zz"))
    await agent.authenticate(method_id="login")
    return {
        "signed out": signed_out,
        "unknown method": unknown,
        "after": (await link.turn(await link.opened(), "echo"))["updates"],
    }


async def step_sessions(link):
    """In a folder of its own: list, close, delete, and what the next process loads and resumes."""
    folder, agent = CWD / "folder", link.agent
    folder.mkdir(exist_ok=True)
    names = [await link.opened(folder) for _ in range(4)]
    await link.turn(names[0], "stream")
    pages, cursor = [], None
    while True:
        page = await agent.list_sessions(cwd=str(folder), cursor=cursor)
        pages.append([wire(info) for info in page.sessions])
        cursor = page.next_cursor
        if cursor is None:
            break
    await agent.close_session(session_id=names[1])
    slow = asyncio.ensure_future(link.turn(names[2], "slow"))
    await link.host.seen(names[2], lambda u: u.get("content", {}).get("text") == "started")
    closing = asyncio.ensure_future(agent.close_session(session_id=names[2]))
    ended = await slow
    await closing
    deleted = [await link.delete(names[3]) for _ in range(2)]
    left = await agent.list_sessions(cwd=str(folder), cursor="2")
    return {
        "names": names,
        "pages": pages,
        "nowhere": wire(await agent.list_sessions(cwd="/nowhere")),
        "garbage": await refusal(agent.list_sessions(cursor="garbage")),
        "closed": await refusal(agent.prompt(session_id=names[1], prompt=said("echo"))),
        "close again": await refusal(agent.close_session(session_id=names[1])),
        "closed while running": ended,
        "deleted": deleted,
        "left": [info.session_id for info in left.sessions],
    }


async def step_handlers(link):
    """Handlers that take their time: whether the next one waits, and whether an answer does."""
    session, host = await link.opened(), link.host
    first = host.waits["0 "] = asyncio.Event()
    turn = asyncio.ensure_future(link.turn(session, "burst 2"))
    await host.seen(session, lambda u: u.get("content", {}).get("text") == "1 ")
    first.set()
    noted = (await turn)["updates"]
    await link.agent.close_session(session_id=session)
    host.updates[session].clear()
    first.clear()
    loading = link.agent.load_session(cwd=str(CWD), session_id=session, mcp_servers=[])
    await asyncio.wait_for(loading, 5)
    at_answer = len(host.updates[session])
    first.set()
    await host.seen(session, lambda u: u.get("content", {}).get("text") == "0 ")
    return {
        "noted": [update["content"]["text"] for update in noted],
        "noted at the answer": at_answer,
        "noted at last": [update["content"]["text"] for update in host.updates[session]],
    }


async def reopen(link, name):
    """What the next process makes of the sessions that `step_sessions` left."""
    folder, agent = str(CWD / "folder"), link.agent

    def load(session_id, cwd):
        return refusal(agent.load_session(cwd=cwd, session_id=session_id, mcp_servers=[]))

    loaded = await agent.load_session(cwd=folder, session_id=name, mcp_servers=[])
    replayed = list(link.host.updates[name])
    echoed = await link.turn(name, "echo")
    await agent.close_session(session_id=name)
    link.host.updates.clear()
    resumed = await agent.resume_session(session_id=name, cwd=folder, mcp_servers=[])
    return {
        "loaded": wire(loaded),
        "replayed": replayed,
        "echoed": echoed["updates"],
        "resumed": wire(resumed),
        "after resume": list(link.host.updates),
        "unknown": await load("no such session", folder),
        "elsewhere": await load(name, str(CWD)),
    }


async def death(link):
    session = await link.opened()
    try:
        await link.turn(session, "exit")
    except Exception as error:
        return {
            "error": type(error).__name__,
            "last": link.host.updates[session][-1]["content"]["text"],
        }
    return None


STEPS = {name.removeprefix("step_"): f for name, f in globals().items() if name.startswith("step_")}
ALL = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "terminal": True,
    "elicitation": {"form": {}},
    "session": {"configOptions": {"boolean": {}}},
}


async def main():
    report = {}

    async def note(name, call):
        try:
            report[name] = await call
        except Exception as error:
            report[name] = {"failed": f"{type(error).__name__}: {error}"}

    async with Connection(ALL) as link:
        for name, step in STEPS.items():
            await note(name, step(link))
    report["exit"] = link.status

    async with Connection({}) as bare:
        session = await bare.agent.new_session(cwd=str(CWD), mcp_servers=[])
        report["bare"] = {
            "options": wire(session)["configOptions"],
            "tools": await bare.told(session.session_id, "tools"),
            "elicit": await refusal(
                bare.agent.prompt(session_id=session.session_id, prompt=said("elicit"))
            ),
        }
        await note("reopened", reopen(bare, report["sessions"]["names"][0]))
        await note("death", death(bare))
    report["death exit"] = bare.status
    print(json.dumps(report))


asyncio.run(main())
