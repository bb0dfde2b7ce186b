"""The bench echo agent on Antiphon."""

import json

import wire

from antiphon import Agent, Turn, serve_stdio
from antiphon.schema import v1

OPTIONS = [
    v1.PermissionOption(option_id="allow", name="Allow", kind="allow_once"),
    v1.PermissionOption(option_id="reject", name="Reject", kind="reject_once"),
]


class BenchAgent(Agent):
    async def prompt(self, turn: Turn) -> None:
        spec = json.loads(turn.blocks[0].text)
        text = wire.text(spec.get("size", 32))
        for _ in range(spec.get("chunks", 0)):
            await turn.say(text)
        for _ in range(spec.get("tool", 0)):
            await turn.send(
                v1.ToolCall(
                    tool_call_id="call_1",
                    title="Edit main.py",
                    kind="edit",
                    status="pending",
                    locations=[v1.ToolCallLocation(path="/src/main.py", line=10)],
                )
            )
            diff = v1.Diff(path="/src/main.py", old_text=wire.TOOL_OLD, new_text=wire.TOOL_NEW)
            await turn.send(
                v1.ToolCallProgress(tool_call_id="call_1", status="completed", content=[diff])
            )
        for _ in range(spec.get("permission", 0)):
            call = v1.ToolCallUpdate(tool_call_id="call_1", title="Edit main.py")
            answer = await turn.ask_permission(call, OPTIONS)
            assert answer.option_id == "allow"
        for _ in range(spec.get("read", 0)):
            assert await turn.read_text_file("/src/main.py")


if __name__ == "__main__":
    serve_stdio(BenchAgent())
