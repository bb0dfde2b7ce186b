"""Whether a token opens a session: RXC1 verification, and the attach policy on it.

Responsible for the order of the checks (resumable-sessions §11.4, §11.5). Needs nothing but the public
keys: no issuer, no writer, no network; so that a journal that nobody writes any more opens as well.
Leaves the text and the claims to `_claims`, keys to `_keyring`, and what happens with the verdict to
the funnel in `_attach`. Nothing here can mint a token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from antiphon.journal._attach import AttachRefused, Grant
from antiphon.journal._claims import Claims, TokenFailure, judge, read_token
from antiphon.journal._ed25519 import KEY_BYTES, verifies
from antiphon.journal._keyring import Keyring, KeyringError

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.journal._attach import AttachContext
    from antiphon.journal._keyring import KeyringSource

__all__ = ["Token", "verify_token"]

log = logging.getLogger("antiphon.journal")


def verify_token(
    token: object, keyring: Mapping[str, bytes], *, session_id: str, now: float
) -> Claims | TokenFailure:
    """What a token says if it opens the session now, else the name of the first check that it fails.

    Total and pure: it raises for no token, reads no clock and no file, and gives the same result for
    the same arguments. The name is for logs; a peer hears the same for all of them.

    Args:
        token: what was offered as one: text, bytes, or anything at all.
        keyring: whose signatures are believed: a `Keyring`.
        session_id: the session that is asked for, compared exactly.
        now: Unix seconds, by the verifier's own clock.

    Returns:
        The claims; or "malformed", "unknown_kid", "sig_invalid", "claims_invalid", "session_mismatch",
        "expired", "issued_in_future" or "unsupported_restrictive_claim" (resumable-sessions §11.5).
    """
    read = read_token(token)
    if read is None:
        return "malformed"
    key = keyring.get(read.kid)
    if key is None or len(key) != KEY_BYTES:
        return "unknown_kid"
    if not verifies(key, read.signature, read.signed):
        return "sig_invalid"
    return judge(read.claims, session_id=session_id, now=now)


class Token:
    """The attach policy that admits whoever has a token for the session, over any transport (§11.4).

    It looks at the token, the keys and the clock, and at nothing that lives: the verdict is the same
    whether anybody writes the session or not. The grant ends when the token does.

    Args:
        keyring: whose tokens are believed: a `Keyring`, which stays as it is; or what one is made of
            for each attach, so that a key can be added or taken out without a restart: a mapping of
            public keys by id (hex digits, bytes or files), a directory of files `KID.pub`, or a
            function that gives a mapping or a keyring. While any key of it is wrong, nobody is admitted.
        clock: gives Unix seconds, by this side's own clock.
        surface: the name of the place that this policy stands at, for tokens that are good for some
            surfaces alone; None takes the one in the context.

    Raises:
        KeyringError: the keyring is wrong now. A function is not called yet.
    """

    def __init__(
        self,
        keyring: KeyringSource,
        *,
        clock: Callable[[], float] = time.time,
        surface: str | None = None,
    ) -> None:
        if not callable(keyring):
            Keyring.of(keyring)
        self._keyring = keyring
        self._clock = clock
        self._surface = surface

    def __call__(self, context: AttachContext) -> Grant:
        """Grant or refuse; may read files, and so is called in a thread (`admit`).

        Raises:
            AttachRefused: "token_required", a failure of `verify_token`, "actor_mismatch",
                "surface_not_allowed", or "keyring_invalid" with what is wrong with it.
        """
        capability = context.capability
        if capability is None or capability is msgspec.UNSET:
            raise AttachRefused("token_required")
        try:
            keyring = Keyring.of(self._keyring)
        except KeyringError as error:
            # A refusal is everyday life, and this one is of everybody.
            log.error("no token is good until the keyring is mended: %s", error)  # noqa: TRY400
            raise AttachRefused(f"keyring_invalid: {error}") from error
        claims = verify_token(capability, keyring, session_id=context.session_id, now=self._clock())
        if not isinstance(claims, Claims):
            raise AttachRefused(claims)
        asserted, holder = _id_of(context.actor), claims.act.get("id")
        if asserted is not None and isinstance(holder, str) and asserted != holder:
            raise AttachRefused("actor_mismatch")
        if claims.surf is not None:
            surface: Any = context.surface if self._surface is None else self._surface
            if surface not in claims.surf:  # nor is what is no text at all
                raise AttachRefused("surface_not_allowed")
        return Grant(
            claims.act,
            context.session_id,
            {"kind": "token", "kid": claims.kid},
            expires_at=claims.exp,
        )

    def __repr__(self) -> str:
        return "Token()" if self._surface is None else f"Token(surface={self._surface!r})"


def _id_of(actor: Any) -> str | None:
    """The id of an actor, None where it has none that is a text."""
    if not isinstance(actor, Mapping):
        return None
    who: Any = cast("Mapping[str, Any]", actor).get("id")
    return who if isinstance(who, str) else None
