"""`tests/` mirrors `src/antiphon/` file by file: a module without its test module cannot hide."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]

# Modules that have no test module of their own, and what tests them instead.
NO_TEST_OF_ITS_OWN: dict[str, str] = {
    "_version.py": "one constant, which test_init.py compares with what is installed",
    "schema/v1.py": "generated: test_oracle.py holds every type of it against the official schema",
}
# Folders that prove something about the whole, and not about one module.
NOT_MIRRORED: dict[str, str] = {
    "bench": "the programs that measure",
    "attacks": "what holds while other processes change everything",
    "cases": "what other agents are tested with",
    "faults": "what went wrong for others",
    "interleavings": "what may happen in any order",
    "interop": "peers that we did not write",
    "invariants": "what holds of a connection, a turn and a delivery",
    "quirks": "what real agents and clients do on the wire",
}
# Test modules of something that is no module.
NO_MODULE_OF_ITS_OWN: dict[str, str] = {
    "sessions/test_delivery_bounds.py": "what delivery costs with a real process at the other end",
    "sessions/test_turn_waiting.py": "two ways in which a consumer waits, against each other",
    "sessions/test_durable_shared.py": "several connections on one session of a durable agent",
    "sessions/test_pairs.py": "the two joined sides that other tests stand on",
    "schema/test_oracle.py": "the generated types, against the official schema",
    "scripts/test_generate_conformance.py": "the generator in scripts/",
    "scripts/test_generate_schema.py": "the generator in scripts/",
    "test_bench_journal.py": "a small run of bench/journal.py",
    "test_conftest_checks.py": "the checks that every test goes through",
    "test_docs.py": "the code, tables and links of the documentation",
    "test_examples.py": "the programs and notebooks of examples/",
    "test_fuzz.py": "the fuzz targets over their corpus, and the machine that runs them",
    "test_layers.py": "the arrows between all modules",
    "test_mirror.py": "this",
    "test_readme.py": "the README's agent and client",
    "test_requirements.py": "the list of requirements, both ways",
    "test_soak.py": "a small run of bench/soak.py",
    "typing/test_typing.py": "what a user's type checker accepts and rejects",
    "zoo/test_zoo.py": "agents that do everything wrong, and what becomes of them",
}


def sources() -> set[str]:
    folder = ROOT / "src" / "antiphon"
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}


def mirrored() -> set[str]:
    folder = ROOT / "tests"
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("test_*.py")
        if path.relative_to(folder).parts[0] not in NOT_MIRRORED
    }


def mirror_of(module: str) -> str:
    path = Path(module)
    return str(path.with_name(f"test_{path.stem.strip('_')}.py"))


def is_door(module: str) -> bool:
    """An `__init__` only passes names on, so its rooms' tests are its tests."""
    return Path(module).name == "__init__.py" and module != "__init__.py"


def test_every_module_has_its_test_module() -> None:
    missing = {
        module
        for module in sources()
        if not is_door(module)
        and module not in NO_TEST_OF_ITS_OWN
        and mirror_of(module) not in mirrored()
    }

    assert not missing


def test_every_test_module_has_its_module() -> None:
    known = {mirror_of(module) for module in sources() if module not in NO_TEST_OF_ITS_OWN}

    assert not mirrored() - known - set(NO_MODULE_OF_ITS_OWN)


def test_no_exception_is_out_of_date() -> None:
    assert not set(NO_TEST_OF_ITS_OWN) - sources()
    assert not {module for module in NO_TEST_OF_ITS_OWN if mirror_of(module) in mirrored()}
    assert not set(NO_MODULE_OF_ITS_OWN) - mirrored()
    assert not {folder for folder in NOT_MIRRORED if not (ROOT / "tests" / folder).is_dir()}
    assert not {folder for folder in NOT_MIRRORED if (ROOT / "src" / "antiphon" / folder).exists()}
