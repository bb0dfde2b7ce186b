# hello.py
import asyncio

from antiphon import spawn


async def main() -> None:
    async with spawn(["python", "echo.py"]) as agent:
        session = await agent.new_session(cwd=".")
        async with session.prompt("hello") as turn:
            async for update in turn:
                print(update.text)
        print(turn.stop_reason)


asyncio.run(main())
