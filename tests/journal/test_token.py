"""The known-answer table, and the policy that stands on verification."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from antiphon.journal._attach import AttachContext, AttachRefused, Denied, Grant, admit
from antiphon.journal._claims import Claims, as_base64url
from antiphon.journal._ed25519 import new_seed, public_key
from antiphon.journal._issuer import Issuer
from antiphon.journal._keyring import Keyring, KeyringError
from antiphon.journal._token import Token, verify_token
from tests.journal.tokens import (
    CLAIMS,
    ENDS,
    ISSUED,
    KEYRING,
    NOW,
    OTHER_SEED,
    PUBLIC,
    SEED,
    SESSION,
    TOKEN,
    signed,
    signed_text,
    with_claims,
)

if TYPE_CHECKING:
    from pathlib import Path

HEAD, BODY, SIGNATURE = TOKEN.split(".")
RAW = bytes.fromhex(
    "f3a0a44e4d954224b3952cb50f5e794f2aa607b5fa034baa5bfa11a01e9dfbaf266ef5814ec848f6fecfb6ef060d8e8fb9"
    "0e1862c7753b1f6da6a6c339aa160c"
)


# ------------------------------------------------------------------ the known-answer table


def test_the_known_token_is_what_the_known_seed_signs() -> None:
    assert signed(CLAIMS) == TOKEN
    assert public_key(SEED) == PUBLIC


def test_the_known_token_opens_its_session() -> None:
    assert verify_token(TOKEN, KEYRING, session_id=SESSION, now=NOW) == Claims(
        kid="k1",
        sid="sess-kat",
        act={"id": "alice@example", "kind": "user"},
        iat=1700000000,
        exp=1700003600,
        surf=None,
    )


@pytest.mark.parametrize(
    ("now", "session_id", "expected"),
    [
        (1700000100, "sess-kat", "ok"),
        (1700003599, "sess-kat", "ok"),
        (1700003600, "sess-kat", "expired"),
        (1699999940, "sess-kat", "ok"),
        (1699999939, "sess-kat", "issued_in_future"),
        (1700000100, "sess-ka", "session_mismatch"),
        (1700000100, "sess-kat2", "session_mismatch"),
        (1700000100, "", "session_mismatch"),
    ],
)
@pytest.mark.covers("AP8", "AP9")
def test_the_known_token_at_other_times_and_for_other_sessions(
    now: int, session_id: str, expected: str
) -> None:
    found = verify_token(TOKEN, KEYRING, session_id=session_id, now=now)

    assert (found if isinstance(found, str) else "ok") == expected


TABLE: list[tuple[str, str]] = [
    (with_claims(kid="k9"), "unknown_kid"),
    (with_claims(min_offset=5), "unsupported_restrictive_claim"),
    (with_claims(surf="web"), "claims_invalid"),
    (with_claims(surf=["web"]), "ok"),
    (with_claims(jti="x"), "ok"),
    (with_claims(alg="none"), "ok"),
    (with_claims(exp=ISSUED), "claims_invalid"),
    (with_claims(exp=4102444801), "claims_invalid"),
    (with_claims(iat=True), "claims_invalid"),
    (with_claims(exp=1700003600.0), "claims_invalid"),
    (with_claims(act="a"), "claims_invalid"),
    (with_claims(sid=42), "claims_invalid"),
    (with_claims(act={}), "ok"),
    (signed([1]), "malformed"),
    (with_claims(kid=...), "malformed"),
    (with_claims(kid=""), "malformed"),
    (TOKEN[:-1] + "B", "malformed"),
    (f"{HEAD}.{BODY}=.{SIGNATURE}", "malformed"),
    (f"{TOKEN}.{BODY}", "malformed"),
    (TOKEN.replace("RXC1", "RXC2"), "malformed"),
    (TOKEN.replace("RXC1", "none"), "malformed"),
    (TOKEN.replace("RXC1", ""), "malformed"),
    (TOKEN.replace("RXC1", "eyJhbGciOiJIUzI1NiJ9"), "malformed"),
    (f"{HEAD}.{BODY}.{as_base64url(bytes([RAW[0] ^ 1]) + RAW[1:]).decode()}", "sig_invalid"),
    (f"{HEAD}.{BODY}.{with_claims(jti='x').split('.')[2]}", "sig_invalid"),
    (signed(CLAIMS, seed=OTHER_SEED), "sig_invalid"),
]


@pytest.mark.parametrize(("token", "expected"), TABLE)
@pytest.mark.covers("AP6", "AP7", "AP11")
def test_the_table_of_other_tokens(token: str, expected: str) -> None:
    found = verify_token(token, KEYRING, session_id=SESSION, now=NOW)

    assert (found if isinstance(found, str) else "ok") == expected
    assert verify_token(token.encode(), KEYRING, session_id=SESSION, now=NOW) == found


def test_the_prefix_is_part_of_what_is_signed() -> None:
    other = signed_text(msgspec.json.encode(CLAIMS), prefix="RXC2").replace("RXC2", "RXC1")

    assert other.split(".")[:2] == TOKEN.split(".")[:2]
    assert verify_token(other, KEYRING, session_id=SESSION, now=NOW) == "sig_invalid"


def test_a_key_that_is_no_key_is_as_none() -> None:
    for key in (b"", PUBLIC[:31], PUBLIC + b"\0"):
        assert verify_token(TOKEN, {"k1": key}, session_id=SESSION, now=NOW) == "unknown_kid"
    assert verify_token(TOKEN, {}, session_id=SESSION, now=NOW) == "unknown_kid"


def test_nothing_is_judged_before_the_signature_holds() -> None:
    """Whoever has no key learns nothing of what the claims would have come to."""
    for changed in ({"sid": "other"}, {"iat": 1, "exp": 2}, {"sid": 1}, {"min_offset": 1}):
        forged = signed({**CLAIMS, **changed}, seed=OTHER_SEED)
        assert verify_token(forged, KEYRING, session_id=SESSION, now=NOW) == "sig_invalid"


# ------------------------------------------------------------------ the policy


def context(capability: Any = TOKEN, /, **more: Any) -> AttachContext:
    known: dict[str, Any] = {
        "session_id": SESSION,
        "actor": None,
        "surface": "unknown",
        "capability": capability,
        "from_offset": 0,
        "transport": {"kind": "tcp", "peer": None},
    }
    return AttachContext(**{**known, **more})


def policy(keyring: Any = KEYRING, now: float = NOW, **options: Any) -> Token:
    return Token(keyring, clock=lambda: now, **options)


def refusal(asked: Token, about: AttachContext) -> str:
    with pytest.raises(AttachRefused) as raised:
        asked(about)
    return raised.value.reason


@pytest.mark.covers("AP14")
def test_a_grant_says_who_by_which_key_and_until_when() -> None:
    grant = policy()(context())

    assert grant == Grant(
        actor={"id": "alice@example", "kind": "user"},
        session_id=SESSION,
        via={"kind": "token", "kid": "k1"},
        scope="attach",
        expires_at=ENDS,
        lens=None,
    )


@pytest.mark.parametrize("capability", [None, msgspec.UNSET])
def test_without_a_token_one_is_required(capability: Any) -> None:
    assert refusal(policy(), context(capability)) == "token_required"


@pytest.mark.parametrize("capability", ["", 0, False, [], {}, "x", 5, [TOKEN], {"token": TOKEN}])
def test_what_is_no_token_is_malformed(capability: Any) -> None:
    assert refusal(policy(), context(capability)) == "malformed"


@pytest.mark.parametrize(("token", "expected"), [row for row in TABLE if row[1] != "ok"])
def test_a_failure_of_verification_is_the_policys(token: str, expected: str) -> None:
    assert refusal(policy(), context(token)) == expected


@pytest.mark.parametrize("transport", [None, {}, {"kind": "stdio"}, {"kind": "process"}, "tcp"])
def test_the_transport_is_nothing_to_it(transport: Any) -> None:
    assert isinstance(policy()(context(transport=transport)), Grant)
    assert refusal(policy(), context(None, transport=transport)) == "token_required"


@pytest.mark.parametrize(
    ("actor", "admitted"),
    [
        (None, True),
        ({}, True),
        ({"id": None}, True),
        ({"id": 5}, True),
        ("mallory", True),
        ({"id": "alice@example"}, True),
        ({"id": "alice@example", "kind": "robot"}, True),
        ({"id": "mallory"}, False),
        ({"id": ""}, False),
        ({"id": "alice@example "}, False),
    ],
)
def test_who_says_to_be_somebody_else_than_the_holder_is_refused(
    actor: Any, admitted: bool
) -> None:
    if admitted:
        assert policy()(context(actor=actor)).actor["id"] == "alice@example"
    else:
        assert refusal(policy(), context(actor=actor)) == "actor_mismatch"


@pytest.mark.parametrize(
    ("surf", "surface", "admitted"),
    [
        (["web"], "web", True),
        (["tty", "web"], "web", True),
        (["web"], "tty", False),
        (["web"], "we", False),
        (["web"], "WEB", False),
        (["web"], "unknown", False),
        (["web"], "", False),
        (["web"], None, False),
        (["web"], ["web"], False),
        (["web"], 5, False),
        (["web"], {"web": 1}, False),
        ([], "web", False),
        ([""], None, False),
        (..., "web", True),
        (..., None, True),
        (..., 5, True),
    ],
)
@pytest.mark.covers("AP17")
def test_a_token_for_some_surfaces_is_good_there_alone(
    surf: Any, surface: Any, admitted: bool
) -> None:
    asked = context(with_claims(surf=surf), surface=surface)

    if admitted:
        assert isinstance(policy()(asked), Grant)
    else:
        assert refusal(policy(), asked) == "surface_not_allowed"


@pytest.mark.covers("AP17")
def test_a_policy_may_stand_at_a_surface_of_its_own() -> None:
    web = context(with_claims(surf=["web"]), surface="unknown")

    assert isinstance(policy(surface="web")(web), Grant)
    tty = context(with_claims(surf=["tty"]), surface="tty")
    assert refusal(policy(surface="web"), tty) == "surface_not_allowed"


def test_the_checks_come_in_their_order() -> None:
    wrong = {"actor": {"id": "mallory"}, "surface": "tty"}
    token = with_claims(surf=["web"])

    assert refusal(policy(now=ENDS), context(token, **wrong)) == "expired"
    assert refusal(policy(), context(token, **wrong)) == "actor_mismatch"
    assert refusal(policy(), context(token, surface="tty")) == "surface_not_allowed"


@pytest.mark.parametrize("act", [{}, {"id": None}, {"id": 7}, {"id": ["alice"]}, {"name": "alice"}])
@pytest.mark.covers("AP16")
async def test_a_holder_without_an_id_ends_in_the_funnel(act: Any) -> None:
    token = with_claims(act=act)
    claims = verify_token(token, KEYRING, session_id=SESSION, now=NOW)

    assert isinstance(claims, Claims)
    # Whoever says to be somebody is nobody else than a holder that has no name.
    for actor in (None, {"id": "alice"}):
        assert await admit(policy(), context(token, actor=actor)) == Denied(
            "malformed_grant", "actor"
        )


async def test_the_funnel_admits_what_the_policy_grants_and_names_what_it_refuses() -> None:
    grant = await admit(policy(), context())

    assert isinstance(grant, Grant)
    assert grant.actor == CLAIMS["act"]
    assert grant.expires_at == ENDS
    assert await admit(policy(), context(None)) == Denied("policy_error", "token_required")


# ------------------------------------------------------------------ keys that come and go


@pytest.mark.covers("AP11")
def test_a_directory_is_read_for_each_attach(tmp_path: Path) -> None:
    asked = policy(tmp_path)
    assert refusal(asked, context()) == "unknown_kid"

    (tmp_path / "k1.pub").write_bytes(PUBLIC)
    assert isinstance(asked(context()), Grant)

    # Rotation: the new key beside the old one, for as long as tokens of the old one live.
    seed = new_seed()
    (tmp_path / "k2.pub").write_text(f"{public_key(seed).hex()}\n")
    second = Issuer(seed, kid="k2", clock=lambda: ISSUED).mint(SESSION, "bob")
    assert asked(context(second)).via["kid"] == "k2"
    assert isinstance(asked(context()), Grant)

    # Revocation: with a key, all its tokens go, and no others.
    (tmp_path / "k1.pub").unlink()
    assert refusal(asked, context()) == "unknown_kid"
    assert isinstance(asked(context(second)), Grant)


@pytest.mark.covers("AP11")
def test_a_mapping_and_a_function_are_asked_for_each_attach() -> None:
    keys: dict[str, Any] = {}
    for asked in (policy(keys), policy(lambda: keys), policy(lambda: Keyring(keys))):
        assert refusal(asked, context()) == "unknown_kid"
        keys["k1"] = PUBLIC.hex()
        assert isinstance(asked(context()), Grant)
        keys.clear()
        assert refusal(asked, context()) == "unknown_kid"


@pytest.mark.covers("AP11")
def test_a_keyring_stays_as_it_was() -> None:
    keys: dict[str, Any] = {"k1": PUBLIC}
    asked = policy(Keyring(keys))
    keys.clear()

    assert isinstance(asked(context()), Grant)


async def test_one_wrong_key_and_nobody_is_admitted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "k1.pub").write_bytes(PUBLIC)
    asked = policy(tmp_path)
    assert isinstance(await admit(asked, context()), Grant)

    (tmp_path / "k2.pub").write_bytes(PUBLIC[:31])
    denied = await admit(asked, context())
    assert isinstance(denied, Denied)
    assert denied.reason == "policy_error"
    assert denied.detail.startswith("keyring_invalid: key 'k2': ")
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "key 'k2'" in told.getMessage()


async def test_a_function_that_fails_admits_nobody() -> None:
    def keys() -> Keyring:
        raise OSError("the disk is on fire")

    assert await admit(policy(keys), context()) == Denied("policy_crash", "OSError")


def test_a_keyring_that_is_wrong_from_the_start_is_told_at_once(tmp_path: Path) -> None:
    for wrong in (tmp_path / "missing", {"k1": "x"}):
        with pytest.raises(KeyringError):
            Token(wrong)


def test_the_keys_are_not_touched_without_a_token(tmp_path: Path) -> None:
    def keys() -> Keyring:
        raise AssertionError

    assert refusal(policy(keys), context(None)) == "token_required"


async def test_a_keyring_that_cannot_be_read_holds_up_its_own_attach_alone(tmp_path: Path) -> None:
    """A key on a file system that hangs: the funnel waits in a thread, and not for ever."""
    pipe = tmp_path / "k1"
    os.mkfifo(pipe)
    asked = Token(lambda: {"k1": pipe})

    assert (await admit(asked, context(), timeout=0.05)) == Denied("policy_timeout", "0.05 s")

    with pipe.open("wb") as end:  # which lets the thread go on, and end
        end.write(PUBLIC)


@pytest.mark.covers("AP20")
def test_the_clock_is_the_systems_unless_given() -> None:
    issuer = Issuer(SEED, kid="k1")

    assert isinstance(Token(KEYRING)(context(issuer.mint(SESSION, "alice", ttl=60))), Grant)
    assert refusal(Token(KEYRING), context()) == "expired"
    assert time.time() > ENDS


def test_what_is_shown_of_it_is_no_key() -> None:
    assert repr(policy()) == "Token()"
    assert repr(policy(surface="web")) == "Token(surface='web')"
