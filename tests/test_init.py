"""The door of the package: every public name, and nothing loaded before it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import antiphon

# Loaded by `import antiphon` alone; the standard library's own are not counted.
LIGHT = {"antiphon", "antiphon._version"}
PROMISED = {
    "Agent",
    "Client",
    "Turn",
    "Session",
    "Capabilities",
    "spawn",
    "connect",
    "serve_stdio",
    "run_stdio",
    "__version__",
}


def loaded_by(code: str) -> set[str]:
    """Names of all modules that a fresh interpreter has after `code`."""
    report = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", report], stdin=subprocess.DEVNULL, capture_output=True, check=True
    ).stdout
    return set(json.loads(output))


def test_importing_the_package_loads_nothing_but_its_version() -> None:
    loaded = loaded_by("import antiphon") - loaded_by("")

    assert {name for name in loaded if name.startswith("antiphon")} == LIGHT
    assert not loaded & {"asyncio", "msgspec", "typing_extensions", "logging", "rich"}


@pytest.mark.parametrize("name", ["RequestError", "StartError", "AntiphonError"])
def test_catching_an_exception_loads_no_protocol_version(name: str) -> None:
    loaded = loaded_by(f"from antiphon import {name}")

    assert not {module for module in loaded if module.startswith("antiphon.schema")}
    assert "asyncio" not in loaded


@pytest.mark.parametrize("name", antiphon.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(antiphon, name) is not None


def test_the_promised_names_are_public() -> None:
    assert not PROMISED - set(antiphon.__all__)


def test_every_exception_of_the_library_is_public() -> None:
    from antiphon import _errors

    assert not set(_errors.__all__) - set(antiphon.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    misspelled = "Agnet"

    with pytest.raises(AttributeError, match="'antiphon' has no attribute 'Agnet'"):
        _ = getattr(antiphon, misspelled)


def test_the_names_are_listed_for_completion() -> None:
    assert set(antiphon.__all__) <= set(dir(antiphon))


def test_the_version_is_the_installed_one() -> None:
    assert antiphon.__version__ == version("antiphon")


def test_a_star_import_brings_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from antiphon import *", names)

    assert set(names) - {"__builtins__"} == set(antiphon.__all__)
