"""Wire types, one codec, the method table. Leaves everything that moves to the layers above.

This door loads no protocol version: import `antiphon.schema.v1` (or `v1_unstable`) for the types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from antiphon.schema._choice import Unknown, UnknownUpdate, variants
from antiphon.schema._method import Method, Wire

if TYPE_CHECKING:
    from antiphon.schema._codec import (
        FieldError,
        Frame,
        Repair,
        check_utf8,
        decode,
        decode_params,
        decode_reporting,
        decode_result,
        decode_update,
        decoder,
        encode,
        encode_checked,
        json_depth_exceeds,
        loads,
        params_decoder,
        refuse_non_finite,
        repair_text,
        strict_updates,
    )

__all__ = [
    "UNSET",
    "FieldError",
    "Frame",
    "Method",
    "Repair",
    "Unknown",
    "UnknownUpdate",
    "UnsetType",
    "Wire",
    "check_utf8",
    "decode",
    "decode_params",
    "decode_reporting",
    "decode_result",
    "decode_update",
    "decoder",
    "encode",
    "encode_checked",
    "json_depth_exceeds",
    "loads",
    "params_decoder",
    "refuse_non_finite",
    "repair_text",
    "strict_updates",
    "variants",
]


def __getattr__(name: str) -> Any:
    # The codec needs the types, so it is loaded with the first use of one of its names.
    if name in __all__:
        from antiphon.schema import _codec

        value = getattr(_codec, name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
