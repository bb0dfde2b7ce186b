"""The bench client on Antiphon."""

import asyncio
import json
import sys
import time
from pathlib import Path

import wire

from antiphon import Client, spawn
from antiphon.schema import v1


class BenchClient(Client):
    async def read_text_file(self, params, ctx):
        return v1.ReadTextFileResponse(content=wire.FILE_TEXT)


def report(updates, seconds, laps):
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = {
        "updates": updates,
        "seconds": seconds,
        "peak_rss_kb": int(status.split("VmHWM:")[1].split()[0]),
    }
    if len(laps) > 1:
        laps.sort()
        line["p50_us"] = laps[len(laps) // 2] * 1e6
        line["p99_us"] = laps[len(laps) * 99 // 100] * 1e6
    print(json.dumps(line), flush=True)


async def main():
    job, command = json.loads(sys.argv[1]), sys.argv[2:]
    prompts = job.get("prompts", 1)
    texts = [json.dumps(job["spec"])]
    if job.get("pad"):
        texts.append(wire.text(job["pad"]))
    laps = []

    async def run(session):
        taken = 0
        for _ in range(prompts):
            begin = time.perf_counter()
            async with session.prompt(texts) as turn:
                async for update in turn:
                    assert update.value is not None  # decoded
                    taken += 1
            laps.append(time.perf_counter() - begin)
        return taken

    async with spawn(command, client=BenchClient(permissions="allow")) as agent:
        sessions = await asyncio.gather(
            *(agent.new_session(cwd="/") for _ in range(job.get("sessions", 1)))
        )
        begin = time.perf_counter()
        if job.get("parallel"):
            updates = sum(await asyncio.gather(*map(run, sessions)))
            laps.clear()
        else:
            updates = sum([await run(session) for session in sessions])
        seconds = time.perf_counter() - begin
    report(updates, seconds, laps)


asyncio.run(main())
