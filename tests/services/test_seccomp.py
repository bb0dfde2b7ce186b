"""The filter of system calls, run here as the kernel runs it; in a real sandbox `test_bwrap` tries it."""

from __future__ import annotations

import struct

import pytest

from antiphon.services._seccomp import CALLS, without_keys

ALLOWED = 0x7FFF0000
NO_SUCH_CALL = 0x00050026


def run(architecture: int, number: int) -> int:
    """What the filter says of a call: an interpreter of the five instructions that it uses."""
    data = struct.pack("=II", number, architecture)
    program = list(struct.iter_unpack("=HBBI", without_keys()))
    at = word = 0
    for _ in program:
        code, equal, other, value = program[at]
        at += 1
        if code == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            word &= value
        elif code == 0x15:
            at += equal if word == value else other
        else:
            assert code == 0x06
            return int(value)
    raise AssertionError


@pytest.mark.parametrize("architecture", CALLS)
def test_what_reaches_keys_does_not_exist_and_all_else_does(architecture: int) -> None:
    for number in range(600):
        expected = NO_SUCH_CALL if number in CALLS[architecture] else ALLOWED
        assert run(architecture, number) == expected


def test_a_call_of_the_x32_kind_is_the_same_call() -> None:
    for number in range(600):
        expected = NO_SUCH_CALL if number in {248, 249, 250} else ALLOWED
        assert run(0xC000003E, number | 0x40000000) == expected


def test_on_a_machine_that_is_not_known_nothing_is_let_through() -> None:
    assert run(0x12345678, 0) == NO_SUCH_CALL


def test_the_kernel_takes_a_filter_of_this_length() -> None:
    assert len(without_keys()) % 8 == 0
    assert len(without_keys()) // 8 <= 4096
