"""Handlers of the wrong type, one a class; a line that must be reported ends with `wrong`."""

from __future__ import annotations

from antiphon import Agent, Client, Turn
from antiphon.runtime import Context
from antiphon.schema import v1, v1_unstable


class WrongParameter(Agent):
    async def logout(self, params: str, ctx: Context) -> v1.LogoutResponse:  # wrong
        return v1.LogoutResponse()


class WrongResult(Agent):
    async def new_session(  # wrong
        self, params: v1_unstable.NewSessionRequest, ctx: Context
    ) -> str:
        return "session"


class NotAsync(Agent):
    def load_session(  # wrong
        self, params: v1_unstable.LoadSessionRequest, ctx: Context
    ) -> v1.LoadSessionResponse:
        return v1.LoadSessionResponse()


class FieldsAsArguments(Agent):
    async def prompt(  # wrong
        self, turn: Turn, session_id: str
    ) -> None:
        await turn.say(session_id)


class WrongStop(Agent):
    async def prompt(  # wrong
        self, turn: Turn
    ) -> int:
        return 0


class WrongClient(Client):
    async def read_text_file(  # wrong
        self, params: v1_unstable.ReadTextFileRequest, ctx: Context
    ) -> str:
        return params.path
