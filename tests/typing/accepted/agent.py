"""An agent that uses most of what an agent author thinks in."""

from __future__ import annotations

from antiphon import (
    DEFERRED,
    Agent,
    AgentContext,
    Capabilities,
    Reply,
    RequestError,
    TelemetryEvent,
    Turn,
    extension,
    serve_stdio,
)
from antiphon.runtime import Context
from antiphon.schema import v1, v1_unstable


class Coder(Agent):
    info = ("coder", "1.0")
    capabilities = Capabilities(image=True, embedded_context=True)

    async def new_session(
        self, params: v1_unstable.NewSessionRequest, ctx: Context
    ) -> v1.NewSessionResponse:
        if not params.cwd:
            raise RequestError.of(-32602, "cwd")
        return v1.NewSessionResponse(session_id="s1")

    # The stable type is wider than what is given, and so a handler may name it.
    async def set_session_mode(
        self, params: v1.SetSessionModeRequest, ctx: Context
    ) -> v1.SetSessionModeResponse:
        return v1.SetSessionModeResponse()

    # Nothing is required in the answer, so none need be made; and ctx says whose it is.
    async def close_session(self, params: v1.CloseSessionRequest, ctx: AgentContext) -> None:
        ctx.session().cancel()

    # Answered later, by whoever has the reply, and its result type is that of the method.
    async def list_sessions(
        self, params: v1.ListSessionsRequest, ctx: AgentContext
    ) -> v1.ListSessionsResponse:
        reply: Reply = ctx.defer()
        reply.on_cancel(lambda: print(reply.fail(RequestError.of(-32800, "stopped"))))
        return DEFERRED

    async def prompt(self, turn: Turn) -> v1.PromptResponse | None:
        await turn.think("first look")
        await turn.plan([("read", "in_progress", "high")])
        text = await turn.read_text_file("/a.py", line=1, limit=10)
        async with turn.tool("Edit a.py", kind="edit", locations=["/a.py"]) as tool:
            answer = await turn.ask_permission(tool)
            if answer.allowed:
                await turn.write_text_file("/a.py", text.upper())
        async with turn.run("pytest", ["-q"]) as terminal:
            status = await terminal.wait()
            if status.exit_code == 0:
                return v1.PromptResponse(stop_reason="end_turn")
        await turn.say("done")
        return None

    @extension("_vendor/ping")
    async def ping(self, params: object, ctx: Context) -> object:
        return params


class Short(Agent):
    async def prompt(self, turn: Turn) -> str:
        return "refusal" if "?" in turn.text else "end_turn"


def watch(event: TelemetryEvent) -> None:
    print(event.kind, event.name, event.facts)


if __name__ == "__main__":
    serve_stdio(Coder(), telemetry=watch)
