"""Why a program could not be started: command, interpreter and working directory told apart."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import StartError
from antiphon._launch import Pipes, explain, inherit_env, spawn, words_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def failure(
    argv: list[str], *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """What is said when `argv` cannot be started."""
    pipes = Pipes("null", "null", "null")
    with pytest.raises((OSError, ValueError)) as caught:
        spawn(argv, cwd, env, pipes)
    return explain(caught.value, argv, cwd, env)


def script(folder: Path, text: str, *, mode: int = 0o755) -> str:
    path = folder / "agent"
    path.write_bytes(text.encode())
    path.chmod(mode)
    return str(path)


def test_a_bare_name_that_is_not_on_the_path_says_so() -> None:
    assert failure(["no-such-agent"]) == "the command 'no-such-agent' was not found on PATH"


def test_the_path_of_the_given_environment_counts(tmp_path: Path) -> None:
    script(tmp_path, "#!/bin/sh\n")

    said = failure(["agent"], env={"PATH": "/nowhere"})

    assert said == "the command 'agent' was not found on PATH"


def test_a_path_that_does_not_exist_says_so() -> None:
    assert failure(["./no/agent"]) == "the command './no/agent' does not exist"


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path) -> None:
    path = script(tmp_path, "echo\n", mode=0o644)

    assert failure(["./agent"], cwd=tmp_path) == f"the command {path!r} is not executable"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_file_that_is_not_executable_says_so(tmp_path: Path, by_name: bool) -> None:
    path = script(tmp_path, "#!/bin/sh\n", mode=0o644)
    argv, env = (["agent"], {"PATH": str(tmp_path)}) if by_name else ([path], None)

    assert failure(argv, env=env) == f"the command {path!r} is not executable"


def test_a_directory_is_no_command(tmp_path: Path) -> None:
    assert failure([str(tmp_path)]) == f"the command {str(tmp_path)!r} is a directory"


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/no/such/python -u\n")

    assert failure([path]) == (
        f"the interpreter '/no/such/python' of the script {path!r} cannot be run: "
        "No such file or directory"
    )


def test_a_script_with_crlf_line_ends_shows_the_name_that_was_looked_for(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\r\necho\r\n")

    assert "the interpreter '/bin/sh\\r' of the script" in failure([path])


def test_an_interpreter_that_is_not_executable_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").touch(mode=0o644)
    path = script(tmp_path, f"#!{tmp_path}/python\n")

    assert failure([path]) == (
        f"the interpreter '{tmp_path}/python' of the script {path!r} cannot be run: "
        "Permission denied"
    )


def test_a_script_with_an_empty_first_line_says_so(tmp_path: Path) -> None:
    path = script(tmp_path, "#!\n")

    assert failure([path]) == f"the script {path!r} names no interpreter after its #!"


def test_a_text_file_without_an_interpreter_is_no_program(tmp_path: Path) -> None:
    path = script(tmp_path, "echo hello\n")

    said = failure([path])

    assert said == f"the command {path!r} is neither a program for this system nor a script"


def test_a_program_without_its_loader_says_so(tmp_path: Path) -> None:
    path = script(tmp_path, "\x7fELF")

    said = explain(FileNotFoundError(errno.ENOENT, "No such file"), [path], None, None)

    assert said == f"the command {path!r} exists, but a loader or library it names does not"


def test_a_missing_working_directory_is_not_a_missing_command(tmp_path: Path) -> None:
    missing = tmp_path / "gone"

    assert failure(["sh"], cwd=missing) == f"the working directory {str(missing)!r} does not exist"
    assert "gone/below' does not exist" in failure(["no-such-agent"], cwd=missing / "below")


def test_a_file_is_no_working_directory(tmp_path: Path) -> None:
    path = script(tmp_path, "")

    assert failure(["sh"], cwd=path) == f"the working directory {path!r} is not a directory"
    assert "does not exist" in failure(["sh"], cwd=Path(path) / "below")


@pytest.mark.parametrize("below", ["", "below"])
def test_a_working_directory_that_may_not_be_entered_says_so(
    tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def access(path: Any, mode: int) -> bool:
        return False

    def stat(self: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Root may enter everything, so the system's answers are played.
    monkeypatch.setattr(os, "access", access)
    if below:
        monkeypatch.setattr(Path, "stat", stat)

    said = explain(PermissionError(errno.EACCES, "Permission denied"), ["sh"], tmp_path, None)

    assert (
        said.lower()
        == f"the working directory {str(tmp_path)!r} cannot be entered: permission denied"
    )


@pytest.mark.parametrize("argv", [["a\0b"], ["sh", "a\0b"]])
def test_a_word_with_a_null_byte_is_refused(argv: list[str]) -> None:
    assert failure(argv) == f"cannot start {argv[0]!r}: embedded null byte"


def test_an_odd_environment_is_refused() -> None:
    assert failure(["sh"], env={"A=B": "c"}) == (
        "cannot start 'sh': illegal environment variable name"
    )


def test_an_argument_list_that_is_too_long_says_so() -> None:
    assert failure(["sh", "x" * (1 << 22)]) == "cannot start 'sh': Argument list too long"


def test_other_permissions_of_a_program_are_the_systems_word(tmp_path: Path) -> None:
    path = script(tmp_path, "\x7fELF")

    said = explain(PermissionError(errno.EACCES, "Permission denied"), [path], None, None)

    assert said == f"cannot start {path!r}: Permission denied"


def test_a_command_line_in_one_string_is_a_mistake_that_is_explained() -> None:
    with pytest.raises(TypeError, match=r"shlex\.split"):
        words_of("python agent.py")


@pytest.mark.parametrize("argv", [[], [""]])
def test_no_command_is_a_start_error(argv: list[str]) -> None:
    with pytest.raises(StartError, match="no command was given"):
        words_of(argv)


def test_paths_are_words(tmp_path: Path) -> None:
    assert words_of([tmp_path, "x"]) == [str(tmp_path), "x"]


def test_pipes_that_run_out_of_descriptors_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.pipe
    made: list[int] = []

    def pipe() -> tuple[int, int]:
        if len(made) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(1)
        return real()

    monkeypatch.setattr(os, "pipe", pipe)

    with pytest.raises(OSError, match="Too many open files"):
        Pipes("pipe", "pipe", "pipe")


def test_a_started_program_leads_a_session_of_its_own() -> None:
    pipes = Pipes("null", "pipe", "stdout")
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgrp())"
    process = spawn([sys.executable, "-SEc", code], None, None, pipes)
    pipes.close_theirs()
    try:
        assert process.wait(10) == 0
        assert os.read(pipes.our_stdout, 100) == b"True\n"
    finally:
        pipes.close_ours()


def test_on_windows_a_group_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def popen(words: list[str], **options: Any) -> None:
        asked.update(options)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    monkeypatch.setattr(subprocess, "Popen", popen)

    spawn(["agent.exe"], None, None, Pipes("null", "null", "inherit"))

    assert asked["creationflags"] == 0x200
    assert asked["start_new_session"] is False
    assert asked["stdin"] == subprocess.DEVNULL
    assert asked["stderr"] is None


@pytest.mark.covers("FF-41")
def test_an_inherited_environment_has_what_programs_need_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_X", "1")
    monkeypatch.setenv("WANTED", "2")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("TZ", raising=False)

    env = inherit_env("WANTED", "UNSET_ANYWHERE", LANG="C.UTF-8")

    assert env["PATH"] == os.environ["PATH"]
    assert env["HOME"] == "/home/somebody"
    assert env["WANTED"] == "2"
    assert env["LANG"] == "C.UTF-8"
    assert not {"SECRET_X", "UNSET_ANYWHERE", "TZ"} & set(env)
