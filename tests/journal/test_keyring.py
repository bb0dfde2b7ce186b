"""Public keys by id: which forms they have, and that a wrong one leaves no keyring."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from antiphon import AntiphonError
from antiphon.journal._ed25519 import verifies
from antiphon.journal._keyring import Keyring, KeyringError
from tests.journal.tokens import OTHER_KEYRING, PUBLIC

HEX = PUBLIC.hex()


@pytest.mark.parametrize("digits", [HEX, HEX.upper(), HEX[:32] + HEX[32:].upper()])
def test_64_hex_digits_of_any_case_are_a_key(digits: str) -> None:
    assert Keyring({"k1": digits})["k1"] == PUBLIC


@pytest.mark.parametrize(
    "content",
    [PUBLIC, HEX.encode(), HEX.upper().encode(), f"\n  {HEX}\r\n\n".encode()],
    ids=["raw", "hex", "upper", "trimmed"],
)
def test_a_file_holds_either_form(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k1"
    path.write_bytes(content)

    assert Keyring({"k1": path, "k2": PUBLIC}) == {"k1": PUBLIC, "k2": PUBLIC}


@pytest.mark.parametrize(
    "wrong",
    [
        *("", HEX[:-1], HEX + "0", HEX[:-2], f" {HEX}", f"{HEX}\n", HEX[:-1] + "g", "0x" + HEX[2:]),
        *(HEX[:31] + "  " + HEX[33:], HEX[:-1] + "\uff11", "k1.pub"),
        *(b"", PUBLIC[:31], PUBLIC + b"\n", HEX.encode()),
        *(None, 5, [PUBLIC], bytearray(PUBLIC), True),
    ],
)
def test_anything_else_leaves_no_keyring_at_all(wrong: Any) -> None:
    with pytest.raises(KeyringError) as raised:
        Keyring({"right": PUBLIC, "wrong": wrong})

    assert raised.value.kid == "wrong"
    assert (
        str(raised.value)
        == "key 'wrong': a public key is 64 hex digits, 32 bytes, or a file of either"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        PUBLIC[:31],
        PUBLIC + b"\n",
        HEX[:-1].encode(),
        HEX.encode() * 2,
        b"\xff" * 64,
        bytes(5000),
    ],
)
def test_a_file_of_anything_else_leaves_no_keyring(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k1"
    path.write_bytes(content)

    with pytest.raises(KeyringError, match="64 hex digits"):
        Keyring({"k1": path})


def test_a_file_that_cannot_be_read_leaves_no_keyring(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, Path("a\0b")):
        with pytest.raises(KeyringError) as raised:
            Keyring({"k1": path})
        assert raised.value.kid == "k1"
        assert str(raised.value).startswith(f"key 'k1': {path}: ")
    with pytest.raises(KeyringError, match="missing: No such file or directory"):
        Keyring({"k1": tmp_path / "missing"})


@pytest.mark.parametrize("kid", ["", None, 5, b"k1"])
def test_a_key_has_an_id(kid: Any) -> None:
    with pytest.raises(KeyringError, match="id of a key"):
        Keyring({kid: PUBLIC})


P = 2**255 - 19
ORDER_8 = (
    int.from_bytes(
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
    ),
    int.from_bytes(
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
    ),
)


@pytest.mark.parametrize("y", [0, 1, P - 1, P, P + 1, *ORDER_8], ids=range(7))
@pytest.mark.parametrize("sign", [0, 1 << 255])
def test_a_point_that_anybody_can_sign_for_is_nobodys_key(y: int, sign: int) -> None:
    with pytest.raises(KeyringError, match="without one"):
        Keyring({"k1": (y | sign).to_bytes(32, "little")})


def test_such_a_point_would_open_everything() -> None:
    """The reason for the check above: no seed, and the signature holds for any text."""
    identity = (1).to_bytes(32, "little")

    assert verifies(identity, identity + bytes(32), b"anything at all")


def test_a_directory_is_a_keyring_of_its_pub_files(tmp_path: Path) -> None:
    (tmp_path / "k1.pub").write_text(HEX)
    (tmp_path / "k.2.pub").write_bytes(PUBLIC)
    for other in ("k3.key", "README", "k4.pub~", ".k5.pub", "pub"):
        (tmp_path / other).write_text("no key")

    for place in (tmp_path, str(tmp_path)):
        assert Keyring.load(place) == {"k1": PUBLIC, "k.2": PUBLIC}
        assert Keyring.of(place) == Keyring.load(place)
    (tmp_path / "k6.pub").write_text("no key")
    with pytest.raises(KeyringError, match="key 'k6'"):
        Keyring.load(tmp_path)


def test_a_directory_that_is_none_is_no_keyring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in ((tmp_path / "missing", "No such file"), (tmp_path / "file", "Not a dir")):
        with pytest.raises(KeyringError) as raised:
            Keyring.load(place)
        assert raised.value.kid is None
        assert str(raised.value).startswith(f"{place}: {words}")


def test_a_key_that_is_taken_out_while_the_directory_is_read_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("k1", "k2"):
        (tmp_path / f"{name}.pub").write_text(HEX)
    names = os.listdir(tmp_path)
    (tmp_path / "k1.pub").unlink()
    monkeypatch.setattr(os, "listdir", lambda _folder: names)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert Keyring.load(tmp_path) == {"k2": PUBLIC}

    # A link that leads nowhere was not taken out: somebody means a key by it.
    (tmp_path / "k1.pub").symlink_to("nowhere")
    with pytest.raises(KeyringError, match="key 'k1'"):
        Keyring.load(tmp_path)


def test_a_mapping_that_is_changed_while_files_are_read_does_no_harm(tmp_path: Path) -> None:
    keys: dict[str, Any] = {}

    class Reached:
        def __fspath__(self) -> str:
            keys["k3"] = PUBLIC
            return str(path)

    path = tmp_path / "k1"
    path.write_text(HEX)
    keys.update(k1=Reached(), k2=PUBLIC)

    assert sorted(Keyring(keys)) == ["k1", "k2"]


def test_a_directory_without_keys_believes_nobody(tmp_path: Path) -> None:
    assert Keyring.load(tmp_path) == {}


def test_what_a_keyring_is_made_of_may_be_a_mapping_a_function_or_one_already() -> None:
    made = Keyring({"k1": PUBLIC})

    assert Keyring.of(made) is made
    assert Keyring.of({"k1": HEX}) == made
    assert Keyring.of(lambda: made) is made
    assert Keyring.of(lambda: {"k1": HEX}) == made


def test_a_keyring_is_a_mapping_that_does_not_change() -> None:
    keys: dict[str, Any] = {"k2": PUBLIC, "k1": PUBLIC}
    made = Keyring(keys)
    keys.clear()

    assert len(made) == 2
    assert list(made) == ["k2", "k1"]
    assert made.get("k3") is None
    assert repr(made) == "Keyring(['k1', 'k2'])"
    with pytest.raises(TypeError):
        made["k3"] = PUBLIC  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    assert made != OTHER_KEYRING


def test_the_error_is_one_of_ours_and_travels() -> None:
    error = KeyringError("wrong", "k1")

    assert isinstance(error, AntiphonError)
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (again.kid, again.problem, str(again)) == ("k1", "wrong", "key 'k1': wrong")
