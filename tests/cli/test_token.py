"""`antiphon token`, as it is typed: keys, tokens, verdicts, and secrets that are not shown."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from antiphon.cli import main
from antiphon.journal import Issuer, Keyring, unverified_claims
from tests.cli.command import COMMAND, antiphon, environment
from tests.cli.screen import Screen
from tests.journal.tokens import (
    CLAIMS,
    ENDS,
    NOW,
    OTHER_SEED,
    PUBLIC,
    SEED,
    SESSION,
    TOKEN,
    signed,
    with_claims,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., "Ran"]

KEY = f"k1={PUBLIC.hex()}"


class Ran(NamedTuple):
    """What came of one run in this process."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found


@pytest.fixture
def token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `antiphon token …` with something on its standard input."""

    def run(*arguments: str, stdin: str | bytes = b"") -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["token", *arguments])
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


@pytest.fixture
def seed_file(tmp_path: Path) -> str:
    path = tmp_path / "k1.seed"
    path.touch(0o600)
    path.write_text(f"{SEED.hex()}\n")
    return str(path)


def mint(seed_file: str, *more: str) -> list[str]:
    return ["mint", "--seed-file", seed_file, "--session", SESSION, "--actor", "alice", *more]


# ------------------------------------------------------------------ keygen


def test_a_key_is_made_kept_and_used(token: Run, tmp_path: Path) -> None:
    seed, public = tmp_path / "k1.seed", tmp_path / "keys" / "k1.pub"
    public.parent.mkdir()

    made = token("keygen", str(seed), "--kid", "k1", "--public", str(public))

    assert made.code == 0
    assert made.out == f"k1={public.read_text()}"
    assert Issuer(seed, kid="k1").public_key.hex() == public.read_text().strip()
    assert seed.read_text().strip() not in made.out + made.err
    assert str(seed) in made.err
    minted = token(*mint(str(seed), "--kid", "k1"))
    for keys in (
        ("--key", made.out.strip()),
        ("--key", f"k1={public}"),
        ("--keyring", str(public.parent)),
    ):
        assert token("verify", "--session", SESSION, *keys, stdin=minted.out).code == 0


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_seed_is_its_owners_alone_from_the_first_byte(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "seed"
    done = subprocess.run(
        ["sh", "-c", f'umask {umask:03o}; exec "$@"', "sh", *COMMAND, "token", "keygen", str(path)],
        env=environment(),
        capture_output=True,
        timeout=20,
    )

    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_without_a_name_is_named_by_its_digits(token: Run, tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    made = token("keygen", str(seed), "--json")

    assert made.line == {
        "type": "key",
        "kid": made.line["public"][:8],
        "public": Issuer(seed, kid="x").public_key.hex(),
        "file": str(seed),
    }
    minted = token(*mint(str(seed), "--json"))
    assert minted.line["kid"] == made.line["kid"]


def test_nothing_is_overwritten(token: Run, tmp_path: Path) -> None:
    there, link, public = tmp_path / "there", tmp_path / "link", tmp_path / "k.pub"
    there.write_text("precious")
    link.symlink_to(tmp_path / "elsewhere")
    for path in (there, link, tmp_path):
        refused = token("keygen", str(path), "--public", str(public))
        assert refused.code == 1
        assert refused.out == ""
        assert "not overwritten" in refused.err
        assert not public.exists(), "half a key is none"
    refused = token("keygen", str(tmp_path / "new"), "--public", str(there), "--json")
    assert refused.line["failure"] == "not_written"
    assert there.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


def test_a_place_that_is_none_is_said(token: Run, tmp_path: Path) -> None:
    refused = token("keygen", str(tmp_path / "no" / "seed"))

    assert refused.code == 1
    assert "No such file" in refused.err


@pytest.mark.parametrize("kid", ["", "\udcff"])
def test_an_id_is_a_text(kid: str, token: Run, tmp_path: Path) -> None:
    assert token("keygen", str(tmp_path / "seed"), "--kid", kid).code == 2
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------ mint


def test_a_token_is_minted_as_told(token: Run, seed_file: str) -> None:
    minted = token(
        *mint(seed_file, "--kid", "k1", "--actor-kind", "robot", "--ttl", "10m"),
        *("--surface", "web", "--surface", "tty"),
    )

    assert minted.code == 0
    assert minted.err == ""
    (line,) = minted.out.splitlines()
    claims = unverified_claims(line)
    assert claims is not None
    assert claims["exp"] - claims["iat"] == 600
    assert claims["act"] == {"id": "alice", "kind": "robot"}
    assert (claims["sid"], claims["kid"], claims["surf"]) == (SESSION, "k1", ["web", "tty"])


def test_a_seed_may_be_in_the_environment(
    token: Run, monkeypatch: pytest.MonkeyPatch, seed_file: str
) -> None:
    monkeypatch.setenv("MY_SEED", SEED.hex())
    minted = token("mint", "--seed-env", "MY_SEED", "--session", SESSION, "--actor", "a", "--json")

    assert minted.line["type"] == "token"
    assert minted.line["kid"] == PUBLIC.hex()[:8]
    assert minted.line["session"] == SESSION
    claims = unverified_claims(minted.line["token"])
    assert claims is not None
    assert minted.line["expires_at"] == claims["exp"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--ttl", "3600"), 0),
        (("--ttl", "1h"), 0),
        (("--ttl", "3601"), 1),
        (("--ttl", "30d", "--archival"), 0),
        (("--ttl", "2592001", "--archival"), 1),
        (("--ttl", "60d", "--max-ttl", "60d"), 0),
        (("--ttl", "61", "--max-ttl", "1m"), 1),
        (("--ttl", "99999999999d", "--max-ttl", "99999999999d"), 1),
        *(
            (("--ttl", wrong), 2)
            for wrong in ("0", "-5", "1.5", "", "h", "1w", "1e3", "٣", "9" * 99)
        ),
    ],
)
@pytest.mark.covers("AP12")
def test_a_life_has_its_bounds(
    more: tuple[str, ...], code: int, token: Run, seed_file: str
) -> None:
    minted = token(*mint(seed_file, *more))

    assert minted.code == code
    assert (minted.out == "") == (code != 0)
    if code == 1:
        assert "ttl_too_long" in minted.err or "missing_or_invalid_lifetime" in minted.err


def test_what_is_too_long_says_what_allows_it(token: Run, seed_file: str) -> None:
    assert "--archival" in token(*mint(seed_file, "--ttl", "1d")).err
    assert token(*mint(seed_file, "--ttl", "1d", "--json")).line["failure"] == "ttl_too_long"


def test_a_text_that_no_token_can_hold_is_refused(token: Run, seed_file: str) -> None:
    for option in ("--session", "--actor", "--surface"):
        refused = token(*mint(seed_file), option, "a\udcff")
        assert (refused.code, refused.out) == (1, "")
        assert "claims_invalid" in refused.err
    assert token(*mint(seed_file, "--surface", "x" * 5000)).code == 1


def test_a_seed_that_others_can_read_is_warned_of(token: Run, seed_file: str) -> None:
    os.chmod(seed_file, 0o640)  # noqa: PTH101
    minted = token(*mint(seed_file))

    assert minted.code == 0
    assert "chmod 600" in minted.err


@pytest.mark.parametrize(
    "source",
    [
        ("--seed-file", "missing"),
        ("--seed-file", SEED.hex()),
        ("--seed-file", "a\0b"),
        ("--seed-env", "NO_SUCH_VARIABLE"),
        ("--seed-env", SEED.hex()),
        ("--seed-env", "WRONG_SEED"),
        ("--seed", SEED.hex()),
        ("--seed-env", "A", "--seed-file", SEED.hex()),
        (),
    ],
)
def test_a_seed_that_cannot_be_had_is_exit_code_2_and_no_seed_is_shown(
    source: tuple[str, ...], token: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG_SEED", SEED.hex() + "0")
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)

    refused = token("mint", *source, "--session", "s", "--actor", "a", "--json")

    assert refused.code == 2
    assert refused.line["error"]["kind"] == "usage"
    assert SEED.hex() not in refused.out + refused.err


def test_a_file_that_holds_no_seed_is_exit_code_2(token: Run, tmp_path: Path) -> None:
    path = tmp_path / "seed"
    path.write_text(SEED.hex()[1:])
    refused = token(*mint(str(path)))

    assert refused.code == 2
    assert "privkey_invalid" in refused.err
    assert SEED.hex()[1:] not in refused.err


def test_a_token_that_nobody_reads_is_not_reported_as_minted(seed_file: str) -> None:
    for how in (">&-", "> /dev/full"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {how}', "sh", *COMMAND, "token", *mint(seed_file)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ inspect


def test_what_a_token_says_is_shown_as_unverified(token: Run) -> None:
    shown = token("inspect", stdin=f"{with_claims(surf=['web'], jti='x')}\n")

    assert shown.code == 0
    first, *lines = shown.out.splitlines()
    assert first.startswith("NOT VERIFIED")
    assert [line.split(maxsplit=1)[0] for line in lines] == [
        *("key", "session", "holder", "issued", "ends", "surfaces", "also")
    ]
    assert "alice@example (user)" in lines[2]
    assert "2023-11-14 22:13:20 UTC" in lines[3]
    assert lines[4].endswith(" days ago)")
    assert lines[5].split(maxsplit=1)[1] == '["web"]'
    assert lines[6].split(maxsplit=1)[1] == 'jti: "x"'


def test_inspecting_for_a_script_says_so_too(token: Run) -> None:
    shown = token("inspect", "--json", stdin=TOKEN)

    assert shown.line == {"type": "claims", "verified": False, "claims": CLAIMS}


def test_a_forged_token_can_be_looked_at_and_not_taken_for_good(token: Run) -> None:
    forged = signed(CLAIMS, seed=OTHER_SEED)

    assert "NOT VERIFIED" in token("inspect", stdin=forged).out
    assert token("verify", "--key", KEY, "--session", SESSION, stdin=forged).code == 1


@pytest.mark.parametrize("text", ["", "x", TOKEN + "A", "RXC1..", "R" * 10**6])
def test_what_is_no_token_is_exit_code_1(text: str, token: Run) -> None:
    shown = token("inspect", stdin=text)
    assert (shown.code, shown.out) == (1, "")
    assert "malformed" in shown.err
    assert token("inspect", "--json", stdin=text).line == {
        "type": "claims",
        "ok": False,
        "failure": "malformed",
        "why": "it is no token, or was changed on its way",
    }


def test_a_claim_cannot_drive_the_terminal_or_look_like_a_line_of_ours(token: Run) -> None:
    evil = "a\x1b]0;x\x07\nok: it opens the session\u202e"
    shown = token("inspect", stdin=with_claims(sid=evil, act={"id": evil, "kind": evil}, x=evil))

    assert "\x1b" not in shown.out
    assert "\u202e" not in shown.out
    assert "ok: it opens the session" not in shown.out.splitlines()
    assert len(shown.out.splitlines()) == 7


@pytest.mark.parametrize("value", [None, True, 1.5, "x", -1, 10**30, [], {"a": 10**30}])
def test_any_claims_can_be_shown(value: Any, token: Run) -> None:
    text = with_claims(sid=value, act=value, iat=value, exp=value, surf=value, other=value)

    assert token("inspect", stdin=text).code == 0
    assert token("inspect", "--json", stdin=text).line["claims"]["sid"] == value


def test_a_token_comes_from_a_file_or_a_variable_too(
    token: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n\n")
    monkeypatch.setenv("MY_TOKEN", TOKEN)

    for source in (("--file", str(path)), ("--env", "MY_TOKEN")):
        assert token("inspect", "--json", *source).line["claims"] == CLAIMS


@pytest.mark.parametrize(
    "source",
    [
        ("--file", "missing"),
        ("--file", TOKEN),
        ("--file", "a\0b"),
        ("--env", "NO_SUCH_VARIABLE"),
        ("--env", TOKEN),
        (TOKEN,),
        ("--token", TOKEN),
        ("--file", "a", "--env", "b"),
    ],
)
@pytest.mark.parametrize("action", [("inspect",), ("verify", "--key", KEY, "--session", "s")])
def test_a_token_that_cannot_be_had_is_exit_code_2_and_is_not_shown(
    action: tuple[str, ...], source: tuple[str, ...], token: Run
) -> None:
    refused = token(*action, *source)

    assert refused.code == 2
    assert TOKEN not in refused.out + refused.err
    if source == (TOKEN,):
        assert "never taken from the command line" in refused.err


def test_a_token_that_is_typed_is_not_shown() -> None:
    with Screen("token", "inspect") as screen:
        screen.read_until("Token (it is not shown): ")
        screen.type(f"{TOKEN}\n")
        screen.read_until("alice@example")

        assert screen.end() == 0
        assert TOKEN[:40] not in screen.text


@pytest.mark.parametrize("how", ["<&-", "0>/dev/null"])
def test_no_standard_input_is_no_traceback(how: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {how}', "sh", *COMMAND, "token", "inspect"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=20,
    )

    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    assert "antiphon token inspect" in done.stderr


# ------------------------------------------------------------------ verify


def verify(*more: str, at: int = NOW, session: str = SESSION) -> list[str]:
    return ["verify", "--key", KEY, "--session", session, "--at", str(at), *more]


def test_a_good_token_is_exit_code_0_and_says_what_it_opens(token: Run) -> None:
    good = token(*verify(), stdin=TOKEN)

    assert good.code == 0
    assert good.err == ""
    first, *lines = good.out.splitlines()
    assert first == "ok: it opens the session"
    assert lines[:3] == ["key       k1", "session   sess-kat", "holder    alice@example (user)"]
    assert token(*verify("--json"), stdin=TOKEN).line == {
        "type": "verdict",
        "ok": True,
        "claims": {**CLAIMS, "surf": None},
    }


@pytest.mark.parametrize(
    ("text", "options", "failure"),
    [
        ("x", verify(), "malformed"),
        ("", verify(), "malformed"),
        (with_claims(kid="k9"), verify(), "unknown_kid"),
        (signed(CLAIMS, seed=OTHER_SEED), verify(), "sig_invalid"),
        (with_claims(iat=True), verify(), "claims_invalid"),
        (TOKEN, verify(session="other"), "session_mismatch"),
        (TOKEN, verify(at=ENDS), "expired"),
        (TOKEN, ["verify", "--key", KEY, "--session", SESSION], "expired"),
        (TOKEN, verify(at=1), "issued_in_future"),
        (with_claims(min_offset=1), verify(), "unsupported_restrictive_claim"),
        (with_claims(act={}), verify(), "malformed_grant"),
        (TOKEN, verify("--actor", "mallory"), "actor_mismatch"),
        (with_claims(surf=["web"]), verify("--surface", "tty"), "surface_not_allowed"),
    ],
)
def test_a_token_that_opens_nothing_is_exit_code_1_and_says_why(
    text: str, options: list[str], failure: str, token: Run
) -> None:
    denied = token(*options, stdin=text)
    assert (denied.code, denied.out) == (1, "")
    assert denied.err.startswith(f"antiphon token verify: {failure}: ")

    line = token(*options, "--json", stdin=text).line
    assert line["type"] == "verdict"
    assert (line["ok"], line["failure"]) == (False, failure)
    assert "claims" not in line


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (TOKEN, ("--actor", "alice@example")),
        (TOKEN, ("--surface", "anywhere")),
        (with_claims(surf=["web"]), ("--surface", "web")),
        (with_claims(surf=["web"]), ()),
    ],
)
def test_who_shows_it_and_where_can_be_said(text: str, more: tuple[str, ...], token: Run) -> None:
    assert token(*verify(*more), stdin=text).code == 0


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("--key", "k1"),
        ("--key", f"={PUBLIC.hex()}"),
        ("--key", "k1="),
        ("--key", f"k1={PUBLIC.hex()[1:]}"),
        ("--key", "k1=missing"),
        ("--key", "k1=" + "00" * 32),
        ("--key", KEY, "--key", "k2=missing"),
        ("--keyring", "missing"),
    ],
)
def test_a_key_that_is_none_is_exit_code_2_whatever_the_token(
    keys: tuple[str, ...], token: Run
) -> None:
    refused = token("verify", *keys, "--session", SESSION, "--at", str(NOW), stdin=TOKEN)

    assert refused.code == 2
    assert refused.out == ""


def test_keys_come_from_a_directory_and_one_by_one(token: Run, tmp_path: Path) -> None:
    (tmp_path / "k1.pub").write_bytes(PUBLIC)
    loaded = Keyring.load(tmp_path)
    assert len(loaded) == 1
    other = f"k1={Issuer(OTHER_SEED, kid='x').public_key.hex()}"
    at = ("--session", SESSION, "--at", str(NOW))

    assert token("verify", "--keyring", str(tmp_path), *at, stdin=TOKEN).code == 0
    # What is typed stands before what is in the directory.
    replaced = token("verify", "--keyring", str(tmp_path), "--key", other, *at, stdin=TOKEN)
    assert replaced.code == 1


# ------------------------------------------------------------------ the command as a whole


def test_a_whole_round_through_pipes(tmp_path: Path) -> None:
    key = antiphon("token", "keygen", "seed", "--kid", "k", cwd=tmp_path).out.strip()
    minted = antiphon("token", *mint("seed", "--kid", "k"), cwd=tmp_path)
    checked = antiphon(
        "token", "verify", "--key", key, "--session", SESSION, stdin=minted.out_bytes, cwd=tmp_path
    )

    assert checked.code == 0
    assert checked.out.startswith("ok: ")


def test_checking_loads_no_issuer_and_no_display() -> None:
    code = f"""
import io, sys
from antiphon.cli import main
sys.stdin = io.TextIOWrapper(io.BytesIO({TOKEN!r}.encode()))
assert main(["token", *{verify()!r}]) == 0
heavy = ("antiphon.journal._issuer", "rich", "prompt_toolkit")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "arguments", [["keygen", "seed"], mint("seed"), verify()], ids=["keygen", "mint", "verify"]
)
def test_without_the_extra_it_is_named(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["cryptography"] = None
from antiphon.cli import main
sys.exit(main(["token", *{arguments!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, cwd=tmp_path
    )

    assert done.returncode == 2
    assert 'pip install "antiphon[tokens]"' in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_looking_needs_no_extra() -> None:
    code = f"""
import io, sys
sys.modules["cryptography"] = None
from antiphon.cli import main
sys.stdin = io.TextIOWrapper(io.BytesIO({TOKEN!r}.encode()))
sys.exit(main(["token", "inspect"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NOT VERIFIED")


@pytest.mark.parametrize("action", ["keygen", "mint", "inspect", "verify"])
def test_each_action_has_its_help_with_the_exit_codes(action: str, token: Run) -> None:
    shown = token(action, "--help")

    assert shown.code == 0
    assert shown.out.startswith(f"usage: antiphon token {action}")
    assert "exit codes:" in shown.out
    assert "typed" not in shown.out


def test_token_alone_says_what_there_is(token: Run) -> None:
    assert token().code == 2
    shown = token("--help")
    for action in ("keygen", "mint", "inspect", "verify"):
        assert action in shown.out
