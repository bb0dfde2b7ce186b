"""Plays a case of `cases.json`: its steps in order, then all of its checks.

A fresh agent, client and directory for each. Everything a check looks at is taken from the wire as
the client recorded it; what our client delivered must be the same, in the same order. A reference
`"$key"` means what was saved under that key.

Unlike upstream's engine, a handshake that fails is told like any other failure, so that the check of
its version can be seen to fail.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon import AntiphonError, Client, Limits, RequestError
from antiphon.schema import decode, v1
from antiphon.services import Files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon import AgentPeer, ClientContext, Update

__all__ = ["CASES", "Case", "CaseClient", "play"]

Json = dict[str, Any]
DENIED = "Permission denied by conformance runner"


class Case:
    """One case as it stands in the file, with what it leaves out filled in."""

    def __init__(self, entry: Json) -> None:
        self.number: str = entry["number"]
        self.id: str = entry["id"]
        self.title: str = entry["title"]
        self.denies: bool = entry.get("permission_mode", "approve-all") == "deny-all"
        self.steps: list[Json] = entry["steps"]
        self.checks: list[Json] = entry["checks"]
        #: What only a fault of ours would emit, were it not said here.
        self.events: list[str] = entry.get("events", [])
        timeouts: dict[str, int] = entry.get("timeouts", {})
        self.request_timeout = timeouts.get("request_timeout_ms", 10_000) / 1000
        self.update_timeout = timeouts.get("update_timeout_ms", 30_000) / 1000
        self.settle_timeout = timeouts.get("settle_timeout_ms", 0) / 1000


def _cases() -> dict[str, Case]:
    text = (Path(__file__).parent / "cases.json").read_text(encoding="utf-8")
    return {entry["id"]: Case(entry) for entry in json.loads(text)["cases"]}


CASES = _cases()


class CaseClient(Client):
    """Lends the case's two directories, or denies everything; writes down what was delivered."""

    def __init__(self, *roots: Path, denies: bool) -> None:
        super().__init__(files=Files(*roots, allow_write=True), on_update=self.delivered)
        self.denies = denies
        self.updates: list[bytes] = []
        #: (operation, session id, path, content, error code) of every file call that was completed.
        self.operations: list[tuple[str, str, str, str, int]] = []

    def delivered(self, update: Update) -> None:
        self.updates.append(update.frame)

    async def read_text_file(
        self, params: v1.ReadTextFileRequest, ctx: ClientContext
    ) -> v1.ReadTextFileResponse:
        assert self.files is not None
        async with self._completed("read", params) as done:
            answer = await self.files.read_text_file(params, ctx)
            done.append(answer.content)
        return answer

    async def write_text_file(
        self, params: v1.WriteTextFileRequest, ctx: ClientContext
    ) -> v1.WriteTextFileResponse:
        assert self.files is not None
        async with self._completed("write", params) as done:
            answer = await self.files.write_text_file(params, ctx)
            done.append(params.content)
        return answer

    @asynccontextmanager
    async def _completed(self, operation: str, params: Any) -> AsyncGenerator[list[str]]:
        done: list[str] = []
        code = 0
        try:
            if self.denies:
                raise RequestError(-32000, DENIED)
            yield done
        except RequestError as error:
            code = error.code
            raise
        finally:
            content = done[0] if done else ""
            self.operations.append((operation, params.session_id, params.path, content, code))


class Failed(Exception):
    """A step or a check did not come out as the case says."""


class Play:
    """One case being played: what was saved, and what crossed the wire."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.cwd = folder / "session"
        self.temp = folder / "elsewhere"
        for directory in (self.cwd, self.temp):
            directory.mkdir()
        (self.cwd / "README.md").write_text("# A folder for acpx's cases\n", encoding="utf-8")
        self.saved: dict[str, Any] = {}
        self.wire: list[tuple[str, bytes]] = []
        self.client = CaseClient(self.cwd, self.temp, denies=case.denies)
        self._background: dict[str, asyncio.Task[Any]] = {}

    # ------------------------------------------------------------------ what was seen

    @property
    def received(self) -> list[Json]:
        return [json.loads(frame) for way, frame in self.wire if way == "in"]

    @property
    def update_frames(self) -> list[bytes]:
        return [f for w, f in self.wire if w == "in" and b'"session/update"' in f]

    @property
    def updates(self) -> list[Json]:
        """Parameters of the updates as they came."""
        return [f["params"] for f in self.received if f.get("method") == "session/update"]

    def meant(self, value: Any) -> Any:
        """What a value of the case stands for."""
        if isinstance(value, str):
            if value.startswith("$") and not value.startswith("${"):
                saved = self.saved.get(value[1:])
                if not isinstance(saved, str) or not saved:
                    raise Failed(f"nothing to refer to was saved as {value[1:]!r}")
                return saved
            return value.replace("${temp}", str(self.temp))
        if isinstance(value, dict):
            return {name: self.meant(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, list):
            return [self.meant(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    # ------------------------------------------------------------------ steps

    async def step(self, peer: AgentPeer, step: Json) -> None:
        match step["action"]:
            case "new_session":
                await self._outcome(step, self._new_session(peer, step))
            case "prompt":
                await self._outcome(step, self._prompt(peer, step))
            case "prompt_background":
                began = asyncio.Event()
                task = asyncio.create_task(self._prompt(peer, step, began))
                self._background[step["save_as"]] = task
                waits = asyncio.ensure_future(began.wait())
                await asyncio.wait([task, waits], return_when=asyncio.FIRST_COMPLETED)
                waits.cancel()
            case "await_background":
                await self._outcome(step, self._background.pop(step["from"]))
            case "cancel":
                session_id = self.meant(step["session"])
                session = peer.sessions.get(session_id)
                if session is not None and session.turn is not None:
                    await session.cancel()
                else:  # ours would send nothing, and it is the agent that is looked at
                    body = json.dumps({"sessionId": session_id}).encode()
                    peer.connection.notify("session/cancel", body)
            case "sleep":
                await asyncio.sleep(step["ms"] / 1000)
            case action:
                raise Failed(f"no such action: {action}")

    async def _outcome(self, step: Json, work: Any) -> None:
        expected = step.get("expect_error")
        try:
            result = await work
        except RequestError as error:
            if expected is None:
                raise Failed(f"{step['action']} failed: {error}") from error
            self.saved[step["save_as"]] = error
            codes: list[int] = expected.get("codes", [])
            if codes and error.code not in codes:
                raise Failed(f"expected an error of {codes}, got {error}") from error
            said = f"{error.message} {json.dumps(error.data)}".lower()
            fragments: list[str] = expected.get("message_any", [])
            if fragments and not any(part.lower() in said for part in fragments):
                raise Failed(f"expected one of {fragments} in {said!r}") from error
        except AntiphonError as error:
            raise Failed(f"{step['action']} failed: {type(error).__name__}: {error}") from error
        else:
            if expected is not None:
                raise Failed(f"{step['action']} was expected to fail")
            self.saved[step["save_as"]] = result

    async def _new_session(self, peer: AgentPeer, step: Json) -> str:
        if "cwd" not in step:
            return (await peer.new_session(cwd=self.cwd)).session_id
        # Not to be had through `new_session`, which sends no directory that is none.
        body = json.dumps({"cwd": self.meant(step["cwd"]), "mcpServers": []}).encode()
        answer = await peer.connection.request("session/new", body, self.case.request_timeout)
        return decode(v1.NewSessionResponse, answer).session_id

    async def _prompt(
        self, peer: AgentPeer, step: Json, began: asyncio.Event | None = None
    ) -> v1.PromptResponse:
        session_id = self.meant(step["session"])
        blocks: Any = self.meant(step["prompt"])
        session = peer.sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            body = json.dumps({"sessionId": session_id, "prompt": blocks}).encode()
            raw = await peer.connection.request("session/prompt", body, self.case.update_timeout)
            return decode(v1.PromptResponse, raw)
        content = [decode(v1.ContentBlock, json.dumps(block).encode()) for block in blocks]
        async with session.prompt(content, timeout=self.case.update_timeout) as turn:
            if began is not None:
                began.set()
            async for _ in turn:
                pass
        assert turn.response is not None
        return turn.response

    async def end(self) -> None:
        """Let go of what a failed step left running."""
        tasks = list(self._background.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ checks

    def check(self, check: Json) -> bool:
        """Whether a check passes."""
        kind = check["type"]
        match kind:
            case "initialize_protocol_version_number":
                version = self.received[0].get("result", {}).get("protocolVersion")
                return isinstance(version, (int, float)) and not isinstance(version, bool)
            case "saved_non_empty_string":
                saved = self.saved.get(check["key"])
                return isinstance(saved, str) and saved != ""
            case "saved_error_present":
                return isinstance(self.saved.get(check["key"]), RequestError)
            case "saved_stop_reason_in":
                saved = self.saved.get(check["key"])
                values: list[str] = check["values"]
                return getattr(saved, "stop_reason", None) in values
            case "updates_count_at_least":
                least: int = check["min"]
                return len(self.updates) >= least
            case "updates_all_session":
                session_id = self.meant(check["session"])
                return all(update["sessionId"] == session_id for update in self.updates)
            case "updates_text_includes":
                wanted: str = self.meant(check["text"]).lower()
                return any(wanted in _text_of(update["update"]).lower() for update in self.updates)
            case "updates_session_update_includes":
                seen = {update["update"].get("sessionUpdate") for update in self.updates}
                return set(check["values"]) <= seen
            case "filesystem_operation":
                return any(self._matches(check, done) for done in self.client.operations)
            case _:
                raise Failed(f"no such check: {kind}")

    def _matches(self, check: Json, done: tuple[str, str, str, str, int]) -> bool:
        operation, session_id, path, content, code = done
        return (
            operation == check["operation"]
            and session_id == self.meant(check["session"])
            # A relative path is joined to the session's directory before it is sent.
            and path == str(Path(self.cwd, self.meant(check["path"])))
            and check.get("content", "") in content
            and code == check.get("error", 0)
        )


def _text_of(update: Json) -> str:
    if update.get("sessionUpdate") not in {"agent_message_chunk", "agent_thought_chunk"}:
        return ""
    content: Json = update.get("content", {})
    text = content.get("text", "")
    return text if isinstance(text, str) else ""


async def play(case: Case, folder: Path, open_: Any) -> tuple[list[str], Play]:
    """Play a case; what failed, in words that begin with the step's or check's name.

    `open_` is given the client, its limits and what records the wire, and connects to the agent.
    """
    run = Play(case, folder)

    def record(direction: str, frame: bytes) -> None:
        run.wire.append((direction, frame))

    limits = Limits(startup_timeout=10, request_timeout=case.request_timeout, cancel_backstop=2)
    failures: list[str] = []
    try:
        async with open_(run.client, limits, record) as peer:
            try:
                for step in case.steps:
                    await run.step(peer, step)
                # What an agent sends behind its answer has this long to come; nothing announces it.
                await asyncio.sleep(case.settle_timeout)
            finally:
                await run.end()
    except Failed as failure:
        failures.append(f"step: {failure}")
    except AntiphonError as error:
        failures.append(f"initialize: {error}")
    for check in case.checks:
        try:
            passed = run.check(check)
        except Failed as failure:
            failures.append(f"{check['type']}: {failure}")
        else:
            if not passed:
                failures.append(f"{check['type']}: {check} with {run.saved}, {run.updates}")
    if run.client.updates != run.update_frames:
        failures.append(f"delivery: {run.client.updates} for {run.update_frames}")
    return failures, run
