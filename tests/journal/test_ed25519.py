"""Signatures, and where the library behind them is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.journal._ed25519 import new_seed, public_key, sign, verifies
from tests.journal.tokens import OTHER_SEED, PUBLIC, SEED

SOURCE = Path(__file__).parents[2] / "src" / "antiphon"
# RFC 8032, 7.1: tests 1 and 2.
EMPTY = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
    "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)
SEED_2 = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC_2 = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
ONE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)
ORDER = 2**252 + 27742317777372353535851937790883648493


@pytest.mark.parametrize(
    ("seed", "key", "signed", "signature"),
    [(SEED, PUBLIC, b"", EMPTY), (SEED_2, PUBLIC_2, b"\x72", ONE)],
)
def test_signatures_are_those_of_the_standard(
    seed: bytes, key: bytes, signed: bytes, signature: bytes
) -> None:
    assert public_key(seed) == key
    assert sign(seed, signed) == signature
    assert verifies(key, signature, signed)
    assert not verifies(key, signature, signed + b"x")


def test_a_signature_of_another_key_or_of_another_form_verifies_nothing() -> None:
    assert not verifies(PUBLIC, sign(OTHER_SEED, b"x"), b"x")
    for signature in (b"", EMPTY[:63], EMPTY + b"\0", bytes(64)):
        assert not verifies(PUBLIC, signature, b"")
    for key in (b"", PUBLIC[:31], PUBLIC + b"\0", b"\xff" * 32):
        assert not verifies(key, EMPTY, b"")


def test_the_other_writing_of_the_same_signature_is_none() -> None:
    """S and S + L are the same scalar; whoever takes both has two tokens where one was signed."""
    other = int.from_bytes(EMPTY[32:], "little") + ORDER

    assert not verifies(PUBLIC, EMPTY[:32] + other.to_bytes(32, "little"), b"")


def test_a_new_seed_is_new() -> None:
    first, second = new_seed(), new_seed()

    assert len(first) == len(second) == 32
    assert first != second


def test_cryptography_is_imported_in_one_module() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.Import)
            and any(n.name.startswith("cryptography") for n in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and str(node.module).startswith("cryptography"))
    }

    assert found == {"journal/_ed25519.py"}


def test_without_the_extra_all_else_works_and_it_is_named() -> None:
    code = """
import sys
sys.modules["cryptography"] = None
import antiphon
from antiphon.journal import Keyring, Record, unverified_claims
from antiphon.journal._attach import admit
from antiphon.journal._policy import LocalNode
from antiphon.cli import main
Keyring({"k": "ab" * 32})
assert unverified_claims("x") is None
for name in ("Token", "verify_token", "Issuer"):
    try:
        getattr(antiphon.journal, name)
    except antiphon.MissingExtra as error:
        print(error.extra, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)

    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()
        == ['tokens signing and verifying tokens needs an extra: pip install "antiphon[tokens]"']
        * 3
    )
