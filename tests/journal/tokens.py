"""The known-answer token, and tokens that no issuer of ours would sign."""

from __future__ import annotations

import json
from typing import Any, Final

from antiphon.journal._claims import as_base64url
from antiphon.journal._ed25519 import public_key, sign
from antiphon.journal._keyring import Keyring

#: RFC 8032, test 1: anybody may know it.
SEED: Final = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC: Final = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
OTHER_SEED: Final = bytes(range(32))
ISSUED: Final = 1_700_000_000
ENDS: Final = 1_700_003_600
NOW: Final = 1_700_000_100
SESSION: Final = "sess-kat"
CLAIMS: Final[dict[str, Any]] = {
    "sid": SESSION,
    "act": {"id": "alice@example", "kind": "user"},
    "iat": ISSUED,
    "exp": ENDS,
    "kid": "k1",
}
TOKEN: Final = (
    "RXC1."
    "eyJzaWQiOiJzZXNzLWthdCIsImFjdCI6eyJpZCI6ImFsaWNlQGV4YW1wbGUiLCJraW5kIjoidXNlciJ9LCJpYXQiOjE3MDAw"
    "MDAwMDAsImV4cCI6MTcwMDAwMzYwMCwia2lkIjoiazEifQ."
    "86CeTk2VQiSzlSy1D155TyaqB7X6A0uqW_oRoB6d-68mbvWBTshI9v7Ptu8GDY6PuxQ4Ysd1Ox9tpKbDOaoWDA"
)
KEYRING: Final = Keyring({"k1": PUBLIC})
OTHER_KEYRING: Final = Keyring({"k1": public_key(OTHER_SEED)})


def signed_text(text: str | bytes, *, seed: bytes = SEED, prefix: str = "RXC1") -> str:
    """A token over any text at all, well signed."""
    data = text.encode() if isinstance(text, str) else text
    signed = prefix.encode() + b"." + as_base64url(data)
    return (signed + b"." + as_base64url(sign(seed, signed))).decode()


def signed(claims: object, *, seed: bytes = SEED) -> str:
    """A token with any claims at all, well signed."""
    return signed_text(json.dumps(claims, separators=(",", ":")), seed=seed)


def with_claims(**changed: Any) -> str:
    """The known token with other claims; `...` leaves one out."""
    claims = {**CLAIMS, **changed}
    return signed({name: value for name, value in claims.items() if value is not ...})
