"""Minting: where a seed comes from, what is refused, and that no seed is ever shown."""

from __future__ import annotations

import copy
import json
import pickle
import traceback
from base64 import urlsafe_b64decode
from typing import TYPE_CHECKING, Any

import pytest

from antiphon import AntiphonError
from antiphon.journal._claims import Claims, read_token, unverified_claims
from antiphon.journal._issuer import Issuer, IssuerError
from antiphon.journal._token import verify_token
from tests.journal.tokens import CLAIMS, ENDS, ISSUED, KEYRING, NOW, PUBLIC, SEED, SESSION, TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ISSUER = Issuer(SEED, kid="k1", clock=lambda: ISSUED + 0.9)
HEX = SEED.hex()


def lasting(seconds: int) -> dict[str, Any]:
    return {**CLAIMS, "exp": ISSUED + seconds}


def refused(mint: Callable[..., object], *given: object, **named: object) -> str:
    with pytest.raises(IssuerError) as raised:
        mint(*given, **named)
    shown = "".join(traceback.format_exception(raised.value)) + repr(raised.value)
    assert HEX not in shown.lower()
    return raised.value.failure


def test_the_known_claims_become_the_known_token() -> None:
    assert ISSUER.sign(CLAIMS) == TOKEN
    assert ISSUER.mint(SESSION, "alice@example") == TOKEN
    assert ISSUER.mint(SESSION, {"id": "alice@example", "kind": "user"}) == TOKEN
    assert ISSUER.public_key == PUBLIC


def test_the_key_id_is_the_issuers_whatever_was_said() -> None:
    assert ISSUER.sign({**CLAIMS, "kid": 5}) == TOKEN
    assert json.dumps(unverified_claims(Issuer(SEED, kid="ü").sign(CLAIMS))).endswith('"\\u00fc"}')


def test_a_seed_comes_as_a_value_a_file_a_variable_or_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, text = tmp_path / "raw", tmp_path / "text"
    raw.write_bytes(SEED)
    text.write_text(f"  {HEX.upper()}\n")
    monkeypatch.setenv("TOKEN_SEED", f"{HEX}\n")

    issuers = [
        *(Issuer(seed, kid="k1") for seed in (SEED, HEX, HEX.upper(), raw, text)),
        *(Issuer(seed, kid="k1") for seed in (lambda: SEED, lambda: HEX)),
        Issuer.from_env("TOKEN_SEED", kid="k1"),
    ]

    assert {issuer.sign(CLAIMS) for issuer in issuers} == {TOKEN}
    assert {repr(issuer) for issuer in issuers} == {"Issuer(kid='k1')"}


@pytest.mark.parametrize(
    "seed",
    ["", HEX[:-1], HEX + "0", f" {HEX}", "g" * 64, b"", SEED[:31], SEED + b"0", HEX.encode()],
)
def test_a_seed_that_is_none_is_named_and_not_shown(seed: str | bytes, tmp_path: Path) -> None:
    assert refused(lambda: Issuer(seed, kid="k1").sign(CLAIMS)) == "privkey_invalid"
    assert refused(lambda: Issuer(lambda: seed, kid="k1").public_key) == "privkey_invalid"


@pytest.mark.parametrize("seed", [None, 5, bytearray(SEED)])
def test_a_function_that_gives_no_seed_is_named(seed: Any) -> None:
    assert refused(lambda: Issuer(lambda: seed, kid="k1").sign(CLAIMS)) == "privkey_invalid"


def test_a_seed_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKEN_SEED", raising=False)
    wrong = tmp_path / "wrong"
    wrong.write_text(HEX[1:])
    issuer = Issuer.from_env("TOKEN_SEED", kid="k1")

    assert refused(issuer.sign, CLAIMS) == "privkey_env_missing"
    # A seed where a name is meant is a seed all the same.
    assert refused(lambda: Issuer.from_env(HEX, kid="k1").sign(CLAIMS)) == "privkey_env_missing"
    for path in (tmp_path / "missing", tmp_path, tmp_path / HEX, tmp_path / "a\0b"):
        assert refused(Issuer(path, kid="k1").sign, CLAIMS) == "privkey_file_missing"
    assert refused(lambda: Issuer(wrong, kid="k1").sign(CLAIMS)) == "privkey_invalid"
    monkeypatch.setenv("TOKEN_SEED", HEX[1:])
    assert refused(issuer.sign, CLAIMS) == "privkey_invalid"
    monkeypatch.setenv("TOKEN_SEED", HEX)
    assert issuer.sign(CLAIMS) == TOKEN, "it is looked for each time"


def test_what_a_function_raises_is_the_callers() -> None:
    def vault() -> bytes:
        raise ConnectionError("the vault is closed")

    with pytest.raises(ConnectionError, match="vault"):
        Issuer(vault, kid="k1").sign(CLAIMS)


@pytest.mark.parametrize(
    "changed",
    [
        *({"iat": value} for value in (None, True, 0, -5, 1.7e9, "1700000000")),
        *({"exp": value} for value in (None, True, ISSUED, ISSUED - 1, 1700003600.0, "1700003600")),
        {"exp": 4102444801, "iat": 4102444800},
        {"exp": 10**40, "iat": 10**40 - 1},
    ],
)
def test_a_life_that_is_none_is_refused(changed: dict[str, Any]) -> None:
    failure = refused(ISSUER.sign, {**CLAIMS, **changed})

    assert failure == "missing_or_invalid_lifetime"


@pytest.mark.parametrize("name", ["iat", "exp"])
def test_a_life_without_an_end_is_refused(name: str) -> None:
    claims = {key: value for key, value in CLAIMS.items() if key != name}

    assert refused(ISSUER.sign, claims) == "missing_or_invalid_lifetime"


@pytest.mark.parametrize("ttl", [0, -1, True, 1.5, "60", None])
def test_seconds_that_are_no_whole_number_above_zero_are_refused(ttl: Any) -> None:
    assert refused(ISSUER.mint, SESSION, "a", ttl=ttl) == "missing_or_invalid_lifetime"


@pytest.mark.covers("AP12")
def test_a_life_has_its_bound_to_the_second() -> None:
    assert ISSUER.sign(lasting(3600))
    assert refused(ISSUER.sign, lasting(3601)) == "ttl_too_long"
    assert ISSUER.sign(lasting(2_592_000), archival=True)
    assert refused(ISSUER.sign, lasting(2_592_001), archival=True) == "ttl_too_long"
    # An explicit bound replaces both, downwards too.
    assert ISSUER.sign(lasting(2_592_001), max_ttl=2_592_001)
    for archival in (False, True):
        failure = refused(ISSUER.sign, lasting(61), archival=archival, max_ttl=60)
        assert failure == "ttl_too_long"


def test_the_first_and_the_last_moment_can_be_signed() -> None:
    assert ISSUER.sign({**CLAIMS, "iat": 1, "exp": 2})
    assert ISSUER.sign({**CLAIMS, "iat": 4102444799, "exp": 4102444800})


def test_the_text_of_the_claims_is_plain_utf_8() -> None:
    read = read_token(ISSUER.sign({**CLAIMS, "sid": "caf\u00e9"}))

    assert read is not None
    assert "caf\u00e9".encode() in urlsafe_b64decode(read.signed[5:] + b"==")


@pytest.mark.covers("AP12")
def test_minting_has_the_same_bounds() -> None:
    assert ISSUER.mint(SESSION, "a", ttl=3600)
    assert refused(ISSUER.mint, SESSION, "a", ttl=3601) == "ttl_too_long"
    assert ISSUER.mint(SESSION, "a", ttl=2_592_000, archival=True)
    assert refused(ISSUER.mint, SESSION, "a", ttl=2_592_001, archival=True) == "ttl_too_long"
    assert refused(ISSUER.mint, SESSION, "a", ttl=61, max_ttl=60) == "ttl_too_long"


UNUSABLE: dict[str, list[Any]] = {
    "sid": [None, 42, "\ud800"],
    "act": [None, "alice", []],
    "surf": [None, "web", [1]],
}


@pytest.mark.parametrize(
    "changed",
    [
        *({name: value} for name, values in UNUSABLE.items() for value in values),
        {"min_offset": 1},
        {"note": "x" * 4096},
        {"note": object()},
        {"note": float("nan")},
        {"note": "\udfff"},
        {1: 1, "1": 2},
    ],
)
def test_what_nobody_could_be_admitted_with_is_not_signed(changed: dict[Any, Any]) -> None:
    assert refused(ISSUER.sign, {**CLAIMS, **changed}) == "claims_invalid"


def test_nesting_without_an_end_is_not_signed() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]

    for note in (circle, deep):
        assert refused(ISSUER.sign, {**CLAIMS, "note": note}) == "claims_invalid"


@pytest.mark.parametrize("actor", [{}, {"id": 5}, {"id": None}, {"name": "alice"}])
def test_an_actor_without_an_id_gets_no_token(actor: dict[str, Any]) -> None:
    assert refused(ISSUER.mint, SESSION, actor) == "claims_invalid"


def test_surfaces_are_a_list_of_names() -> None:
    token = ISSUER.mint(SESSION, "a", surfaces=("web", "tty"), ttl=60)
    claims = verify_token(token, KEYRING, session_id=SESSION, now=NOW - 60)

    assert isinstance(claims, Claims)
    assert claims.surf == ("web", "tty")
    assert claims.exp == ISSUED + 60
    assert refused(ISSUER.mint, SESSION, "a", surfaces="web") == "claims_invalid"


def test_a_session_may_be_called_anything() -> None:
    for session_id in ("", "a b", "caf\u00e9", "\U0001f600", '"\\\0'):
        token = ISSUER.mint(session_id, "a")
        assert isinstance(verify_token(token, KEYRING, session_id=session_id, now=NOW), Claims)


def test_an_issuer_has_a_key_id() -> None:
    assert refused(lambda: Issuer(SEED, kid="")) == "claims_invalid"


def test_the_clock_is_the_systems_unless_given() -> None:
    claims = unverified_claims(Issuer(SEED, kid="k1").mint(SESSION, "a", ttl=5))

    assert claims is not None
    assert claims["exp"] - claims["iat"] == 5
    assert claims["iat"] > ENDS


def test_the_error_is_one_of_ours_and_travels() -> None:
    error = IssuerError("ttl_too_long")

    assert isinstance(error, AntiphonError)
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert again.failure == "ttl_too_long"
        assert str(again) == "ttl_too_long: the token would live longer than it may"
