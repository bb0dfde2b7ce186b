"""Ed25519 signatures, by `cryptography`: the only module that imports it (extra `tokens`).

Responsible for bytes alone: 32 of a seed, 32 of a public key, 64 of a signature. Leaves what is signed,
and which key is believed, to `_token` and `_issuer`.
"""

from __future__ import annotations

from typing import Final

from antiphon._errors import MissingExtra

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
except ImportError:
    raise MissingExtra("tokens", "signing and verifying tokens") from None

__all__ = ["KEY_BYTES", "new_seed", "public_key", "sign", "verifies"]

#: Of a seed, and of a public key.
KEY_BYTES: Final = 32


def verifies(key: bytes, signature: bytes, signed: bytes) -> bool:
    """Whether the signature is the key's over these bytes; False for a key that is no point."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(seed: bytes, signed: bytes) -> bytes:
    """The signature over these bytes; the same seed and bytes always give the same (RFC 8032)."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign(signed)


def public_key(seed: bytes) -> bytes:
    """The public key of a seed."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def new_seed() -> bytes:
    """A seed that nobody else has, from the system's source of randomness."""
    return Ed25519PrivateKey.generate().private_bytes_raw()
