"""The text of a token, taken apart without a key, and its claims."""

from __future__ import annotations

import json
import string
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.journal._claims import (
    MAX_BYTES,
    Claims,
    as_base64url,
    judge,
    read_token,
    unverified_claims,
)
from tests.journal.tokens import CLAIMS, ISSUED, NOW, SESSION, TOKEN, signed, signed_text

SIGNATURE = TOKEN.rsplit(".", 1)[1]
BODY = TOKEN.split(".")[1]


def of_text(text: str | bytes) -> str:
    """A token over a text; what it is signed with is no matter here."""
    data = text.encode() if isinstance(text, str) else text
    return f"RXC1.{as_base64url(data).decode()}.{SIGNATURE}"


def test_a_token_is_taken_apart() -> None:
    read = read_token(TOKEN)

    assert read is not None
    assert read.kid == "k1"
    assert read.claims == CLAIMS
    assert read.signed == f"RXC1.{BODY}".encode()
    assert len(read.signature) == 64
    assert read_token(TOKEN.encode()) == read
    assert unverified_claims(TOKEN) == CLAIMS
    assert unverified_claims("RXC1") is None


@pytest.mark.parametrize(
    "token",
    [
        *(
            None,
            True,
            7,
            1.5,
            [],
            {},
            [TOKEN],
            {"token": TOKEN},
            bytearray(TOKEN.encode()),
            object(),
        ),
        *("", ".", "..", "...", "RXC1", "RXC1.", "RXC1..", f"RXC1.{BODY}", f"RXC1.{BODY}."),
        *(f"RXC1..{SIGNATURE}", f".{BODY}.{SIGNATURE}", f"{BODY}.{SIGNATURE}"),
        *(f"{TOKEN}.", f".{TOKEN}", f"{TOKEN}.x", f"{TOKEN}.{SIGNATURE}", TOKEN.replace(".", "")),
        *(f" {TOKEN}", f"{TOKEN} ", f"{TOKEN}\n", f"\ufeff{TOKEN}", f"{TOKEN}\0"),
        *(TOKEN.lower(), TOKEN.replace("RXC1", "rxc1"), TOKEN.replace("RXC1", "RXC2")),
        *(TOKEN.replace("RXC1", "none"), TOKEN.replace("RXC1", "")),
        TOKEN.replace("RXC1", "eyJhbGciOiJFZERTQSIsInR5cCI6IkpXVCJ9"),
        TOKEN.replace(".", "\u2024"),
        TOKEN.replace("e", "\uff45"),
        TOKEN + "\ud800",
    ],
)
@pytest.mark.covers("AP7")
def test_what_is_no_such_text_is_none(token: object) -> None:
    assert read_token(token) is None


def test_a_text_of_a_type_of_its_own_is_the_text_that_it_is() -> None:
    class Text(str):
        __slots__ = ()

        def raises(self, *_given: object, **_named: object) -> Any:
            raise AssertionError

        __len__ = encode = isascii = __getitem__ = __eq__ = split = raises  # pyright: ignore[reportAssignmentType]
        __hash__ = str.__hash__

    class Data(bytes):
        __len__ = split = __getitem__ = __eq__ = __bytes__ = Text.raises  # pyright: ignore[reportAssignmentType]
        __hash__ = bytes.__hash__

    assert unverified_claims(Text(TOKEN)) == CLAIMS
    assert unverified_claims(Data(TOKEN.encode())) == CLAIMS
    assert unverified_claims(Text("x" * 5000)) is None
    assert unverified_claims(Data(b"x" * 5000)) is None


@pytest.mark.parametrize(
    "signature",
    [
        SIGNATURE + "=",
        SIGNATURE + "==",
        SIGNATURE[:-1],
        SIGNATURE + "A",
        SIGNATURE[:-1] + "B",  # the same bytes, by a decoder that is not strict
        SIGNATURE.replace("-", "+"),
        SIGNATURE.replace("_", "/"),
        SIGNATURE[:10] + "\n" + SIGNATURE[10:],
        SIGNATURE[:10] + " " + SIGNATURE[10:],
        SIGNATURE[:10] + "*" + SIGNATURE[10:],
        SIGNATURE[:10] + "=" + SIGNATURE[10:],
        as_base64url(bytes(63)).decode(),
        as_base64url(bytes(65)).decode(),
    ],
)
@pytest.mark.covers("AP6")
def test_a_signature_is_64_bytes_in_strict_base64url(signature: str) -> None:
    assert signature != SIGNATURE
    assert read_token(f"RXC1.{BODY}.{signature}") is None


@pytest.mark.covers("AP6")
def test_the_text_of_the_claims_is_strict_base64url() -> None:
    # 111 bytes are 148 characters: all bits are used. With one byte more, two bits or four are not.
    for spaces in range(3):
        right = as_base64url(json.dumps(CLAIMS).encode() + b" " * spaces).decode()
        assert read_token(f"RXC1.{right}.{SIGNATURE}") is not None
        loose = {
            right[:-1] + last
            for last in string.ascii_letters + string.digits + "-_"
            if last != right[-1]
        }
        wrong = [right + "=", right + "==", right + "A", right[:9] + "\n" + right[9:], right + " "]
        if len(right) % 4:
            # What differs in loose bits alone decodes to the same bytes.
            assert all(
                read_token(f"RXC1.{text}.{SIGNATURE}") is None
                or unverified_claims(f"RXC1.{text}.{SIGNATURE}") != CLAIMS
                for text in loose
            )
            last = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
            next_to_it = right[:-1] + last[last.index(right[-1]) + 1]
            wrong.append(next_to_it)
        for text in wrong:
            assert read_token(f"RXC1.{text}.{SIGNATURE}") is None, text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "null", "true", "1", '"k1"', "[1]", '[{"kid":"k1"}]', "{", '{"kid":"k1"'),
        *("{}", '{"kid":""}', '{"kid":null}', '{"kid":1}', '{"kid":["k1"]}', '{"Kid":"k1"}'),
        *('{"kid":"k1"} x', '{"kid":"k1"}{}', '{"kid":"k1",}', "{'kid':'k1'}", '{kid:"k1"}'),
        *('{"kid":"k1","x":NaN}', '{"kid":"k1","x":Infinity}', '{"kid":"k1","x":-Infinity}'),
        *('{"kid":"k1","x":1e999}', '{"kid":"k1","x":[-1e999]}', '{"kid":"k1","x":01}'),
        *('{"kid":"k1","x":"\\ud800"}', '{"kid":"k1","\\udfff":1}', '{"kid":"\\ud800"}'),
        *('{"kid":"k1","x":["\\ude00\\ud83d"]}', '{"kid":"k1","x":"a\nb"}', '{"kid":"k1" /**/}'),
        *('{"kid":"k1","kid":"k2"}', '{"kid":"k1","x":1,"x":1.0}', '{"kid":"k1","x":1,"x":true}'),
        *('{"kid":"k1","x":0,"x":false}', '{"kid":"k1","x":null,"x":""}'),
        *('{"kid":"k1","x":[1],"x":[true]}', '{"kid":"k1","act":{"id":"a","id":"b"}}'),
        *('{"kid":"k1","x":[{"y":1,"y":2}]}', '{"kid":"k1","k\\u0069d":"k2"}'),
        "\ufeff" + '{"kid":"k1"}',
        b'{"kid":"k1","x":"\xff"}',
        b'{"kid":"k1","x":"\xed\xa0\x80"}',
        b'{"kid":"k1","x":"\xc0\xaf"}',
        '{"kid":"k1"}'.encode("utf-16"),
        '{"kid":"k1","x":' + "9" * 2900 + "e9}",
    ],
)
def test_claims_are_a_strict_json_object_with_a_key_id(text: str | bytes) -> None:
    assert read_token(of_text(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"kid":"k1","kid":"k1"}',
        '{"kid":"k1","sid":"s","sid":"s"}',
        '{"kid":"k1","x":{"a":1,"b":[true]},"x":{"b":[true],"a":1}}',
        '{"kid":"k1","k\\u0069d":"k1"}',
        ' \n{"kid" : "k1"}\t',
        '{"kid":"k1","x":"\\ud83d\\ude00"}',
        '{"kid":"k1","x":"\U0001f600\\u0000"}',
        '{"kid":"k1","x":' + "9" * 2900 + "}",
    ],
)
def test_what_is_harmless_is_accepted(text: str) -> None:
    read = read_token(of_text(text))

    assert read is not None
    assert read.kid == "k1"


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_nesting_is_malformed_wherever_it_is_looked_at(opening: str) -> None:
    closing = "".join("]" if mark == "[" else "}" for mark in reversed(opening) if mark in "[{")
    levels = sum(mark in "[{" for mark in opening)

    def nested(times: int) -> str:
        return of_text('{"kid":"k1","x":' + opening * times + "1" + closing * times + "}")

    def from_below(frames: int, token: str) -> bool:
        return read_token(token) is not None if not frames else from_below(frames - 1, token)

    room = sys.getrecursionlimit() - 250
    fits = 62 // levels
    for frames in (0, room - len_of_stack()):
        assert from_below(frames, nested(fits))
        assert not from_below(frames, nested(fits + 2))
        assert not from_below(frames, nested(2900 // (len(opening) + len(closing))))
    # Where hardly anything is left of the stack, it may be denied, and raises nothing all the same.
    assert isinstance(from_below(sys.getrecursionlimit() - len_of_stack() - 40, nested(fits)), bool)
    # Never closed: as deep as 4096 bytes go.
    assert read_token(of_text(opening * (2900 // len(opening)))) is None


def len_of_stack() -> int:
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame, count = frame.f_back, count + 1
    return count


def test_4096_bytes_are_looked_at_and_no_more() -> None:
    def of_length(length: int) -> str:
        room = length - len("RXC1..") - len(SIGNATURE)
        text = '{"kid":"k1"}'
        return of_text(text + " " * (room * 3 // 4 - len(text)))

    assert len(of_length(MAX_BYTES)) == MAX_BYTES
    assert read_token(of_length(MAX_BYTES)) is not None
    assert read_token(of_length(MAX_BYTES).encode()) is not None
    longer = of_length(MAX_BYTES + 2)  # base64 has no text of a length between
    assert len(longer) == MAX_BYTES + 2
    assert read_token(longer) is None
    assert read_token(longer.encode()) is None
    assert read_token("\u00e9" * 2049) is None


# ------------------------------------------------------------------ what they say


def verdict(now: float = NOW, session_id: str = SESSION, /, **changed: Any) -> Claims | str:
    claims = {**CLAIMS, **changed}
    claims = {name: value for name, value in claims.items() if value is not ...}
    return judge(claims, session_id=session_id, now=now)


def test_right_claims_come_typed() -> None:
    assert verdict() == Claims(
        "k1", SESSION, {"id": "alice@example", "kind": "user"}, ISSUED, ISSUED + 3600
    )
    found = verdict(surf=["web", "tty"])
    assert isinstance(found, Claims)
    assert found.surf == ("web", "tty")


WRONG: dict[str, list[Any]] = {
    "sid": [..., None, 42, True, [], ["sess-kat"], {}],
    "act": [..., None, "a", 1, True, [], [{"id": "a"}]],
    "iat": [..., None, True, False, 0, -1, 1.7e9, 1700000000.0, "1700000000", [], 10**30],
    "exp": [
        ...,
        None,
        True,
        1700003600.0,
        "1700003600",
        0,
        -1,
        ISSUED,
        ISSUED - 1,
        4102444801,
        10**30,
    ],
}


def test_claims_stay_as_they_were_signed() -> None:
    found, read = verdict(), read_token(TOKEN)

    for said in (found, read):
        with pytest.raises(AttributeError):
            said.kid = "k2"  # type: ignore[union-attr,misc]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


@pytest.mark.parametrize(
    "changed",
    [
        *({name: value} for name, values in WRONG.items() for value in values),
        {"iat": 10**30, "exp": 10**30 + 1},
    ],
)
@pytest.mark.covers("AP9")
def test_types_and_ranges_are_checked(changed: dict[str, Any]) -> None:
    assert verdict(**changed) == "claims_invalid"


@pytest.mark.covers("AP9")
def test_the_bounds_of_time_are_exact() -> None:
    assert verdict(ISSUED + 3599) == verdict()
    assert verdict(ISSUED + 3599.999) == verdict()
    assert verdict(ISSUED + 3600) == "expired"
    assert verdict(ISSUED - 60) == verdict()
    assert verdict(ISSUED - 60.001) == "issued_in_future"
    assert verdict(ISSUED - 61) == "issued_in_future"
    assert isinstance(verdict(exp=4102444800), Claims)
    assert isinstance(verdict(1, iat=1, exp=2), Claims)


@pytest.mark.parametrize("now", [float("nan"), float("inf"), float("-inf"), -1, 0, 10**40])
def test_a_clock_that_is_wrong_admits_nobody(now: float) -> None:
    assert verdict(now) in {"expired", "issued_in_future"}


def test_the_first_failure_is_the_one_that_is_named() -> None:
    wrong: dict[str, Any] = {"surf": "web", "min_offset": 5}
    assert verdict(0, "other", iat=True, **wrong) == "claims_invalid"
    assert verdict(0, "other", **wrong) == "session_mismatch"
    assert verdict(1, iat=900, exp=1000, **wrong) == "issued_in_future"
    assert verdict(10**11, **wrong) == "expired"
    assert verdict(**wrong) == "unsupported_restrictive_claim"
    assert verdict(surf="web") == "claims_invalid"


@pytest.mark.parametrize("value", [None, 0, 5, "", False, [], {}])
@pytest.mark.covers("AP17")
def test_a_least_offset_denies_by_being_there(value: object) -> None:
    assert verdict(min_offset=value) == "unsupported_restrictive_claim"


@pytest.mark.parametrize("value", [None, "web", {}, 1, True, [1], ["web", None], [["web"]]])
@pytest.mark.covers("AP17")
def test_surfaces_that_are_no_list_of_texts_deny(value: object) -> None:
    assert verdict(surf=value) == "claims_invalid"


@pytest.mark.parametrize("more", [{"jti": "x"}, {"jti": None}, {"alg": "none"}, {"role": "owner"}])
@pytest.mark.covers("AP7")
def test_what_is_not_known_changes_nothing(more: dict[str, Any]) -> None:
    assert verdict(**more) == verdict()


@pytest.mark.parametrize(
    "session_id", ["sess-ka", "sess-kat2", "", "sess-kat ", " sess-kat", "SESS-KAT", "sess-kat\0"]
)
@pytest.mark.covers("AP8")
def test_a_session_is_compared_exactly(session_id: str) -> None:
    assert verdict(NOW, session_id) == "session_mismatch"


def test_texts_that_only_look_alike_are_different_sessions() -> None:
    assert verdict(NOW, "caf\u00e9", sid="cafe\u0301") == "session_mismatch"
    assert isinstance(verdict(NOW, "caf\u00e9", sid="caf\u00e9"), Claims)


# ------------------------------------------------------------------ any claims


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["sid", "act", "iat", "exp", "surf", "kid", "x"]), json_values)
)
def test_any_claims_come_back_as_they_were_and_have_a_verdict(claims: dict[str, Any]) -> None:
    token = signed({**claims, "kid": "k1"})
    read = read_token(token)

    assert (read is not None) == (len(token) <= MAX_BYTES)
    if read is not None:
        assert read.claims == {**claims, "kid": "k1"}
        assert isinstance(judge(read.claims, session_id="s", now=NOW), (str, Claims))


@given(st.binary(max_size=200))
def test_a_text_that_is_accepted_is_the_only_one_for_its_bytes(data: bytes) -> None:
    read = read_token(of_text(data))

    if read is not None:
        assert read.signed == b"RXC1." + as_base64url(data)
    assert read_token(signed_text(b'{"kid":"k1"}' + b" " * len(data))) is not None
