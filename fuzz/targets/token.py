"""`verify_token`: total, admits nothing that is not signed, and of what is signed only what it should.

The data is offered as a token, and as the claims of one that is well signed; a slow reference says what
those come to. It needs the extra `tokens`.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, cast

from antiphon.journal import Claims, Keyring, unverified_claims, verify_token
from antiphon.journal._claims import read_token
from antiphon.journal._ed25519 import public_key, sign

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = bytes(range(32))
KEYRING = Keyring({"k1": public_key(SEED)})
SESSION, NOW = "s", 1_700_000_100


def check(data: bytes) -> None:
    _offered(data)
    signed = b"RXC1." + base64.urlsafe_b64encode(data).rstrip(b"=")
    token = signed + b"." + base64.urlsafe_b64encode(sign(SEED, signed)).rstrip(b"=")
    found = verify_token(token, KEYRING, session_id=SESSION, now=NOW)
    assert found == verify_token(token.decode(), KEYRING, session_id=SESSION, now=NOW)
    claims = _reference(data) if len(token) <= 4096 else None
    assert unverified_claims(token) == claims
    assert (found == "malformed") == (claims is None)
    if claims is not None:
        assert isinstance(found, Claims) == _opens(claims), found
    # A byte more or less, and it is another text, which nobody signed.
    for other in (token[:-1], token + b"=", token.replace(b".", b"..", 1), b"." + token):
        assert isinstance(verify_token(other, KEYRING, session_id=SESSION, now=NOW), str)


def _offered(data: bytes) -> None:
    for token in (data, data.decode("latin-1"), data.decode("utf-8", "surrogateescape")):
        found = verify_token(token, KEYRING, session_id=SESSION, now=NOW)
        read = read_token(token)
        assert (found == "malformed") == (read is None)
        if read is not None:
            # There is one text for what it says: the one that was offered.
            assert read.signed + b"." + base64.urlsafe_b64encode(read.signature)[:-2] == data
        if isinstance(found, Claims):
            assert read is not None
            assert read.signature == sign(SEED, read.signed)


def _reference(data: bytes) -> dict[str, Any] | None:
    """The claims, where they are a strict JSON object with a key id."""
    if _depth(data) > 64:
        return None
    try:
        pairs = json.loads(data.decode(), object_pairs_hook=_Members)
        value = _strict(pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    claims = cast("dict[str, Any]", value)
    kid = claims.get("kid")
    return claims if isinstance(kid, str) and kid else None


class _Members(list[tuple[str, Any]]):
    """An object as it is written, with whatever it has twice."""


def _strict(value: Any) -> Any:
    if isinstance(value, _Members):
        members: dict[str, Any] = {}
        for name, item in value:
            name.encode()
            strict = _strict(item)
            if name in members and not _same(members[name], strict):
                raise ValueError(name)
            members[name] = strict
        return members
    if isinstance(value, list):
        return [_strict(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, str):
        value.encode()
    if isinstance(value, float) and value - value != 0:
        raise ValueError("NaN or infinite")
    return value


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        first, second = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return first.keys() == second.keys() and all(
            _same(first[key], second[key]) for key in first
        )
    if isinstance(one, list):
        items, others = cast("Sequence[Any]", one), cast("Sequence[Any]", other)
        return len(items) == len(others) and all(map(_same, items, others))
    return repr(one) == repr(other)


def _depth(data: bytes) -> int:
    """How deep brackets nest, outside of strings."""
    depth = deepest = 0
    inside = escaped = False
    for byte in data:
        if inside:
            inside, escaped = escaped or byte != 0x22, byte == 0x5C and not escaped
        elif byte == 0x22:
            inside = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _opens(claims: dict[str, Any]) -> bool:
    sid, act, iat, exp = (claims.get(name) for name in ("sid", "act", "iat", "exp"))
    surf = claims.get("surf", [])
    return (
        claims["kid"] == "k1"
        and sid == SESSION
        and type(act) is dict
        and type(iat) is int
        and type(exp) is int
        and 0 < iat < exp <= 4102444800
        and iat <= NOW + 60
        and exp > NOW
        and "min_offset" not in claims
        and type(surf) is list
        and all(type(name) is str for name in cast("list[object]", surf))
    )
