"""What an RXC1 token says: its text taken apart, and its claims judged (resumable-sessions §11.5).

Responsible for every check that needs no key: the form of the text (V1 to V6) and the types, ranges
and times of the claims (V9 to V12a). All of it is total and pure: whatever is given, there is a result,
no exception, and the same one each time. Leaves keys to `_keyring`, the signature to `_token`.

::

    token  = "RXC1." C "." S
    C      = base64url without padding of the claims, a JSON object
    S      = base64url without padding of the signature of the ASCII text "RXC1." C
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeGuard, cast

import msgspec

from antiphon.schema import json_depth_exceeds

__all__ = [
    "MAX_BYTES",
    "MAX_EXPIRY",
    "PREFIX",
    "Claims",
    "TokenFailure",
    "Unverified",
    "as_base64url",
    "judge",
    "read_token",
    "unverified_claims",
]

#: Nothing longer is looked at.
MAX_BYTES: Final = 4096
#: It stands for the one algorithm; there is no other to be talked into.
PREFIX: Final = b"RXC1"
#: The last `exp`, 2100-01-01T00:00:00Z in Unix seconds.
MAX_EXPIRY: Final = 4102444800
#: How far the issuer's clock may be ahead of ours, in seconds. There is no grace at the other end.
SKEW: Final = 60

_SIGNATURE_BYTES: Final = 64
# Claims are flat, but for a holder's own members. An interpreter's bound on recursion depends on where
# it stands, and the same token must have the same verdict everywhere.
_MAX_DEPTH: Final = 64

#: Why a token is denied; for logs, never for the peer.
TokenFailure: TypeAlias = Literal[
    "malformed",
    "unknown_kid",
    "sig_invalid",
    "claims_invalid",
    "session_mismatch",
    "expired",
    "issued_in_future",
    "unsupported_restrictive_claim",
]


class Claims(msgspec.Struct, frozen=True):
    """What a verified token says.

    Attributes:
        kid: the key that signed it.
        sid: the one session that it opens.
        act: who holds it; needs a string `id` to be admitted.
        iat: when it was issued, in Unix seconds.
        exp: when it ends, in Unix seconds; at `exp` it is over.
        surf: the surfaces that it is good for, None for any.
    """

    kid: str
    sid: str
    act: dict[str, Any]
    iat: int
    exp: int
    surf: tuple[str, ...] | None = None


class Unverified(msgspec.Struct, frozen=True):
    """A token whose form is right; nothing in it is to be believed but which key to try.

    Attributes:
        kid: the key that it names.
        claims: all that it says.
        signed: the bytes that are signed.
        signature: 64 bytes.
    """

    kid: str
    claims: dict[str, Any]
    signed: bytes
    signature: bytes


def read_token(token: object) -> Unverified | None:
    """Take a token apart, without a key (V1 to V6); None where its form is wrong. Never raises."""
    text = _as_bytes(token)
    if text is None:
        return None
    parts = text.split(b".")
    # An empty part is neither a signature nor JSON.
    if len(parts) != 3 or parts[0] != PREFIX:
        return None
    signature = _from_base64url(parts[2])
    if signature is None or len(signature) != _SIGNATURE_BYTES:
        return None
    encoded = _from_base64url(parts[1])
    if encoded is None:
        return None
    claims = _from_json(encoded)
    if not _is_object(claims):
        return None
    kid = claims.get("kid")
    if not isinstance(kid, str) or not kid:
        return None
    return Unverified(kid, claims, parts[0] + b"." + parts[1], signature)


def unverified_claims(token: object) -> dict[str, Any] | None:
    """What a token says, for a person to look at; None where its form is wrong. Never raises.

    Nothing in it is proved: anybody can write such a text. `verify_token` is what decides.
    """
    read = read_token(token)
    return None if read is None else read.claims


def judge(claims: dict[str, Any], *, session_id: str, now: float) -> Claims | TokenFailure:
    """The claims of a token whose signature is right (V9 to V12a), or why they open nothing.

    Args:
        claims: as `read_token` gives them.
        session_id: the session that is asked for.
        now: Unix seconds, by the clock of whoever decides.
    """
    sid, act, iat, exp = (claims.get(name) for name in ("sid", "act", "iat", "exp"))
    if not (isinstance(sid, str) and _is_object(act) and _is_integer(iat) and _is_integer(exp)):
        return "claims_invalid"
    if not 0 < iat < exp <= MAX_EXPIRY:
        return "claims_invalid"
    if sid != session_id:
        return "session_mismatch"
    # Written so that a clock that gives NaN admits nobody.
    if not now < exp:
        return "expired"
    if not iat <= now + SKEW:
        return "issued_in_future"
    if "min_offset" in claims:
        return "unsupported_restrictive_claim"
    surf = claims.get("surf")
    if "surf" in claims and not _is_strings(surf):
        return "claims_invalid"
    kid = cast("str", claims.get("kid"))
    return Claims(kid, sid, act, iat, exp, None if surf is None else tuple(surf))


def as_base64url(data: bytes) -> bytes:
    """Bytes in base64url without padding."""
    return urlsafe_b64encode(data).rstrip(b"=")


# -- the text


def _as_bytes(token: object) -> bytes | None:
    """V1: at most 4096 bytes of ASCII; nothing else can be a token."""
    # The types' own methods: a subclass may have others, and they may do anything.
    if isinstance(token, str):
        # Counted before it is copied: a character is at least a byte.
        if str.__len__(token) > MAX_BYTES or not str.isascii(token):
            return None
        return str.encode(token)
    if isinstance(token, bytes) and bytes.__len__(token) <= MAX_BYTES:
        return bytes.__getitem__(token, slice(None))
    return None


def _from_base64url(text: bytes) -> bytes | None:
    """Strict: the decoder passes over foreign characters and loose bits, so it has to come out again."""
    try:
        data = urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    except ValueError:
        return None
    return data if as_base64url(data) == text else None


def _from_json(encoded: bytes) -> object:
    """The value of a strict JSON text in UTF-8, None also for what is none.

    Strict: no NaN, no number that is none in a double, no half of a surrogate pair, no member twice
    with two values (decoders disagree on which of them counts).
    """
    if json_depth_exceeds(encoded, _MAX_DEPTH):
        return None
    try:
        value: object = json.loads(
            encoded.decode(), object_pairs_hook=_members, parse_constant=_no_number
        )
        # What cannot be written again is what JSON in UTF-8 cannot hold: 1e999, and half a pair.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members and _text(members[name]) != _text(value):
            raise ValueError(name)
        members[name] = value
    return members


def _text(value: object) -> str:
    # By their texts, because `1 == True == 1.0` here, and nowhere else.
    return json.dumps(value, sort_keys=True)


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


# -- types, as JSON has them


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(
        isinstance(item, str) for item in cast("list[object]", value)
    )
