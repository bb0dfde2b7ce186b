"""The command: writes the generated files, or with `--check` says which of them are out of date."""

from __future__ import annotations

import argparse
import difflib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .handlers_module import calls_module, handlers_module
from .notes import load_notes
from .pinned import Refused, load_pin, official_documents
from .reading import Unreadable, read_model
from .types_module import types_module, unstable_module

if TYPE_CHECKING:
    from .model import Model

ROOT = Path(__file__).resolve().parents[2]
STABLE = "schema/v1/schema.json"
UNSTABLE = "schema/v1/schema.unstable.json"
SHOWN_LINES = 40


def load_models(root: Path = ROOT) -> dict[str, Model]:
    """Both models, "v1" and "v1_unstable", from the pinned files. Raises `Refused`, `Unreadable`."""
    schema = root / "src" / "antiphon" / "schema"
    notes = load_notes(schema / "notes.toml")
    documents = official_documents(load_pin(schema / "PINNED.json"), root / ".cache")
    stable = read_model(documents[STABLE], "v1", notes)
    unstable = read_model(
        documents[UNSTABLE], "v1_unstable", notes, stable=frozenset(stable.definitions)
    )
    if lost := set(stable.entries) - set(unstable.entries):
        raise Unreadable(f"the unstable schema has other names for {sorted(lost)}")
    return {"v1": stable, "v1_unstable": unstable}


def generated_files(root: Path = ROOT) -> dict[Path, str]:
    """Path → text of every generated file, formatted. Raises `Refused`, `Unreadable`."""
    package = root / "src" / "antiphon"
    source = load_pin(package / "schema" / "PINNED.json").source
    models = load_models(root)
    stable, unstable = models["v1"], models["v1_unstable"]
    texts = {
        package / "schema" / "v1.py": types_module(stable, source),
        package / "schema" / "v1_unstable.py": unstable_module(unstable, stable, source),
        package / "_handlers.py": handlers_module(unstable, stable, source),
        package / "_calls.py": calls_module(unstable, stable, source),
    }
    return {path: _formatted(text, path, root) for path, text in texts.items()}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; 0 done or up to date, 1 out of date, 2 could not be done."""
    parser = argparse.ArgumentParser(
        prog="generate_schema.py", description="Generate the wire types from the official schema."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is out of date"
    )
    parser.add_argument(
        "--fetch", action="store_true", help="only make sure that the official files are there"
    )
    options = parser.parse_args(arguments)
    try:
        if options.fetch:
            load_models(root)
            return 0
        files = generated_files(root)
    except (Refused, Unreadable, ValueError) as error:
        sys.stderr.write(f"generate_schema.py: {error}\n")
        return 2
    stale = 0
    for path, text in files.items():
        present = path.read_text("utf-8") if path.is_file() else ""
        if present == text:
            continue
        stale += 1
        shown = path.relative_to(root)
        if options.check:
            sys.stderr.write(f"{shown} is out of date; run: python scripts/generate_schema.py\n")
            sys.stderr.writelines(_difference(present, text, str(shown)))
        else:
            path.write_text(text, "utf-8")
            sys.stdout.write(f"wrote {shown}\n")
    return 1 if options.check and stale else 0


def _difference(present: str, text: str, name: str) -> list[str]:
    lines = list(
        difflib.unified_diff(
            present.splitlines(keepends=True),
            text.splitlines(keepends=True),
            f"{name} (present)",
            f"{name} (generated)",
            n=1,
        )
    )
    if len(lines) > SHOWN_LINES:
        lines[SHOWN_LINES:] = [f"… and {len(lines) - SHOWN_LINES} more lines\n"]
    return lines


def _formatted(text: str, path: Path, root: Path) -> str:
    beside = Path(sys.executable).with_name("ruff")
    ruff = str(beside) if beside.is_file() else shutil.which("ruff")
    if ruff is None:
        raise Refused("ruff is needed to format the generated files: python -m pip install ruff")
    # Named, because ruff would find out by looking at the files beside.
    ours = '--config=lint.isort.known-first-party=["antiphon"]'
    for step in (("check", "--fix-only", "--select=I,RUF022", ours), ("format",)):
        done = subprocess.run(
            [ruff, *step, "--quiet", f"--stdin-filename={path}", "-"],
            input=text,
            cwd=root,
            check=False,
            capture_output=True,
            encoding="utf-8",
        )
        if done.returncode:
            raise Refused(f"ruff {step[0]} refuses the text of {path.name}:\n{done.stderr}")
        text = done.stdout
    return text
