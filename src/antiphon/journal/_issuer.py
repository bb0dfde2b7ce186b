"""Mints RXC1 tokens with a private seed (resumable-sessions §11.5).

Responsible for the seed's way in, and for the bounds of what is signed. Whoever verifies never imports
this: a process that only admits sessions has no need of a seed, and should not have one. A seed is never
in a text of ours: no error, `repr` or log holds it.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from antiphon._errors import AntiphonError
from antiphon.journal._claims import (
    MAX_EXPIRY,
    PREFIX,
    Claims,
    as_base64url,
    judge,
    read_token,
)
from antiphon.journal._ed25519 import KEY_BYTES, new_seed, public_key, sign
from antiphon.journal._keyring import from_hex, read_key_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["ARCHIVAL_TTL", "DEFAULT_TTL", "Issuer", "IssuerError", "IssuerFailure", "new_seed"]

#: The longest life of a token, in seconds, where nothing else is said: an hour.
DEFAULT_TTL: Final = 3600
#: The same with `archival=True`: 30 days.
ARCHIVAL_TTL: Final = 2_592_000

IssuerFailure: TypeAlias = Literal[
    "privkey_env_missing",
    "privkey_file_missing",
    "privkey_invalid",
    "missing_or_invalid_lifetime",
    "ttl_too_long",
    "claims_invalid",
]

_WORDS: Final[dict[str, str]] = {
    "privkey_env_missing": "the environment variable that should hold the private seed is not set",
    "privkey_file_missing": "the file that should hold the private seed cannot be read",
    "privkey_invalid": "a private seed is 32 bytes or 64 hex digits, and this is neither",
    "missing_or_invalid_lifetime": "`iat` and `exp` are whole Unix seconds, and `exp` is the later",
    "ttl_too_long": "the token would live longer than it may",
    "claims_invalid": "with these claims no verifier could ever admit anybody",
}


class IssuerError(AntiphonError, ValueError):
    """A token was not minted.

    Attributes:
        failure: why: "privkey_env_missing", "privkey_file_missing", "privkey_invalid",
            "missing_or_invalid_lifetime", "ttl_too_long" or "claims_invalid".
    """

    def __init__(self, failure: IssuerFailure) -> None:
        super().__init__(failure)
        self.failure: IssuerFailure = failure

    def __str__(self) -> str:
        return f"{self.failure}: {_WORDS[self.failure]}"


class Issuer:
    """Signs tokens with one private seed, under one key id.

    The seed is fetched anew for each token, so that it can be replaced, and is kept by nothing here
    but where it was given as a value.

    Args:
        seed: 32 bytes, 64 hex digits, the path of a file with either, or a function that gives either
            of the first two. From the environment: `Issuer.from_env`.
        kid: the id by which verifiers know the public key.
        clock: gives Unix seconds.

    Raises:
        IssuerError: "claims_invalid" for an empty `kid`. Whatever is wrong with the seed is raised
            when it is needed.
    """

    __slots__ = ("_clock", "_fetch", "kid")

    def __init__(
        self,
        seed: bytes | str | os.PathLike[str] | Callable[[], bytes | str],
        *,
        kid: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not kid:
            raise IssuerError("claims_invalid")
        self.kid = kid
        self._clock = clock
        self._fetch: Callable[[], bytes | str]
        if callable(seed):
            self._fetch = seed
        elif isinstance(seed, (bytes, str)):
            self._fetch = _Held(seed)
        else:
            self._fetch = _File(seed)

    @classmethod
    def from_env(cls, name: str, *, kid: str, clock: Callable[[], float] = time.time) -> Issuer:
        """An issuer whose seed is in an environment variable, as 64 hex digits.

        Raises:
            IssuerError: as for the class; "privkey_env_missing" when a token is minted and there is
                no such variable.
        """
        return cls(_Variable(name), kid=kid, clock=clock)

    def __repr__(self) -> str:
        return f"Issuer(kid={self.kid!r})"

    @property
    def public_key(self) -> bytes:
        """The 32 bytes that verifiers need.

        Raises:
            IssuerError: the seed cannot be had.
        """
        return public_key(self._seed())

    def mint(
        self,
        session_id: str,
        actor: str | Mapping[str, Any],
        *,
        ttl: int = DEFAULT_TTL,
        surfaces: Collection[str] | None = None,
        archival: bool = False,
        max_ttl: int | None = None,
    ) -> str:
        """A token that opens one session from now on.

        Args:
            session_id: the session.
            actor: who holds it: an id, or an object with a string `id` and what else is told of them.
            ttl: how long it is good for, in seconds.
            surfaces: where alone it is good for, by the names that the agent's side gives its
                surfaces; None for anywhere.
            archival: it may live for 30 days, in place of an hour.
            max_ttl: the longest life in seconds, in place of both.

        Raises:
            IssuerError: the seed cannot be had, the life is too long or none, or nobody could be
                admitted with it.
        """
        if isinstance(surfaces, str):  # a collection of its letters
            raise IssuerError("claims_invalid")
        if type(ttl) is not int:
            raise IssuerError("missing_or_invalid_lifetime")
        now = int(self._clock())
        claims: dict[str, Any] = {
            "sid": session_id,
            "act": {"id": actor, "kind": "user"} if isinstance(actor, str) else dict(actor),
            "iat": now,
            "exp": now + ttl,
        }
        if not isinstance(claims["act"].get("id"), str):
            raise IssuerError("claims_invalid")
        if surfaces is not None:
            claims["surf"] = list(surfaces)
        return self.sign(claims, archival=archival, max_ttl=max_ttl)

    def sign(
        self, claims: Mapping[str, Any], *, archival: bool = False, max_ttl: int | None = None
    ) -> str:
        """A token with these claims, in their order; `kid` is set last, whatever it was.

        Args:
            claims: JSON values; `iat` and `exp` in Unix seconds.
            archival: it may live for 30 days, in place of an hour.
            max_ttl: the longest life in seconds, in place of both.

        Raises:
            IssuerError: the seed cannot be had, the life is too long or none, or no verifier could
                accept these claims.
        """
        said = {name: value for name, value in claims.items() if name != "kid"}
        said["kid"] = self.kid
        _check_lifetime(said, ARCHIVAL_TTL if archival else DEFAULT_TTL, max_ttl)
        try:
            text = json.dumps(said, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            signed = PREFIX + b"." + as_base64url(text.encode())
        except (TypeError, ValueError, RecursionError):
            # Its text may hold the values of the claims.
            raise IssuerError("claims_invalid") from None
        token = signed + b"." + as_base64url(sign(self._seed(), signed))
        if not _could_be_accepted(token, said):
            raise IssuerError("claims_invalid")
        return token.decode("ascii")

    def _seed(self) -> bytes:
        seed = self._fetch()
        found = from_hex(seed) if isinstance(seed, str) else seed
        if not isinstance(found, bytes) or len(found) != KEY_BYTES:
            raise IssuerError("privkey_invalid")
        return found


def _check_lifetime(claims: dict[str, Any], cap: int, max_ttl: int | None) -> None:
    issued, ends = claims.get("iat"), claims.get("exp")
    if type(issued) is not int or type(ends) is not int or not 0 < issued < ends <= MAX_EXPIRY:
        raise IssuerError("missing_or_invalid_lifetime")
    if ends - issued > (cap if max_ttl is None else max_ttl):
        raise IssuerError("ttl_too_long")


def _could_be_accepted(token: bytes, claims: dict[str, Any]) -> bool:
    """Whether a verifier reads what was meant, and would admit somebody with it, at some time."""
    read = read_token(token)
    return read is not None and isinstance(
        judge(read.claims, session_id=claims["sid"], now=claims["iat"]), Claims
    )


# -- where a seed comes from; none of them has it in its `repr`


class _Held:
    __slots__ = ("_seed",)

    def __init__(self, seed: bytes | str) -> None:
        self._seed = seed

    def __call__(self) -> bytes | str:
        return self._seed


class _File:
    __slots__ = ("_path",)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __call__(self) -> bytes:
        try:
            return read_key_file(self._path) or b""
        except (OSError, ValueError):
            raise IssuerError("privkey_file_missing") from None


class _Variable:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> str:
        seed = os.environ.get(self._name)
        if seed is None:
            raise IssuerError("privkey_env_missing")
        return seed.strip()
