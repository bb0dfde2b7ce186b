"""What holds of tokens (AP4 to AP20), each against a verifier that is wrong.

What the funnel does with a policy (AP1, AP3, AP15, AP18) is the attach's; the known-answer table is in
tests/journal/test_token.py.
"""

from __future__ import annotations

import builtins
import copy
import gc
import random
import subprocess
import sys
import time
from base64 import urlsafe_b64decode
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import AuthRequired, Durability, DurableAgent, RequestError, Turn
from antiphon.journal import _claims, _token
from antiphon.journal._attach import (
    AttachContext,
    AttachRefused,
    Denied,
    Grant,
    admit,
)
from antiphon.journal._claims import Claims, as_base64url
from antiphon.journal._ed25519 import public_key
from antiphon.journal._keyring import Keyring
from antiphon.journal._memory import MemoryJournal
from antiphon.journal._record import Entry
from antiphon.journal._rider import Rider
from antiphon.journal._subscriber import Subscriber
from antiphon.journal._token import Token, verify_token
from antiphon.journal._writers import Writers
from antiphon.sessions import _durable_router
from antiphon.testing import raw_client
from tests.invariants.controls import changed, controlled
from tests.journal.tokens import (
    CLAIMS,
    ENDS,
    ISSUED,
    KEYRING,
    NOW,
    OTHER_SEED,
    PUBLIC,
    SESSION,
    TOKEN,
    signed,
    signed_text,
    with_claims,
)
from tests.test_layers import imports, modules, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from antiphon.journal._writer import Writer

HEAD, BODY, SIGNATURE = TOKEN.split(".")


def verdict(token: object, session_id: str = SESSION, now: float = NOW, keys: Any = KEYRING) -> str:
    found = verify_token(token, keys, session_id=session_id, now=now)
    assert isinstance(found, (str, Claims))
    return found if isinstance(found, str) else "ok"


def context(capability: object, /, **more: Any) -> AttachContext:
    known: dict[str, Any] = {
        "session_id": SESSION,
        "actor": None,
        "surface": "unknown",
        "capability": capability,
        "from_offset": 0,
        "transport": {"kind": "tcp", "peer": None},
    }
    return AttachContext(**{**known, **more})


def at(now: float) -> Token:
    return Token(KEYRING, clock=lambda: now)


# ------------------------------------------------------------------ AP4, AP5: pure and total


def by_the_clock(original: Any, claims: dict[str, Any], *, session_id: str, now: float) -> Any:
    return original(claims, session_id=session_id, now=time.time())


def once_only(original: Any, claims: dict[str, Any], *, session_id: str, now: float) -> Any:
    found = original(claims, session_id=session_id, now=now)
    claims["min_offset"] = 0
    SEEN.append(claims)
    return found if SEEN.count(claims) == 1 else "expired"


SEEN: list[object] = []


@pytest.mark.covers("AP4")
@controlled(
    by_the_clock=changed(_token, "judge", by_the_clock),
    once_only=changed(_token, "judge", once_only),
)
async def test_the_same_token_has_the_same_verdict_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_args: object, **_named: object) -> object:
        raise AssertionError("verifying reads nothing")

    SEEN.clear()
    tokens = [TOKEN, with_claims(surf=["web"]), with_claims(kid="k9"), TOKEN + "A", None]
    keys = dict(KEYRING)
    with monkeypatch.context() as patch:
        for module, name in ((time, "time"), (time, "monotonic"), (builtins, "open")):
            patch.setattr(module, name, never)
        first = [verify_token(token, keys, session_id=SESSION, now=NOW) for token in tokens]
        again = [verify_token(token, keys, session_id=SESSION, now=NOW) for token in tokens]

    assert first == again
    assert isinstance(first[0], Claims)
    assert first[0].act == CLAIMS["act"]
    assert keys == {"k1": PUBLIC}


def random_inputs(count: int) -> Iterator[object]:
    """Bytes, texts, values, tokens with something changed, and well-signed nonsense."""
    chance = random.Random(20261130)
    alphabet = "ABCabc019-_=.+/ \n\0é\ud800"

    def text(length: int) -> str:
        return "".join(chance.choice(alphabet) for _ in range(chance.randrange(length)))

    def value(depth: int) -> Any:
        simple: list[Any] = [
            None,
            True,
            0,
            -1,
            1e308,
            "x",
            "\ud800",
            chance.getrandbits(70),
            NOW,
            ENDS,
        ]
        if depth and chance.random() < 0.5:
            if chance.random() < 0.5:
                return [value(depth - 1) for _ in range(chance.randrange(4))]
            return {chance.choice(["id", "sid", "x"]): value(depth - 1) for _ in range(3)}
        return chance.choice(simple)

    def mutated() -> bytes:
        data = bytearray(TOKEN.encode())
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    del data[place]
                case _:
                    data.insert(place, chance.randrange(256))
        return bytes(data)

    for number in range(count):
        match number % 6:
            case 0:
                yield chance.randbytes(chance.randrange(5000))
            case 1:
                yield text(300)
            case 2:
                yield f"RXC1.{text(60)}.{text(90)}"
            case 3:
                yield mutated()
            case 4:
                claims = {name: value(2) for name in ("sid", "act", "iat", "exp", "surf", "jti")}
                yield signed({**CLAIMS, **dict(chance.sample(sorted(claims.items()), 2))})
            case _:
                yield chance.choice([value(4), {"x": value(2)}, mutated().decode("latin-1")])


def raising(original: Any, text: bytes) -> Any:
    return urlsafe_b64decode(text)


def keeping(original: Any, token: object) -> Any:
    KEPT.append(original(token))
    return KEPT[-1]


KEPT: list[object] = []


@pytest.mark.covers("AP5")
@controlled(
    raising=changed(_claims, "_from_base64url", raising),
    keeping=changed(_token, "read_token", keeping),
)
async def test_whatever_is_offered_there_is_a_verdict_and_nothing_is_kept() -> None:
    offered = list(random_inputs(5000))
    seen: set[str] = set()
    gc.collect()
    before = len(gc.get_objects())
    for token in offered:
        try:
            seen.add(verdict(token))
        except Exception as error:
            raise AssertionError(token) from error
    gc.collect()
    grown = len(gc.get_objects()) - before

    # Only the right verdicts are met at all if there is something to tell apart.
    assert {"malformed", "sig_invalid", "claims_invalid", "session_mismatch"} <= seen
    assert grown < 200
    KEPT.clear()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)
parts = st.tuples(
    st.sampled_from(["RXC1", "RXC2", ""]) | st.text(max_size=5),
    st.just(BODY)
    | st.binary(max_size=90).map(lambda data: as_base64url(data).decode())
    | st.text(),
    st.just(SIGNATURE) | st.binary(max_size=70).map(lambda data: as_base64url(data).decode()),
)


@given(anything | parts.map(".".join), st.text(), st.floats() | st.integers())
@pytest.mark.covers("AP5")
def test_whatever_else_can_be_offered_is_denied(token: object, session: str, now: float) -> None:
    assert verdict(token, session, now) != "ok" or (token, session) == (TOKEN, SESSION)


@given(st.text(alphabet=st.characters(codec="utf-8")) | st.binary())
@pytest.mark.covers("AP5")
def test_whatever_is_signed_has_a_verdict(text: str | bytes) -> None:
    assert verdict(signed_text(text)) in {"malformed", "unknown_kid", "claims_invalid"}


# ------------------------------------------------------------------ AP6, AP7: nothing but the token


def lenient(original: Any, text: bytes) -> Any:
    try:
        return urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    except ValueError:
        return None


def yes(_original: Any, *_arguments: object) -> bool:
    return True


def of_any_text(original: Any, key: bytes, signature: bytes, signed: bytes) -> bool:
    return original(key, signature, signed) or signed != f"{HEAD}.{BODY}".encode()


@pytest.mark.covers("AP6")
@controlled(
    lenient=changed(_claims, "_from_base64url", lenient),
    unsigned=changed(_token, "verifies", yes),
    of_any_text=changed(_token, "verifies", of_any_text),
)
async def test_every_bit_of_a_token_counts() -> None:
    right = TOKEN.encode()
    assert verdict(right) == "ok"
    for place in range(len(right)):
        for bit in range(8):
            flipped = bytearray(right)
            flipped[place] ^= 1 << bit
            assert verdict(bytes(flipped)) in {"malformed", "unknown_kid", "sig_invalid"}
            assert verdict(flipped.decode("latin-1")) != "ok"


@pytest.mark.covers("AP6")
@controlled(
    lenient=changed(_claims, "_from_base64url", lenient),
    unsigned=changed(_token, "verifies", yes),
)
async def test_what_is_put_together_from_tokens_is_none() -> None:
    other = with_claims(jti="x")
    other_body, other_signature = other.split(".")[1:]
    for token in (
        f"{HEAD}.{BODY}.{other_signature}",
        f"{HEAD}.{other_body}.{SIGNATURE}",
        f"{HEAD}.{SIGNATURE}.{BODY}",
        f"{BODY}.{HEAD}.{SIGNATURE}",
        signed(CLAIMS, seed=OTHER_SEED),
        *(f"{HEAD}.{BODY}{pad}.{SIGNATURE}" for pad in ("=", "==", "\n", " ", "*")),
        *(f"{HEAD}.{BODY}.{SIGNATURE}{pad}" for pad in ("=", "==", "\n", " ", "*")),
        *(f"{HEAD}.{BODY[:7]}{inner}{BODY[7:]}.{SIGNATURE}" for inner in "\n =*"),
        f"{HEAD}.{BODY}.{SIGNATURE.replace('-', '+').replace('_', '/')}",
        *(f"{HEAD}.{BODY}", f"{BODY}.{SIGNATURE}", f"{TOKEN}.", f"{TOKEN}.{SIGNATURE}", TOKEN * 2),
    ):
        assert verdict(token) in {"malformed", "sig_invalid"}, token


def of_any_prefix(original: Any, token: object) -> Any:
    return original(f"RXC1.{str(token).partition('.')[2]}")


def by_its_header(original: Any, key: bytes, signature: bytes, signed: bytes) -> bool:
    return bool(original(key, signature, signed)) or b'"alg"' in urlsafe_b64decode(
        signed[5:] + b"=="
    )


@pytest.mark.covers("AP7")
@controlled(
    by_its_header=changed(_token, "verifies", by_its_header),
    any_prefix=changed(
        _claims,
        "read_token",
        of_any_prefix,
    ),
)
async def test_there_is_one_algorithm_and_its_name_is_the_prefix() -> None:
    assert verdict(with_claims(alg="none")) == "ok"
    assert verdict(with_claims(alg="EdDSA")) == "ok"
    unsigned = as_base64url(b'{"alg":"none",' + urlsafe_b64decode(BODY + "==")[1:]).decode()
    assert verdict(f"RXC1.{unsigned}.{SIGNATURE}") == "sig_invalid"
    assert verdict(f"RXC1.{unsigned}.") == "malformed"
    header = as_base64url(b'{"alg":"none","typ":"JWT"}').decode()
    for prefix in ("RXC2", "rxc1", "RXC1 ", "none", "", header, "RXC11", "RXC"):
        assert _claims.read_token(f"{prefix}.{BODY}.{SIGNATURE}") is None
        assert verdict(f"{prefix}.{BODY}.{SIGNATURE}") == "malformed"
        well_signed = signed_text(urlsafe_b64decode(BODY + "=="), prefix=prefix)
        assert verdict(well_signed) == "malformed"


# ------------------------------------------------------------------ AP8, AP9: one session, for a time


def by_prefix(original: Any, claims: dict[str, Any], *, session_id: str, now: float) -> Any:
    near = session_id.startswith(str(claims.get("sid")))
    return original(claims, session_id=str(claims["sid"]) if near else session_id, now=now)


def trimmed(original: Any, claims: dict[str, Any], *, session_id: str, now: float) -> Any:
    return original(claims, session_id=session_id.strip(), now=now)


@pytest.mark.covers("AP8")
@controlled(
    by_prefix=changed(_token, "judge", by_prefix), trimmed=changed(_token, "judge", trimmed)
)
async def test_a_token_opens_the_one_session_that_it_names() -> None:
    assert verdict(TOKEN) == "ok"
    for session_id in (
        *(SESSION[:end] for end in range(len(SESSION))),
        *(f"{SESSION}{more}" for more in (" ", "\n", "\0", "2", "/", "/..", "\u200b")),
        *(f" {SESSION}", SESSION.upper(), SESSION[::-1], "sess-\uff4bat"),
    ):
        assert verdict(TOKEN, session_id) == "session_mismatch", session_id
        assert verdict(with_claims(sid=session_id), session_id) == "ok"
        assert verdict(with_claims(sid=session_id)) == "session_mismatch"


def later(seconds: float) -> Any:
    def wrong(original: Any, claims: dict[str, Any], *, session_id: str, now: float) -> Any:
        return original(claims, session_id=session_id, now=now + seconds)

    return changed(_token, "judge", wrong)


def numbers(original: Any, value: object) -> bool:
    return isinstance(value, (int, float))


@pytest.mark.covers("AP9")
@controlled(
    a_grace=later(-1),
    too_early=later(1),
    any_number=changed(_claims, "_is_integer", numbers),
)
async def test_a_token_lasts_from_its_issue_to_its_end() -> None:
    assert verdict(TOKEN, now=ENDS - 1) == "ok"
    assert verdict(TOKEN, now=ENDS) == "expired"
    assert verdict(TOKEN, now=ISSUED - 60) == "ok"
    assert verdict(TOKEN, now=ISSUED - 61) == "issued_in_future"
    for times in (
        {"exp": ISSUED},
        {"exp": ISSUED - 1},
        {"exp": 4102444801},
        {"exp": 10**300},
        {"exp": float(ENDS)},
        {"iat": 0},
        {"iat": -ISSUED},
        {"iat": True},
        {"iat": float(ISSUED)},
        {"iat": 10**300, "exp": 10**300 + 1},
        {"iat": -2, "exp": -1},
    ):
        assert verdict(with_claims(**times)) == "claims_invalid", times


# ------------------------------------------------------------------ AP10: one answer


def malformed() -> list[object]:
    """One of each kind, as they come from the wire; and what is well-formed and denied."""
    nested = "[" * 1400 + "]" * 1400
    return [
        *("", "x", ".", "..", "RXC1", "RXC1..", TOKEN + ".", f"{TOKEN}.{BODY}", f"{TOKEN}="),
        *(f"RXC2.{BODY}.{SIGNATURE}", f"none.{BODY}.{SIGNATURE}", f".{BODY}.{SIGNATURE}"),
        *(f"{HEAD}.{BODY}=.{SIGNATURE}", f"{HEAD}.{BODY}.{SIGNATURE[:-1]}B", f"{HEAD}.{BODY}.AAAA"),
        *(TOKEN.replace("e", "\u0435"), TOKEN + "\ufffd", "R" * 4097, TOKEN + "A" * 10**6),
        *(signed_text(text) for text in ("", "[1]", "null", '{"kid":""}', '{"kid":1}', nested)),
        *(signed_text(f'{{"kid":"k1","x":{text}}}') for text in ("NaN", '"\\ud800"', "1e999")),
        *(signed_text('{"kid":"k1","sid":"a","sid":"b"}'), signed_text(b'{"kid":"\xff"}')),
        *(None, True, False, 0, 1, -1.5, [], [TOKEN], {}, {"token": TOKEN}),
        *(with_claims(kid="k9"), signed(CLAIMS, seed=OTHER_SEED), with_claims(sid="other")),
        *(
            with_claims(act={}),
            with_claims(act=5),
            with_claims(surf=["web"]),
            with_claims(surf="w"),
        ),
        *(with_claims(exp=ISSUED + 1), with_claims(iat=NOW + 61), with_claims(min_offset=0)),
    ]


def counted(original: Any) -> RequestError:
    error: RequestError = original()
    COUNTED.append(error)
    error.message += "." * (len(COUNTED) % 2)
    return error


def wants_a_login(_original: Any) -> RequestError:
    return AuthRequired()


COUNTED: list[object] = []


class Silent(DurableAgent):
    async def prompt(self, turn: Turn) -> None: ...


# Hundreds of policies in threads: slow where others want the processors too.
@pytest.mark.bound(60)
@pytest.mark.covers("AP10")
@controlled(
    counted=changed(_durable_router, "attach_denied", counted),
    wants_a_login=changed(_durable_router, "attach_denied", wants_a_login),
)
async def test_whatever_is_wrong_with_a_token_the_answer_is_the_same() -> None:
    journal = MemoryJournal()
    writers = Writers(journal)
    await (await writers.ensure(SESSION, journal)).append(Entry("note", b"{}", "system"))
    await writers.aclose()
    reasons = list[str]()

    def watched(context: AttachContext) -> Grant:
        try:
            granted = at(NOW)(context)
        except AttachRefused as refused:
            reasons.append(refused.reason)
            raise
        reasons.append("left to the funnel")
        return granted

    durability = Durability(journal, policy=watched, clock=lambda: NOW)
    async with raw_client(Silent(), journal=durability) as raw:
        shaken = len(raw.raw_frames)
        asked = 1000
        # One that there is, and two that there never were.
        for session_id in (SESSION, "other", "never"):
            for token in malformed():
                if session_id == "other" and token == with_claims(sid="other"):
                    continue  # which is right for it
                for method in ("_raxol/session.load", "session/load"):
                    rider = {} if token is None else {"capability": token}
                    params: dict[str, Any] = {
                        "sessionId": session_id,
                        "cwd": "/",
                        "mcpServers": [],
                        "_meta": {"raxol.io": {"fromOffset": 99, **rider}},
                    }
                    asked += 1
                    await raw.ask(method, params, asked)

        # Not the lists as a whole: what is shown of two long ones that differ takes minutes to make.
        answers = raw.raw_frames[shaken:]
        denied = b'{"jsonrpc":"2.0","id":%d,"error":{"code":-32000,"message":"attach denied"}}'
        others = [answer for n, answer in enumerate(answers, 1001) if answer != denied % n]
        assert others[:1] == []
        assert len(answers) == asked - 1000
        assert len(reasons) == asked - 1000
        assert len(set(reasons)) >= 10
        right = {"sessionId": SESSION, "cwd": "/", "_meta": {"raxol.io": {"capability": TOKEN}}}
        assert "result" in await raw.ask("_raxol/session.load", right, 1)
    await durability.aclose()


# ------------------------------------------------------------------ AP11, AP12: whose keys


def from_the_token(original: Any, key: bytes, signature: bytes, text: bytes) -> bool:
    claims = _claims.unverified_claims(f"{text.decode()}.{SIGNATURE}") or {}
    shipped = claims.get("pub")
    return bool(
        original(bytes.fromhex(shipped) if isinstance(shipped, str) else key, signature, text)
    )


@pytest.mark.covers("AP11")
@controlled(from_the_token=changed(_token, "verifies", from_the_token))
async def test_a_key_is_believed_because_it_is_configured(tmp_path: Path) -> None:
    foreign = public_key(OTHER_SEED)
    shipped = {"pub": foreign.hex(), "jwk": {"kty": "OKP", "x": as_base64url(foreign).decode()}}
    # Beside a journal, a key is data like everything there.
    (tmp_path / "k2.pub").write_text(foreign.hex())

    assert verdict(signed({**CLAIMS, **shipped, "kid": "k2"}, seed=OTHER_SEED)) == "unknown_kid"
    assert verdict(signed({**CLAIMS, **shipped}, seed=OTHER_SEED)) == "sig_invalid"
    assert verdict(signed({**CLAIMS, **shipped})) == "ok"

    both = Keyring({"k1": PUBLIC, "k2": foreign})
    second = signed({**CLAIMS, "kid": "k2"}, seed=OTHER_SEED)
    assert verdict(second, keys=both) == "ok"
    assert verdict(TOKEN, keys=both) == "ok"
    assert verdict(TOKEN, keys=Keyring({"k2": foreign})) == "unknown_kid"
    # A key answers for its own id alone.
    assert verdict(signed({**CLAIMS, "kid": "k2"}), keys=both) == "sig_invalid"


ISSUER = "journal._issuer"


def reached_from(start: str) -> set[str]:
    """The modules of ours that importing or running one can import, late imports included."""
    paths = {name_of(path): path for path in modules()}
    reached, left = set[str](), [start]
    while left:
        name = left.pop()
        if name in reached or name not in paths:
            continue
        reached.add(name)
        left += [
            found.target.removeprefix("antiphon.")
            for found in imports(paths[name])
            if found.target.startswith("antiphon.")
        ]
    return reached


@pytest.mark.covers("AP12")
def test_no_way_leads_from_verifying_to_the_issuer() -> None:
    for verifying in ("_token", "_claims", "_keyring", "_ed25519", "_attach", "_policy"):
        assert ISSUER not in reached_from(f"journal.{verifying}")
    assert ISSUER in reached_from(ISSUER)
    assert "journal._claims" in reached_from("journal._token")


@pytest.mark.covers("AP12")
def test_a_process_that_verifies_never_loads_the_issuer() -> None:
    code = f"""
import sys
from antiphon.journal import Claims, Keyring, Token, verify_token
claims = verify_token({TOKEN!r}, Keyring({{"k1": {PUBLIC!r}}}), session_id={SESSION!r}, now={NOW})
assert isinstance(claims, Claims)
print("antiphon.journal._token" in sys.modules, "antiphon.journal._issuer" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)

    assert done.stdout == "True False\n", done.stderr


# ------------------------------------------------------------------ AP13: no live state


LIVE: list[Writer] = []


def needs_a_writer(original: Any, policy: Token, asked: AttachContext) -> Any:
    if not LIVE:
        raise AttachRefused("nobody writes it")
    return original(policy, asked)


async def attached(
    journal: MemoryJournal, writer: Writer | None, token: object
) -> tuple[Grant | Denied, list[bytes]]:
    """The verdict, and the frames of history if it admits."""
    granted = await admit(at(NOW), context(token))
    frames: list[bytes] = []
    if isinstance(granted, Grant):

        async def drained() -> None: ...

        log = await journal.open(SESSION)
        subscriber = Subscriber(
            log,
            writer,
            Rider(),
            aware=True,
            send=frames.append,
            writable=lambda: True,
            drain=drained,
            reply=lambda mark: frames.append(b"%d" % mark),
        )
        await subscriber.attach()
        subscriber.detach()
        await log.aclose()
    return granted, frames


@pytest.mark.covers("AP13")
@controlled(needs_a_writer=changed(Token, "__call__", needs_a_writer))
async def test_the_verdict_is_the_same_with_and_without_a_writer() -> None:
    journal = MemoryJournal()
    writers = Writers(journal)
    offered = [TOKEN, None, "x", with_claims(sid="other"), with_claims(exp=ISSUED + 1)]
    never = [await admit(at(NOW), context(token)) for token in offered]

    writer = await writers.ensure(SESSION, journal)
    await writer.append(Entry("note", b"{}", "system"))
    turn = await writer.begin_turn(journal)
    writer.complete_turn(journal, turn, stop_reason="end_turn")
    await writer.append(Entry("note", b"{}", "system"))
    LIVE.append(writer)
    live = [await attached(journal, writer, token) for token in offered]
    LIVE.clear()
    await writers.aclose()
    archived = [await attached(journal, None, token) for token in offered]

    assert [isinstance(one, Grant) for one in never] == [True, False, False, False, False]
    assert [one for one, _ in live] == never
    assert archived == live
    assert archived[0][1][-1] == b"5"
    assert not any(frames for _, frames in archived[1:])


# ------------------------------------------------------------------ AP14, AP20


@pytest.mark.covers("AP14")
async def test_a_grant_is_what_the_token_says_and_no_more() -> None:
    token = with_claims(
        act={"id": "alice@example", "kind": "user", "team": ["a"]},
        role="controller",
        scope="everything",
        lens="none",
        via="local_node",
        expires_at=0,
    )
    granted = await admit(at(NOW), context(token, actor={"id": "alice@example", "role": "root"}))

    assert granted == Grant(
        actor={"id": "alice@example", "kind": "user", "team": ["a"]},
        session_id=SESSION,
        via={"kind": "token", "kid": "k1"},
        scope="attach",
        expires_at=ENDS,
        lens=None,
    )


def as_claimed(original: Any, claims: dict[str, Any], *, session_id: str, now: float) -> Any:
    return original(claims, session_id=session_id, now=claims.get("now", now))


@pytest.mark.covers("AP20")
@controlled(
    as_claimed=changed(_token, "judge", as_claimed),
    by_the_system=changed(_token, "judge", by_the_clock),
)
async def test_what_time_it_is_the_verifier_says() -> None:
    told = [0.0]
    policy = Token(KEYRING, clock=lambda: told[0])
    token = with_claims(now=NOW, nbf=0, ts=NOW)
    asked = context(token, actor={"id": "alice@example", "now": NOW, "time": NOW})
    for now, expected in (
        (ISSUED - 61, "issued_in_future"),
        (ISSUED - 60, "ok"),
        (NOW, "ok"),
        (ENDS - 1, "ok"),
        (ENDS, "expired"),
    ):
        told[0] = now
        found = await admit(policy, copy.copy(asked))
        assert ("ok" if isinstance(found, Grant) else found.detail) == expected
