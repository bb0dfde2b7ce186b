"""What the documentation says is so: its code runs, its tables and trees are the library's.

A block of Python is a program where its first line is a comment with a file name, else a fragment.
Programs of a page stand together in one folder, and so do files of TOML that are named in that way. ` ```python run ` and ` ```sh run ` are carried out,
and print what the `text` block right after them says. All Python is type-checked, strictly.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from antiphon import Durability, Limits, Reattach, _errors, content
from antiphon._process import TAIL_BYTES
from antiphon._serving import MAX_CONNECTIONS
from antiphon.journal import SqliteJournal, _attach, _sqlite_thread, _tails, _writer
from antiphon.journal._issuer import ARCHIVAL_TTL, DEFAULT_TTL
from antiphon.services._confine import MAX_LINKS, MAX_STEPS
from antiphon.services._files import HELD, READ_BYTES
from antiphon.services._terminals import IN_ALL, OUTPUT_BYTES, TERMINALS
from antiphon.transports._socket import CONNECT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
BOUND = 60.0


class Block(NamedTuple):
    """A fenced block."""

    language: str
    run: bool
    text: str
    line: int
    printed: str | None  # by the block right after it

    @property
    def name(self) -> str | None:
        """The file that it is, by the comment in its first line."""
        found = re.match(r"# (\w+\.(?:py|toml))\n", self.text)
        return found and found[1]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    # The closing fence takes what stands until the next opening one only if that is nothing.
    fence = re.compile(
        r"^```(\w*)( run)?\n(.*?)^```$(?=(\n\n```text\n(.*?)^```$)?)", re.MULTILINE | re.DOTALL
    )
    return [
        Block(
            found[1],
            found[2] is not None,
            found[3],
            text.count("\n", 0, found.start()) + 1,
            found[5] if found[4] is not None else None,
        )
        for found in fence.finditer(text)
    ]


def python_blocks() -> Iterator[tuple[Path, Block]]:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                yield page, block


def runnable_pages() -> list[Path]:
    return [page for page in PAGES if any(block.run for block in blocks(page))]


# ---------------------------------------------------------------------- code


@pytest.mark.bound(120)
@pytest.mark.parametrize("page", runnable_pages(), ids=name_of)
def test_the_programs_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page):
        if block.name is not None:
            (tmp_path / block.name).write_text(block.text, encoding="utf-8")
        if not block.run:
            continue
        if block.language == "python":
            assert block.name is not None, f"line {block.line}: a program has a name"
            command = [sys.executable, block.name]
        else:
            command = ["sh", "-e", "-c", block.text]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
        assert done.returncode == 0, f"line {block.line}: {done.stderr}"
        assert done.stdout.rstrip("\n") == str(block.printed).rstrip("\n"), f"line {block.line}"


def test_the_guides_have_programs_that_run() -> None:
    assert {"write-an-agent.md", "write-a-client.md"} <= {page.name for page in runnable_pages()}
    for page in PAGES:
        for block in blocks(page):
            assert not block.run or block.printed is not None, f"{name_of(page)}:{block.line}"


@pytest.mark.bound(240)  # a cold checker on a busy machine
def test_all_python_passes_a_strict_type_checker(tmp_path: Path) -> None:
    places: dict[str, str] = {}
    for page, block in python_blocks():
        folder = tmp_path / name_of(page).replace("/", "_").replace(".", "_")
        folder.mkdir(exist_ok=True)
        if block.name is None:
            # A fragment may use `await`, as in a notebook.
            name, text = f"line_{block.line}.py", as_function(block.text)
        else:
            name, text = f"line_{block.line}_{block.name}", block.text
        (folder / name).write_text(text, encoding="utf-8")
        places[str(folder / name)] = f"{name_of(page)}:{block.line}"
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "include": ["."]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")

    run = subprocess.run(
        [
            *(sys.executable, "-m", "pyright", "--project", str(tmp_path)),
            *("--outputjson", "--pythonpath", sys.executable),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )

    assert run.returncode in {0, 1}, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["summary"]["filesAnalyzed"] >= len(places) > 10
    assert [
        f"{places[report['file']]} + {report['range']['start']['line']}: {report['message']}"
        for report in found["generalDiagnostics"]
    ] == []


def as_function(fragment: str) -> str:
    """A fragment that uses `await` outside of a function, for a checker."""
    code = compile(fragment, "fragment", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        return fragment
    body = textwrap.indent(fragment, "    ")
    return f"async def _fragment() -> None:\n{body}\n\nused = _fragment\n"


# ---------------------------------------------------------------------- links, tables, trees


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_every_page_is_in_the_index_or_in_one_that_is() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index)}

    for page in DOCS.rglob("*.md"):
        assert page in {*linked, DOCS / "README.md"} or page.parent / "README.md" in linked, page


def tables(page: Path) -> list[list[list[str]]]:
    """Each table's rows, without its heading."""
    found: list[list[list[str]]] = []
    for table in re.findall(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
        found.append([row for row in rows[2:] if row != [""]])
    return found


def quantity(value: float | None, unit: str) -> str:
    """As the tables write it."""
    if value is None:
        return "none"
    if unit == "bytes":
        size, name = (value / (1 << 20), "MiB") if value >= 1 << 20 else (value / 1024, "KiB")
        return f"{size:g} {name}"
    return f"{value:g} {unit}".strip()


def test_the_limits_are_those_of_the_library() -> None:
    listed, elsewhere = tables(DOCS / "reference" / "limits.md")
    defaults = {
        name: getattr(Limits(), name)
        for name in Limits.__struct_fields__  # in their order
    }

    assert [row[0] for row in listed] == [f"`{name}`" for name in defaults]
    for row, (name, value) in zip(listed, defaults.items(), strict=True):
        unit = "bytes" if name.endswith("bytes") else "s" if isinstance(value, float) else ""
        assert row[1] == quantity(value, unit), name
        takes_none = "None" in str(Limits.__annotations__[name])
        assert ("`None`" in row[2]) == takes_none, name
    durable = inspect.signature(Durability).parameters
    gather = inspect.signature(SqliteJournal).parameters["gather"].default
    assert durable["credit"].default == _tails.CREDIT
    # ProcessTransport's are defaults of its arguments, and have no constant.
    assert [row[1] for row in elsewhere[1:]] == [
        quantity(TAIL_BYTES, "bytes"),
        quantity(READ_BYTES, "bytes"),
        str(HELD),
        str(MAX_LINKS),
        str(MAX_STEPS),
        quantity(OUTPUT_BYTES, "bytes"),
        str(TERMINALS),
        str(IN_ALL),
        "no bound",  # Terminals.life
        quantity(content.MAX_BYTES, "bytes"),
        str(MAX_CONNECTIONS),
        quantity(CONNECT_TIMEOUT, "s"),
        str(_tails.CREDIT),
        f"{_writer._ENTRIES} or {quantity(_writer._BYTES, 'bytes')}",
        quantity(durable["policy_timeout"].default, "s"),
        str(_attach._HANGING),
        quantity(gather * 1000, "ms"),
        quantity(_sqlite_thread.BUSY, "s"),
        quantity(_sqlite_thread.LOG_BYTES, "bytes"),
        f"{Reattach().attempts}, in {quantity(Reattach().deadline, 's')}",
        f"{quantity(DEFAULT_TTL, 's')}; {ARCHIVAL_TTL // 86400} days",
    ]


def drawn(text: str) -> dict[str, tuple[str, str]]:
    """Of a tree drawn with lines: each name's parent and remark, in order."""
    found: dict[str, tuple[str, str]] = {}
    above: dict[int, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([│├└─\s]*)([A-Z]\w+)\s*(.*)", line)
        assert match is not None, line
        depth = len(match[1]) // 4
        above[depth] = match[2]
        found[match[2]] = (above.get(depth - 1, ""), match[3])
    return found


def test_the_errors_are_those_of_the_library() -> None:
    page = DOCS / "reference" / "errors.md"
    tree = next(block.text for block in blocks(page) if block.language == "text")
    kinds = [getattr(_errors, name) for name in _errors.__all__]

    assert {name: parent for name, (parent, _) in drawn(tree).items()} == {
        kind.__name__: "" if kind is _errors.AntiphonError else parent_of(kind) for kind in kinds
    }
    for name, (parent, remark) in drawn(tree).items():
        if parent == "RequestError":
            assert int(remark) == getattr(_errors, name).CODE
    # The tree in the source is the same, so that a change there is seen here.
    assert textwrap.indent(tree, "    ") in str(_errors.__doc__)


def parent_of(kind: type[Exception]) -> str:
    """The nearest public ancestor."""
    return next(base.__name__ for base in kind.__mro__[1:] if base.__name__ in _errors.__all__)


def test_each_error_has_its_advice() -> None:
    (advice,) = tables(DOCS / "reference" / "errors.md")
    advised = set(re.findall(r"`(\w+)`", "".join(row[0] for row in advice)))

    # The named codes are in the tree, and are caught as `RequestError`.
    codes = {
        name for name in _errors.__all__ if issubclass(getattr(_errors, name), _errors.RequestError)
    }
    assert advised | codes | {"AntiphonError"} == set(_errors.__all__)
    for row in advice:
        kind = getattr(_errors, re.findall(r"\w+", row[0])[0])
        for fact in re.findall(r"`(\w+)`", row[1]):
            assert f"self.{fact} =" in source_of(kind), (kind, fact)


LENDING = DOCS / "guides" / "lending-files-and-terminals.md"


def test_what_is_held_is_held_by_tests_that_exist() -> None:
    text = LENDING.read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
    }

    assert len(named) > 15
    assert named <= written


def test_the_reasons_that_an_agent_is_given_are_those_of_the_services() -> None:
    rows = next(
        table for table in tables(LENDING) if any("`path_traversal`" in row for row in table)
    )
    listed = [(int(row[0]), row[1].strip("`")) for row in rows if row[1]]

    assert len(listed) == len(set(listed))
    assert {reason for _, reason in listed} == {
        reason
        for name in ("_confine", "_context", "_files", "_terminals")
        for reason in reasons_in(ROOT / "src" / "antiphon" / "services" / f"{name}.py")
    }


def reasons_in(path: Path) -> Iterator[str]:
    """What a module can give as `reason`, as literals in its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        given: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Name(id="refusal" | "os_failure"), args=[first, *_]):
                given = first
            case ast.Dict(keys=[ast.Constant(value="reason"), *_], values=[first, *_]):
                given = first
            case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                given = value
            case _:
                continue
        for part in ast.walk(given):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def module_tables() -> dict[str, list[list[str]]]:
    """The rows of the page of names, by module."""
    text = (DOCS / "reference" / "names.md").read_text(encoding="utf-8")
    modules = re.findall(r"^## `([\w.]+)`$", text, re.MULTILINE)
    return dict(zip(modules, tables(DOCS / "reference" / "names.md"), strict=True))


PUBLIC_MODULES = (
    *("antiphon", "antiphon.sync", "antiphon.services", "antiphon.login", "antiphon.content"),
    *("antiphon.journal", "antiphon.transports", "antiphon.testing"),
)


def test_the_modules_on_the_page_of_names_are_the_public_ones() -> None:
    assert tuple(module_tables()) == PUBLIC_MODULES


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_the_names_on_the_page_are_those_of_the_module(module: str) -> None:
    listed = [row[0].strip("`") for row in module_tables()[module]]

    assert sorted(listed) == sorted(import_module(module).__all__)


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_a_name_is_explained_where_the_page_says(module: str) -> None:
    for name, _, where in module_tables()[module]:
        found = getattr(import_module(module), name.strip("`"))
        if where == "its docstring":
            assert inspect.getdoc(found), name
            assert found.__module__.startswith("antiphon."), name  # else the doc is another's
        words = re.findall(r'as "`([^`]+)`"', where)
        for target in re.findall(r"\]\(([^)]+)\)", where):
            page = (DOCS / "reference" / target).read_text(encoding="utf-8")
            word = re.escape(words[0] if words else name.strip("`"))
            assert re.search(rf"(?<!\w){word}(?!\w)", page), (name, target)


def source_of(kind: type) -> str:
    return "".join(
        inspect.getsource(base) for base in kind.__mro__ if base.__module__ == _errors.__name__
    )
