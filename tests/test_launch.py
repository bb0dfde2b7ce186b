"""Why a program could not be started: command, interpreter and working directory told apart."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import StartError
from antiphon._launch import (
    ESSENTIAL,
    Pipes,
    batch_line,
    environment,
    explain,
    find_on_windows,
    inherit_env,
    redact,
    spawn,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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


def test_a_path_is_shown_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, "echo\n", mode=0o644)
    monkeypatch.chdir(tmp_path)

    assert failure(["./agent"]) == "the command './agent' is not executable"
    assert failure([f"{tmp_path}/./agent"], cwd="/") == (
        f"the command '{tmp_path}/./agent' is not executable"
    )
    Path(path).chmod(0o755)
    assert failure(["./agent"]) == (
        "the command './agent' is neither a program for this system nor a script"
    )


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


# ---------------------------------------------------------------------- environment


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


@pytest.mark.covers("FF-41")
def test_a_star_stands_for_all_names_that_begin_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_AUTHOR", "GITHUB_TOKEN", "XGIT_"):
        monkeypatch.setenv(name, "1")

    env = inherit_env("GIT_*", "NOTHING_BEGINS_SO_*", GIT_DIR="2")

    assert env["GIT_AUTHOR"] == "1"
    assert env["GIT_DIR"] == "2"  # what is given goes over what is inherited
    assert not {"GITHUB_TOKEN", "XGIT_"} & set(env)
    assert set(inherit_env("*")) == set(os.environ)


@pytest.mark.parametrize("name", ["GIT_*_DIR", "*_DIR", "G**"])
def test_a_star_elsewhere_is_a_mistake(name: str) -> None:
    with pytest.raises(ValueError, match="a \\* stands at the end of a name"):
        inherit_env(name)


@pytest.mark.covers("FF-41")
@pytest.mark.parametrize("name", ["", "A=B", "=", "A\0"])
def test_a_name_that_no_variable_can_have_is_refused_everywhere(name: str) -> None:
    said = f"an environment variable cannot be called {name!r}"
    ways: list[Callable[[], object]] = [
        lambda: environment({"PATH": "/bin", name: "secret"}),
        lambda: inherit_env(name),
        lambda: inherit_env(**{name: "secret"}),
    ]
    for refused in ways:
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            refused()
        assert "secret" not in str(caught.value)


def test_a_value_with_a_nul_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="'A' has a NUL in its value") as caught:
        environment({"A": "secret\0"})

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("odd", [{"A": 1}, {"A": b"x"}, {1: "x"}, {b"A": "x"}])
def test_what_is_no_string_is_a_mistake_of_type(odd: Any) -> None:
    with pytest.raises(TypeError, match="no string"):
        environment(odd)


@pytest.mark.covers("FF-41")
def test_a_policy_is_a_word_or_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_X", "1")

    assert environment(None) is environment("inherit") is None
    assert environment("essential") == inherit_env()
    assert environment({"A": "1"}) == {**inherit_env(), "A": "1"}
    assert environment({}) == inherit_env()
    with pytest.raises(ValueError, match="not 'inherits'"):
        environment("inherits")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("odd", [5, ["TOKEN=secret"], {"TOKEN"}, b"inherit", object()])
def test_an_environment_of_another_type_is_refused_with_what_it_may_be(odd: Any) -> None:
    with pytest.raises(TypeError, match='env is None, "inherit", "essential" or a mapping') as told:
        environment(odd)

    assert type(odd).__name__ in str(told.value)
    assert "TOKEN" not in str(told.value)


def test_a_mapping_is_copied() -> None:
    given = {"A": "1"}
    taken = environment(given)
    given["A"] = "2"

    assert taken is not None
    assert taken["A"] == "1"


@pytest.mark.covers("FF-41")
def test_a_mapping_adds_to_what_programs_need_and_takes_away_what_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PATH", "HOME", "SYSTEMROOT", "SECRET_X"):
        monkeypatch.setenv(name, f"ours {name}")

    env = environment({"A": "1", "HOME": "/h", "TERM": None, "NOBODYS": None})

    assert env is not None
    assert (env["A"], env["HOME"], env["PATH"]) == ("1", "/h", "ours PATH")
    assert env["SYSTEMROOT"] == "ours SYSTEMROOT"
    assert not {"SECRET_X", "TERM", "NOBODYS"} & set(env)
    nothing = environment(dict.fromkeys(ESSENTIAL))
    assert nothing == {}


def test_on_windows_names_that_differ_in_case_only_are_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twice = {"Path": "a", "OTHER": "", "PATH": "b"}
    assert environment(twice) == {**inherit_env(), **twice}
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(ValueError, match="'Path' and 'PATH' are one on Windows"):
        environment(twice)
    given = environment({"Path": "a", "home": None})
    assert given is not None
    assert given["Path"] == "a"
    assert not {"PATH", "HOME"} & set(given)


# ---------------------------------------------------------------------- Windows


@pytest.fixture
def popen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Popen is asked for on Windows."""
    asked: dict[str, Any] = {}

    def popen(command: str | list[str], **options: Any) -> None:
        asked.update(options, command=command)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    monkeypatch.setattr(subprocess, "Popen", popen)
    return asked


def test_on_windows_a_group_is_asked_for(popen: dict[str, Any]) -> None:
    spawn(["agent.exe"], None, None, Pipes("null", "null", "inherit"))

    assert popen["command"] == ["agent.exe"]  # not found: the system may say so
    assert popen["executable"] is None
    assert popen["creationflags"] == 0x200
    assert popen["start_new_session"] is False
    assert popen["stdin"] == subprocess.DEVNULL
    assert popen["stderr"] is None


@pytest.mark.covers("FF-41")
def test_on_windows_a_batch_file_is_found_by_its_bare_name_and_run_by_the_shell(
    tmp_path: Path, popen: dict[str, Any]
) -> None:
    (tmp_path / "npx.CMD").touch()
    env = {"Path": str(tmp_path), "ComSpec": r"C:\Windows\cmd.exe", "PathExt": ".EXE;.CMD"}

    spawn(["npx", "-y", "my agent", 'say "hi" & del %X%'], None, env, Pipes("null", "null", "null"))

    assert popen["executable"] == r"C:\Windows\cmd.exe"
    assert popen["command"] == (
        r'"C:\Windows\cmd.exe" /d /e:ON /v:OFF /s /c '
        f'""{tmp_path}/npx.CMD" "-y" "my agent" '
        '"say ""hi"" & del %%cd:~,%X%%cd:~,%""'
    )


def test_on_windows_a_program_is_found_by_its_bare_name_and_run_itself(
    tmp_path: Path, popen: dict[str, Any]
) -> None:
    for name in ("agent.EXE", "agent.CMD"):
        (tmp_path / name).touch()
    env = {"PATH": f"/nowhere{os.pathsep}{os.pathsep}{tmp_path}"}

    spawn(["agent", r"C:\a folder\x"], None, env, Pipes("null", "null", "null"))

    assert popen["command"] == [f"{tmp_path}/agent.EXE", r"C:\a folder\x"]
    assert popen["executable"] is None


def test_on_windows_a_name_with_its_ending_and_a_path_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool.cmd").touch()
    (tmp_path / "tool.cmd.EXE").touch()
    (tmp_path / "script.CMD").touch()
    on_path, elsewhere = {"PATH": str(tmp_path)}, {"PATH": "/nowhere"}

    assert find_on_windows("tool.cmd", on_path) == f"{tmp_path}/tool.cmd"
    assert find_on_windows(f"{tmp_path}/script", elsewhere) == f"{tmp_path}/script.CMD"
    assert find_on_windows("./script", elsewhere) == "./script.CMD"
    # What lies in the current folder is not a command by that.
    assert find_on_windows("script", elsewhere) is None
    assert find_on_windows("script", {}) is None


def test_on_windows_our_own_variables_count_where_none_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.Xyz").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PATHEXT", ".Xyz")

    assert find_on_windows("agent", None) == f"{tmp_path}/agent.Xyz"


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("", '""'),
        ("plain", '"plain"'),
        (r"a\b", r'"a\b"'),
        ("a\\", '"a\\\\"'),
        ('"', '""""'),
        ('a\\"b', '"a\\\\""b"'),
        ("100%", '"100%%cd:~,%"'),
        ("^&|<>()!", '"^&|<>()!"'),
    ],
)
def test_a_word_for_a_batch_file_is_quoted_so_that_it_stays_a_word(word: str, quoted: str) -> None:
    assert batch_line("cmd.exe", ["x.cmd", word]).endswith(f'/s /c ""x.cmd" {quoted}"')


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\0b"])
def test_what_no_quoting_keeps_in_a_batch_file_is_refused(
    word: str, tmp_path: Path, popen: dict[str, Any]
) -> None:
    (tmp_path / "x.CMD").touch()
    env = {"PATH": str(tmp_path)}
    with pytest.raises(ValueError, match="no line break or NUL") as caught:
        spawn(["x", word], None, env, Pipes("null", "null", "null"))

    assert explain(caught.value, ["x", word], None, env) == (
        "cannot start 'x': a batch file takes no line break or NUL in an argument"
    )


@pytest.mark.covers("FF-39")
@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_API_KEY",
        "APIKEY",
        "GH_TOKEN",
        "token",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "A_PAT",
    ],
)
def test_values_of_secrets_are_left_out_of_what_errors_quote(name: str) -> None:
    env = {name: "sk-12345678", "PATH": "/usr/bin:/bin"}

    assert redact("bad key sk-12345678, sk-12345678!", env) == f"bad key [{name}], [{name}]!"


@pytest.mark.parametrize("name", ["PATH", "HOME", "KEYBOARD", "MONKEY", "PASSAGE", "TOKENIZERS"])
def test_values_of_other_variables_stay(name: str) -> None:
    assert redact("no /usr/bin:/bin there", {name: "/usr/bin:/bin"}) == "no /usr/bin:/bin there"


def test_a_short_secret_would_tear_words_apart_and_stays() -> None:
    assert redact("no token given", {"THE_TOKEN": "token"}) == "no token given"


def test_a_secret_that_holds_another_is_left_out_whole() -> None:
    env = {"A_KEY": "12345678", "B_KEY": "12345678-and-more"}

    assert redact("12345678-and-more, 12345678", env) == "[B_KEY], [A_KEY]"


def test_our_own_secrets_count_where_a_program_inherits_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANTIPHON_TEST_TOKEN", "very-secret")

    assert redact("very-secret", None) == "[ANTIPHON_TEST_TOKEN]"
    assert redact("very-secret", {}) == "very-secret"
