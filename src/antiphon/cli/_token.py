"""`antiphon token`: keys and tokens for people and scripts.

What a token is, `antiphon.journal` knows; here a command line becomes a call, and what came of it lines
and an exit code. A private seed goes from its file or variable to the issuer and nowhere else. A token
is written to standard output and to nothing else, and read from anything but the command line. Minting
is imported by the commands that mint, so that checking a token never loads it.
"""

from __future__ import annotations

import getpass
import os
import re
import stat
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from antiphon._errors import MissingExtra
from antiphon.cli._arguments import UsageError
from antiphon.cli._output import Output, as_line, is_terminal, tell
from antiphon.journal import Claims, Keyring, KeyringError, unverified_claims

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from antiphon.journal import Issuer

__all__ = ["run"]

OK: Final = 0
REFUSED: Final = 1

#: A token has 4096 bytes at most; what is longer is none, however long.
_READ_BYTES: Final = 8192
_KID_DIGITS: Final = 8
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")
_NOT_VERIFIED: Final = "NOT VERIFIED: anybody can write this; `antiphon token verify` checks it"

#: Why a token opens nothing, for people.
_WORDS: Final = {
    "malformed": "it is no token, or was changed on its way",
    "unknown_kid": "none of these keys has the id that it names",
    "sig_invalid": "it was not signed with the key that it names, or was changed since",
    "claims_invalid": "what it says is signed, and makes no sense",
    "session_mismatch": "it opens another session",
    "expired": "its time is over",
    "issued_in_future": "it is from the future: one of the clocks is wrong",
    "unsupported_restrictive_claim": "it is restricted in a way that nobody can keep",
    "malformed_grant": "its holder has no id, so no agent would admit them",
    "actor_mismatch": "somebody else holds it",
    "surface_not_allowed": "it is good for other surfaces",
}


def run(options: argparse.Namespace) -> int:
    """Carry out the action; 0: done, or the token is good, 1: not, or it is not.

    Raises:
        UsageError: a seed, key or token cannot be read, or the extra is missing.
    """
    try:
        match options.action:
            case "keygen":
                return _keygen(options)
            case "mint":
                return _mint(options)
            case "inspect":
                return _inspect(options)
            case _:
                return _verify(options)
    except MissingExtra as error:
        raise UsageError(f"antiphon token {options.action}: {error}") from None


# -- keygen


def _keygen(options: argparse.Namespace) -> int:
    from antiphon.journal import Issuer, new_seed

    seed = new_seed()
    public = Issuer(seed, kid="new").public_key.hex()
    kid = _kid(options.kid, public)
    made: list[str] = []
    try:
        # The seed last: a public key without one is nothing, a seed without one may be lost.
        if options.public is not None:
            _write_new(options.public, f"{public}\n".encode(), 0o666)
            made.append(options.public)
        _write_new(options.file, f"{seed.hex()}\n".encode(), 0o600)
    except OSError as error:
        for path in made:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108  (text, as it was typed)
        exists = isinstance(error, FileExistsError)
        words = "it exists, and is not overwritten" if exists else error.strerror
        return _refuse(options, "not_written", f"{error.filename}: {words}")
    if options.json:
        value = {"type": "key", "kid": kid, "public": public, "file": options.file}
        Output().line({name: _text(text) for name, text in value.items()})
    else:
        Output().text(f"{as_line(kid)}={public}\n")
        tell(
            as_line(f"The private seed is in {options.file}; whoever has it can mint tokens.")
            + "\n"
        )
    return OK


def _write_new(path: str, data: bytes, mode: int) -> None:
    # O_EXCL follows no link at the end, and the mode is there from the first byte on.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with open(file, "wb") as stream:  # noqa: PTH123  (a descriptor)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108  (as above)
        raise OSError(error.errno, error.strerror, path) from None


def _kid(given: str | None, public: str) -> str:
    if given == "":
        raise UsageError("antiphon token: --kid is empty")
    if given is not None and given != _text(given):
        raise UsageError("antiphon token: --kid is no text in UTF-8")
    return public[:_KID_DIGITS] if given is None else given


# -- mint


def _mint(options: argparse.Namespace) -> int:
    from antiphon.journal import IssuerError

    try:
        issuer = _issuer(options)
    except IssuerError as error:
        # Its text names no file and no variable, which may be the seed itself by mistake.
        option = "--seed-env" if options.seed_file is None else "--seed-file"
        raise UsageError(f"antiphon token mint: {option}: {error}") from None
    try:
        token = issuer.mint(
            options.session,
            {"id": options.actor, "kind": options.actor_kind},
            ttl=options.ttl,
            surfaces=options.surface,
            archival=options.archival,
            max_ttl=options.max_ttl,
        )
    except IssuerError as error:
        more = ""
        if error.failure == "ttl_too_long":
            more = "; --archival allows 30d, --max-ttl anything"
        return _refuse(options, error.failure, f"{error}{more}")
    output = Output()
    if options.json:
        claims = unverified_claims(token) or {}
        known = {"kid": issuer.kid, "session": options.session, "expires_at": claims["exp"]}
        output.line({"type": "token", **known, "token": token})
    else:
        output.text(f"{token}\n")
    return REFUSED if output.lost else OK  # a token that nobody has is none


def _issuer(options: argparse.Namespace) -> Issuer:
    from antiphon.journal import Issuer

    def made(kid: str) -> Issuer:
        if options.seed_file is None:
            return Issuer.from_env(options.seed_env, kid=kid)
        return Issuer(Path(options.seed_file), kid=kid)

    public = made("new").public_key.hex()
    if options.seed_file is not None:
        _warn_of_readers(options.seed_file)
    return made(_kid(options.kid, public))


def _warn_of_readers(path: str) -> None:
    with suppress(OSError, ValueError):
        mode = os.stat(path).st_mode  # noqa: PTH116  (as above)
        if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
            tell(as_line(f"antiphon token mint: others can read {path}: chmod 600 it") + "\n")


# -- inspect


def _inspect(options: argparse.Namespace) -> int:
    claims = unverified_claims(_token(options))
    output = Output()
    if claims is None:
        return _refuse(options, "malformed", _WORDS["malformed"])
    if options.json:
        output.line({"type": "claims", "verified": False, "claims": claims})
    else:
        output.text("".join(f"{line}\n" for line in (_NOT_VERIFIED, *_lines(claims))))
    return OK


def _lines(claims: dict[str, Any]) -> Iterator[str]:
    left = dict(claims)
    for name, label in _LABELS.items():
        if name in left:
            yield f"{label:<9} {as_line(_shown(name, left.pop(name)))}"
    for name, value in left.items():
        yield f"{'also':<9} {as_line(f'{name}: {_json(value)}')}"


_LABELS: Final = {
    "kid": "key",
    "sid": "session",
    "act": "holder",
    "iat": "issued",
    "exp": "ends",
    "surf": "surfaces",
}


def _shown(name: str, value: Any) -> str:
    match name, value:
        case "act", {"id": str(who), "kind": str(kind)} if len(value) == 2:
            return f"{who} ({kind})"
        case (("iat" | "exp"), int()) if not isinstance(value, bool):
            return _moment(value)
        case _, str():
            return value
        case _:
            return _json(value)


def _moment(seconds: int) -> str:
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return str(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC ({_distance(seconds - int(time.time()))})"


def _distance(seconds: int) -> str:
    units = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, size = next((unit for unit in units if abs(seconds) >= unit[1]), units[-1])
    count = abs(seconds) // size
    words = f"{count} {unit}{'' if count == 1 else 's'}"
    return f"in {words}" if seconds > 0 else f"{words} ago"


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, OverflowError, RecursionError):  # an integer beyond 64 bits
        return repr(value)


# -- verify


def _verify(options: argparse.Namespace) -> int:
    from antiphon.journal import verify_token

    keyring = _keyring(options)
    now = time.time() if options.at is None else options.at
    found = verify_token(_token(options), keyring, session_id=options.session, now=now)
    failure = found if isinstance(found, str) else _not_here(found, options)
    if isinstance(found, str) or failure is not None:
        failure = str(failure)
        return _refuse(options, failure, _WORDS[failure])
    if options.json:
        claims = msgspec.to_builtins(found)
        Output().line({"type": "verdict", "ok": True, "claims": claims})
    else:
        said = {
            name: value for name, value in msgspec.to_builtins(found).items() if value is not None
        }
        Output().text("".join(f"{line}\n" for line in ("ok: it opens the session", *_lines(said))))
    return OK


def _not_here(claims: Claims, options: argparse.Namespace) -> str | None:
    """What an agent would refuse of a token that is good."""
    holder = claims.act.get("id")
    if not isinstance(holder, str):
        return "malformed_grant"
    if options.actor is not None and options.actor != holder:
        return "actor_mismatch"
    if (
        claims.surf is not None
        and options.surface is not None
        and options.surface not in claims.surf
    ):
        return "surface_not_allowed"
    return None


def _keyring(options: argparse.Namespace) -> Keyring:
    if not options.key and options.keyring is None:
        raise UsageError("antiphon token verify: one of --key and --keyring is needed")
    try:
        keys: dict[str, Any] = (
            {} if options.keyring is None else dict(Keyring.load(options.keyring))
        )
        for text in options.key:
            kid, equals, key = text.partition("=")
            if not (kid and equals and key):
                raise UsageError(f"antiphon token verify: --key {text!r} is no KID=KEY")
            keys[kid] = key if _HEX.fullmatch(key) else Path(key)
        return Keyring(keys)
    except KeyringError as error:
        raise UsageError(f"antiphon token verify: {error}") from None


# -- a token's way in


def _token(options: argparse.Namespace) -> bytes:
    """The token, without the white space around it."""
    if options.typed:
        words = "a token is never taken from the command line, where others can read it"
        raise _unread(options, f"{words}: give it on standard input, or by --file or --env")
    if options.env is not None:
        value = os.environ.get(options.env)
        if value is None:
            raise _unread(options, "--env: there is no such variable")
        return os.fsencode(value).strip()
    if options.file is not None:
        try:
            with open(options.file, "rb") as file:  # noqa: PTH123  (as above)
                return file.read(_READ_BYTES).strip()
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or "cannot be read"
            raise _unread(options, f"--file: {words}") from None
    if is_terminal(sys.stdin):
        try:
            # Not shown while it is pasted, nor kept in what the terminal remembers.
            return getpass.getpass("Token (it is not shown): ").encode("utf-8", "replace").strip()
        except EOFError:
            return b""
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise _unread(options, "there is no standard input")
    try:
        return sys.stdin.buffer.read(_READ_BYTES).strip()
    except (OSError, ValueError):
        raise _unread(options, "standard input cannot be read") from None


def _unread(options: argparse.Namespace, problem: str) -> UsageError:
    return UsageError(f"antiphon token {options.action}: {problem}")


# -- what is told


def _refuse(options: argparse.Namespace, failure: str, words: str) -> int:
    if options.json:
        kind = {"verify": "verdict", "inspect": "claims", "mint": "token"}.get(
            options.action, "key"
        )
        Output().line({"type": kind, "ok": False, "failure": failure, "why": _text(words)})
    else:
        said = words if words.startswith(f"{failure}: ") else f"{failure}: {words}"
        tell(as_line(f"antiphon token {options.action}: {said}") + "\n")
    return REFUSED


def _text(text: str) -> str:
    # Arguments that are no UTF-8 hold lone surrogates, which no line can carry.
    return text.encode("utf-8", "replace").decode()
