"""Whose signatures are believed: public keys by their ids (resumable-sessions §11.5).

Responsible for reading keys, all or none of them. They are configuration of whoever verifies; a key that
lies beside a journal, or comes with a token, is data and never looked at. Leaves signatures to `_token`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from antiphon._errors import AntiphonError

__all__ = ["KeySource", "Keyring", "KeyringError", "KeyringSource", "read_key_file"]

#: A public key: its 64 hex digits, its 32 bytes, or a file with either.
KeySource: TypeAlias = str | bytes | os.PathLike[str]
_KEY_BYTES: Final = 32
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")
_SUFFIX: Final = ".pub"
#: A file with a key holds 64 digits and some white space; of anything longer no more than this is read.
_FILE_BYTES: Final = 1024


class KeyringError(AntiphonError, ValueError):
    """A keyring cannot be used: one of its keys is none, or cannot be read. None of them is used then.

    Attributes:
        kid: the id of the key, None where it is about no single one.
        problem: what is wrong, in words, without any key in it.
    """

    def __init__(self, problem: str, kid: str | None = None) -> None:
        super().__init__(problem, kid)
        self.problem = problem
        self.kid = kid

    def __str__(self) -> str:
        return self.problem if self.kid is None else f"key {self.kid!r}: {self.problem}"


class Keyring(Mapping[str, bytes]):
    """Public keys by id, each of 32 bytes; does not change once it is made.

    A new key is a keyring with one more id; a key that is taken out takes all its tokens with it.

    Args:
        keys: by id: 64 hex digits in any case, 32 bytes, or the path of a file that holds either
            (white space around digits is nothing).

    Raises:
        KeyringError: one of them is no such thing, or is of the few points that anybody can sign for;
            an id is empty. There is no keyring then.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: Mapping[str, KeySource]) -> None:
        # A copy first: a mapping may be changed elsewhere while files are read.
        self._keys = {kid: _public_key(kid, source) for kid, source in dict(keys).items()}

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Keyring:
        """The keyring of a directory: each file `KID.pub` holds the key of that id.

        Files with other names, hidden ones included, are nothing to it.

        Raises:
            KeyringError: as for the class; or the directory cannot be read.
        """
        folder = Path(directory)
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise KeyringError(f"{folder}: {error.strerror or 'cannot be read'}") from error
        keys: dict[str, KeySource] = {}
        for name in names:
            if name.endswith(_SUFFIX) and not name.startswith("."):
                kid = name.removesuffix(_SUFFIX)
                try:
                    keys[kid] = _public_key(kid, folder / name)
                except KeyringError:
                    # Taken out meanwhile is taken out, and no reason to refuse the others.
                    if os.path.lexists(folder / name):
                        raise
        return cls(keys)

    @classmethod
    def of(cls, source: KeyringSource) -> Keyring:
        """A keyring from what one is made of: a mapping, a directory, or a function that gives one.

        Raises:
            KeyringError: as for the class; what a function raises is passed on.
        """
        if callable(source):
            source = source()
        if isinstance(source, Keyring):
            return source
        if isinstance(source, Mapping):
            return cls(source)
        return cls.load(source)

    def __getitem__(self, kid: str) -> bytes:
        return self._keys[kid]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Keyring({sorted(self._keys)})"


#: A keyring, or what one is made of, anew whenever it is needed: public keys by id, a directory of them,
#: or a function that gives one of the two.
KeyringSource: TypeAlias = (
    Keyring
    | Mapping[str, KeySource]
    | str
    | os.PathLike[str]
    | Callable[[], Keyring | Mapping[str, KeySource]]
)


def read_key_file(path: str | os.PathLike[str]) -> bytes | None:
    """The 32 bytes that a file holds, raw or as hex digits; None where it holds anything else.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:  # noqa: PTH123  (a path may be any PathLike)
        data = file.read(_FILE_BYTES)
    if len(data) == _KEY_BYTES:
        return data
    try:
        return from_hex(data.decode("ascii").strip())
    except UnicodeDecodeError:
        return None


def from_hex(text: str) -> bytes | None:
    """32 bytes from 64 hex digits; `bytes.fromhex` alone would pass over white space."""
    return bytes.fromhex(text) if _HEX.fullmatch(text) else None


def _public_key(kid: str, source: KeySource) -> bytes:
    if not isinstance(kid, str) or not kid:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KeyringError("the id of a key is a text that is not empty")
    key: bytes | None
    if isinstance(source, str):
        key = from_hex(source)
    elif isinstance(source, bytes):
        key = source if len(source) == _KEY_BYTES else None
    elif isinstance(source, os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        try:
            key = read_key_file(source)
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or "cannot be read"
            raise KeyringError(f"{os.fspath(source)}: {words}", kid) from error
    else:
        key = None
    if key is None:
        raise KeyringError("a public key is 64 hex digits, 32 bytes, or a file of either", kid)
    if _anybody_signs(key):
        raise KeyringError(
            "not a public key of anybody: its signatures can be made without one", kid
        )
    return key


# The curve of Ed25519: -x² + y² = 1 + d·x²·y² modulo P.
_P: Final = 2**255 - 19
_D: Final = -121665 * pow(121666, -1, _P) % _P


def _anybody_signs(key: bytes) -> bool:
    """Whether a key is one of the eight points of small order, for which signatures need no seed.

    A file that a crash has left full of zeros is one.
    """
    y = (int.from_bytes(key, "little") & (2**255 - 1)) % _P
    # The orders 1, 2 and 4 have y = 1, -1 and 0; doubling one of order 8 gives y = 0, hence the last.
    return y in {0, 1, _P - 1} or (_D * y**4 + 2 * y**2 - 1) % _P == 0
