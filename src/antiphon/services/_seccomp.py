"""The filter of system calls for a sandbox: what namespaces do not part from the user's session.

The kernel's keyrings are that: whoever is the same user finds the session's keys by their numbers, in
whatever namespaces, and reads them: Kerberos tickets, keys of file systems. So the calls that reach
keys do not exist in a sandbox. All else is left to the mounts and namespaces of `_bwrap`.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["CALLS", "without_keys"]

#: The kernel's name for an architecture -> its numbers of add_key, request_key and keyctl. One
#: processor may run programs of several.
CALLS: Final = {
    0xC000003E: (248, 249, 250),  # x86-64
    0x40000003: (286, 287, 288),  # i386
    0xC00000B7: (217, 218, 219),  # AArch64
    0x40000028: (309, 310, 311),  # Arm
    0xC00000F3: (217, 218, 219),  # RISC-V, 64 bits
    0xC0000102: (217, 218, 219),  # LoongArch, 64 bits
    0xC0000015: (269, 270, 271),  # POWER, little-endian
    0x80000015: (269, 270, 271),  # POWER, big-endian
    0x80000016: (278, 279, 280),  # s390x
}
_X86_64: Final = 0xC000003E

# Load a word, mask it, jump if it is equal, end.
_LOAD: Final = 0x20
_AND: Final = 0x54
_JUMP: Final = 0x15
_RETURN: Final = 0x06
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_ALLOW: Final = 0x7FFF0000
_UNKNOWN: Final = 0x00050000 | 38  # ENOSYS, as Linux has it


def without_keys() -> bytes:
    """The filter as bwrap takes it (`sock_filter` in a row), for whatever machine this is.

    On an architecture that is not in `CALLS` no call is let through: better no sandbox.
    """
    program = [_step(_LOAD, _ARCHITECTURE)]
    for architecture, numbers in CALLS.items():
        block = [_step(_LOAD, _NUMBER)]
        if architecture == _X86_64:
            # Programs of its 32-bit kind, x32, have this bit in their numbers.
            block.append(_step(_AND, 0xBFFFFFFF))
        block += [
            _step(_JUMP, number, equal=len(numbers) - at) for at, number in enumerate(numbers)
        ]
        block += [_step(_RETURN, _ALLOW), _step(_RETURN, _UNKNOWN)]
        program += [_step(_JUMP, architecture, other=len(block)), *block]
    return b"".join([*program, _step(_RETURN, _UNKNOWN)])


def _step(code: int, value: int, *, equal: int = 0, other: int = 0) -> bytes:
    return struct.pack("=HBBI", code, equal, other, value)
