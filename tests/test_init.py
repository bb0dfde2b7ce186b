"""The front door: what `import antiphon` loads, and that every public name has a home."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

import antiphon

SOURCE = Path(antiphon.__file__)


#: Every module that has names for users.
DOORS = [
    "antiphon",
    *("antiphon.content", "antiphon.login", "antiphon.sync"),
    *(f"antiphon.{path.parent.name}" for path in sorted(SOURCE.parent.glob("*/__init__.py"))),
    *("antiphon.schema.v1", "antiphon.schema.v1_unstable"),
]


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    code += "; import sys, json; print(json.dumps(sorted(sys.modules)))"
    # -I and -S: neither the environment nor what is installed beside us loads anything.
    path = f"import sys; sys.path[:0] = {[str(SOURCE.parents[1])]!r}; "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", path + code], capture_output=True, check=True, timeout=20
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_no_protocol_and_no_machinery() -> None:
    added = loaded_by("import antiphon") - loaded_by("import importlib")

    assert {name for name in added if name.split(".")[0] == "antiphon"} == {
        "antiphon",
        "antiphon._version",
    }
    assert not added & {"asyncio", "msgspec", "logging", "dataclasses", "subprocess", "socket"}


def test_the_import_s_own_report_names_no_protocol_version() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import antiphon"],
        capture_output=True,
        check=True,
        text=True,
        timeout=20,
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}

    assert "antiphon" in imported
    assert not {name for name in imported if name.startswith(("antiphon.schema", "asyncio"))}


def test_the_version_is_the_one_that_is_installed() -> None:
    assert antiphon.__version__ == importlib.metadata.version("antiphon")


def test_help_has_the_signature_of_every_class_of_the_services() -> None:
    services = import_module("antiphon.services")
    for name in services.__all__:
        if isinstance(getattr(services, name), type):
            # Of a struct it is made from the types of its fields, which have to be there then.
            assert inspect.signature(getattr(services, name)), name
    assert "auth_methods" in inspect.signature(antiphon.Capabilities).parameters


def test_an_error_can_be_named_without_loading_the_protocol() -> None:
    added = loaded_by("from antiphon import RequestError")

    assert "antiphon._errors" in added
    assert not {name for name in added if name.startswith("antiphon.schema")}


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in antiphon.__all__:
        assert getattr(antiphon, name) is not None, name
    assert dir(antiphon) == sorted(antiphon.__all__)


def test_a_name_comes_from_the_home_it_is_said_to_have() -> None:
    from antiphon import _errors

    for name in antiphon.__all__:
        if name == "__version__":
            continue
        home = import_module(f"antiphon.{antiphon._HOMES.get(name, '_errors')}")
        assert name in home.__all__, f"{name} is not public in {home.__name__}"
        assert getattr(home, name) is getattr(antiphon, name)
    assert set(_errors.__all__) <= set(antiphon.__all__)
    assert set(antiphon._HOMES) <= set(antiphon.__all__)


def test_a_type_checker_sees_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        told.update({alias.name: str(node.module) for alias in node.names})
    homes = {
        name: f"antiphon.{antiphon._HOMES.get(name, '_errors')}"
        for name in antiphon.__all__
        if name != "__version__"
    }

    assert told == homes


def test_a_name_that_is_not_there_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Agnet'"):
        getattr(antiphon, "Agnet")  # noqa: B009  (a type checker knows it, too)
    with pytest.raises(ImportError, match="Agnet"):
        exec("from antiphon import Agnet", {})


def test_everything_can_be_imported_at_once() -> None:
    names: dict[str, object] = {}
    exec("from antiphon import *", names)

    assert set(antiphon.__all__) - {"__version__"} <= set(names)


def structs_of(door: str) -> list[type[Any]]:
    """The structs and dataclasses among a door's public names."""
    module = import_module(door)
    named: list[Any] = [getattr(module, name) for name in module.__all__]
    classes = [kind for kind in named if inspect.isclass(kind)]
    return [kind for kind in classes if issubclass(kind, msgspec.Struct) or is_dataclass(kind)]


@pytest.mark.parametrize("door", DOORS)
def test_what_the_members_of_a_struct_are_can_be_asked_at_run_time(door: str) -> None:
    """By msgspec itself, and by whatever makes forms, settings or documents of a class."""
    for kind in structs_of(door):
        hints = get_type_hints(kind, include_extras=True)
        assert inspect.signature(kind), kind  # of a struct it is made from them

        if issubclass(kind, msgspec.Struct):
            assert {*kind.__struct_fields__} <= {*hints}, kind
            assert {f.name for f in msgspec.structs.fields(kind)} == {*kind.__struct_fields__}
        else:
            assert {field.name for field in fields(kind)} <= {*hints}, kind
