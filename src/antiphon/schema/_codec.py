"""JSON bytes to typed values and back: one encoder, one family of decoders.

Responsible for the fast strict path, for what happens when it fails (mend the text, then the
forgiving path), and for refusing on the way out what JSON cannot say. Leaves the rules of leniency
to `_forgiving`, byte scans to `_scan`, unions by shape to `_choice`, and the envelope to `core`.

A frame's journey: before this station `core` has cut the frame into its raw parts; after it a
handler or a consumer has the typed value. On the way out it is the other way round.

Whatever arrives, decoding ends in a value, a `msgspec.ValidationError` (JSON of the wrong shape) or
another `msgspec.DecodeError` (no JSON, or nested absurdly deep). Encoding ends in bytes, or in a
`TypeError` or `ValueError` at the call, so that a send loop never meets an unencodable value.

Source: DESIGN §3.1 and §3.3, field faults 06, 07, 31, 32.
"""

from __future__ import annotations

import logging
import math
import re
import typing
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar, overload

import msgspec
from msgspec import UNSET

from antiphon.schema import v1_unstable
from antiphon.schema._choice import Unknown, UnknownUpdate, decode_hook, encode_hook
from antiphon.schema._report import FieldError, Repair, is_object
from antiphon.schema._scan import Frame, check_utf8, json_depth_exceeds, repair_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.schema._forgiving import Walk

__all__ = [
    "FieldError",
    "Frame",
    "Repair",
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
]

T = TypeVar("T")

_log = logging.getLogger("antiphon.schema")

#: A text of as many bytes is not taken for null, however much white space is around it.
_NULL_BYTES = 16
_TOO_DEEP = "JSON nests too deeply"
_CIRCULAR = "the value contains itself or nests too deeply for JSON"


# --- decoding -----------------------------------------------------------------------------------


_decoders: dict[Any, Callable[[Any], Any]] = {}


@overload
def decoder(kind: type[T]) -> Callable[[Frame], T]: ...
@overload
def decoder(kind: Any) -> Callable[[Frame], Any]: ...
def decoder(kind: Any) -> Callable[[Frame], Any]:
    """The strict decode function of `kind`, made once, for a hot path that knows its type.

    What it raises (`msgspec.DecodeError`, `RecursionError`) only says that `decode` has to look at
    the message: its text may hold values of the input.
    """
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=decode_hook).decode
    return found


@overload
def decode(kind: type[T], raw: Frame) -> T: ...
@overload
def decode(kind: Any, raw: Frame) -> Any: ...
def decode(kind: Any, raw: Frame) -> Any:
    """The typed value of `kind` in `raw`; what had to be repaired is logged at debug level.

    Raises `msgspec.ValidationError` where a strict part is wrong: its text names the field in wire
    spelling ("… - at `$.sessionId`"), holds no value of the input, and may be sent to the peer.
    Raises another `msgspec.DecodeError` for what is no JSON.
    """
    try:
        return decoder(kind)(raw)
    except (msgspec.DecodeError, RecursionError):
        return _logged(kind, _decode_forgiving(kind, raw))


@overload
def decode_reporting(kind: type[T], raw: Frame) -> tuple[T, tuple[Repair, ...]]: ...
@overload
def decode_reporting(kind: Any, raw: Frame) -> tuple[Any, tuple[Repair, ...]]: ...
def decode_reporting(kind: Any, raw: Frame) -> tuple[Any, tuple[Repair, ...]]:
    """Like `decode`, with what was repaired, in the order of the message; raises the same."""
    try:
        return decoder(kind)(raw), ()
    except (msgspec.DecodeError, RecursionError):
        return _decode_forgiving(kind, raw)


@overload
def decode_params(kind: type[T], raw: Frame | None) -> T: ...
@overload
def decode_params(kind: Any, raw: Frame | None) -> Any: ...
def decode_params(kind: Any, raw: Frame | None) -> Any:
    """Like `decode`; None and null count as `{}`, which is right where nothing is required.

    Source: acp-v1 §1.
    """
    data = _given(kind, raw)
    try:
        return decoder(kind)(data)
    except (msgspec.DecodeError, RecursionError):
        return _logged(kind, _decode_forgiving(kind, data))


def params_decoder(kind: Any) -> Callable[[Frame | None], Any]:
    """`decode_params` of one kind, for a path that is taken often."""
    strict = decoder(kind)

    def decode_raw(raw: Frame | None) -> Any:
        if raw is not None and len(raw) >= _NULL_BYTES:
            try:
                return strict(raw)
            except (msgspec.DecodeError, RecursionError):
                pass
        return decode_params(kind, raw)

    return decode_raw


@overload
def decode_result(kind: type[T], raw: Frame | None) -> T: ...
@overload
def decode_result(kind: Any, raw: Frame | None) -> Any: ...
def decode_result(kind: Any, raw: Frame | None) -> Any:
    """Like `decode`, for what an answer holds: None and null count as `{}`.

    A list that is required, but lenient where it is malformed, may also be missing: some agents
    answer `session/list` with null and `session/set_config_option` with `{}`, and what was asked
    for is done all the same. Source: acp-v1 §20, quirks 7 and 8.
    """
    data = _given(kind, raw)
    try:
        return decoder(kind)(data)
    except (msgspec.DecodeError, RecursionError):
        return _logged(kind, _decode_forgiving(kind, data, lax=True))


class StrictUpdates:
    """Decodes updates of known kinds; for a hot path, which gives all others to `decode_update`.

    The decoder of the largest union there is takes milliseconds to make: no agent needs it, a client
    with its first update.
    """

    __slots__ = ("decode",)

    def __init__(self) -> None:
        #: The strict decode function; see `decoder` for what it raises.
        self.decode: Callable[[Frame], v1_unstable.SessionUpdate] = self._first

    def _first(self, raw: Frame) -> v1_unstable.SessionUpdate:
        strict: Callable[[Frame], v1_unstable.SessionUpdate] = decoder(v1_unstable.SessionUpdate)
        self.decode = strict
        return strict(raw)


strict_updates = StrictUpdates()


def decode_update(raw: Frame) -> v1_unstable.SessionUpdate:
    """The session update in `raw` (the value of `params.update`).

    What is no update of a known kind, any JSON at all, comes back as `UnknownUpdate` with its own
    text, mended where it was no Unicode, and the reason. Raises `msgspec.DecodeError` only for what
    is no JSON; a part that msgspec has cut out of a frame always is.
    """
    try:
        return strict_updates.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        update: v1_unstable.SessionUpdate = _logged(
            "SessionUpdate", _decode_forgiving(v1_unstable.SessionUpdate, raw)
        )
    except _TooDeep:
        # Not parsed to its end, but msgspec has skipped over it when it cut the frame.
        return UnknownUpdate(repair_text(raw), _TOO_DEEP)
    return update


def loads(raw: Frame) -> Any:
    """The JSON value in `raw`, untyped: dicts, lists, strings, numbers, booleans, None.

    Text that is no Unicode is mended. Raises `msgspec.DecodeError` for what is no JSON, and for a
    number that Python's own types do not hold.
    """
    return decode(Any, raw)


class _TooDeep(msgspec.DecodeError):
    def __init__(self) -> None:
        super().__init__(_TOO_DEEP)


def _given(kind: Any, raw: Frame | None) -> Frame:
    """What to decode: `{}` for None and null, unless anything goes."""
    if raw is None or (len(raw) < _NULL_BYTES and bytes(raw).strip() == b"null"):
        return b"null" if kind is Any else b"{}"
    return raw


def _logged(kind: Any, result: tuple[Any, tuple[Repair, ...]]) -> Any:
    value, repairs = result
    for repair in repairs:
        _log.debug("%s: %s at %s", getattr(kind, "__name__", kind), repair.reason, repair.path)
    return value


def _decode_forgiving(
    kind: Any, raw: Frame, *, lax: bool = False
) -> tuple[Any, tuple[Repair, ...]]:
    """What the strict decoder of `kind` refused, in typed form, and what was repaired for it."""
    # Loaded by the first message that is not as it should be: most processes never meet one.
    from antiphon.schema._forgiving import forgive

    try:
        value, walk = _untyped(bytes(raw), lax=lax)
        typed = forgive(kind, value, walk)
    except RecursionError:
        raise _TooDeep from None
    return typed, tuple(walk.repairs)


def _untyped(data: bytes, *, lax: bool) -> tuple[Any, Walk]:
    """The untyped value of `data`, mended if need be, and a walk that knows about it."""
    from antiphon.schema._forgiving import Walk

    try:
        return msgspec.json.decode(data), Walk(data, out_of_range=False, lax=lax)
    except msgspec.ValidationError:
        out_of_range = True  # the only thing that untyped JSON is refused for
    except msgspec.DecodeError:
        out_of_range = False
    mended = repair_text(data)
    if mended == data and not out_of_range:
        return msgspec.json.decode(data), Walk(data, out_of_range=False, lax=lax)  # raises again
    try:
        value = msgspec.json.decode(mended)
        out_of_range = False
    except msgspec.ValidationError:
        value = _with_markers(mended)
        out_of_range = True
    walk = Walk(mended, out_of_range=out_of_range, lax=lax)
    if mended != data:
        walk.note(None, "Text that is no Unicode was replaced by U+FFFD")
    return value, walk


def _with_markers(data: bytes) -> Any:
    """The untyped value of JSON with numbers that msgspec refuses; `OutOfRange` stands for them."""
    import json

    from antiphon.schema._forgiving import OutOfRange

    def integer(digits: str) -> Any:
        try:
            return int(digits)
        except ValueError:  # more digits than Python converts
            return OutOfRange()

    def number(text: str) -> Any:
        value = float(text)
        return value if math.isfinite(value) else OutOfRange()

    def refuse(name: str) -> NoReturn:
        msg = f"JSON is malformed: {name} is no value"
        raise msgspec.DecodeError(msg)

    try:
        return json.loads(
            data.decode(), parse_int=integer, parse_float=number, parse_constant=refuse
        )
    except json.JSONDecodeError as error:
        msg = f"JSON is malformed: {error.msg} (character {error.pos})"
        raise msgspec.DecodeError(msg) from None


# --- encoding -----------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """The JSON of a wire struct or any JSON value: compact, one line, UTF-8.

    Lone surrogates, in keys too, become U+FFFD, and two that make a pair become the character they
    mean. NaN and infinities become null: whatever holds numbers that a user handed in goes through
    `encode_checked`, or `refuse_non_finite` has looked at it. Raises `TypeError` for what is no JSON
    value, `ValueError` for what contains itself.
    """
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode_mended(value)
    except RecursionError:
        raise ValueError(_CIRCULAR) from None


def encode_checked(value: Any) -> bytes:
    """Like `encode`, and refuses NaN and infinities, in structs and in untyped values.

    JSON has no such numbers, and a null in their place would be a different statement. Raises
    `ValueError` naming the place, and what `encode` raises.
    """
    try:
        body = _encode(value)
    except (UnicodeEncodeError, RecursionError):
        refuse_non_finite(value)
        return encode(value)
    # They are written as null, so where none is written there is none. Searching a short text costs a
    # third of looking at the value; a long one holds much text and few members. From its end since that
    # takes half as long: Python searches forwards in a way that is made for long texts.
    if len(body) > _SEARCHED or body.rfind(b"null") >= 0:
        refuse_non_finite(value)
    return body


def refuse_non_finite(value: Any) -> None:
    """Raise `ValueError`, naming the place, where NaN or an infinity is in a JSON value or struct.

    Raises `TypeError` for what is no JSON value, `ValueError` for what contains itself.
    """
    if value.__class__ in _PLAIN:
        return
    try:
        where = _non_finite(value)
    except RecursionError:
        raise ValueError(_CIRCULAR) from None
    if where is not None:
        msg = f"{type(value).__name__}{where} is NaN or infinite, and JSON has no such number"
        raise ValueError(msg)


def _encode_mended(value: Any) -> bytes:
    try:
        return _encode(_mended(value))
    except RecursionError:
        raise ValueError(_CIRCULAR) from None


def _hook(value: Any) -> Any:
    """The `enc_hook`: unknown variants as they came, if on one line; all else is refused."""
    if not isinstance(value, Unknown):
        msg = f"{type(value).__name__} is no JSON value"
        raise TypeError(msg)
    if b"\n" in value.raw or b"\r" in value.raw:
        # Only white space between tokens can be that, and in a frame it would end the line.
        return msgspec.Raw(msgspec.json.format(value.raw, indent=-1))
    return encode_hook(value)


_encode = msgspec.json.Encoder(enc_hook=_hook).encode

#: Bytes of JSON up to which searching its text is cheaper than looking at the value.
_SEARCHED = 1024

# Values of these classes hold no float.
_PLAIN = frozenset(
    {str, int, bool, NoneType, msgspec.UnsetType, bytes, msgspec.Raw, Unknown, UnknownUpdate}
)

# The fields of each struct class that may hold a float somewhere below them. Most hold strings, so
# that looking for NaN takes a handful of attribute reads for a message, and not a scan of its text.
_loose: dict[type, tuple[str, ...]] = {}


def _non_finite(value: Any) -> str | None:
    """Where below `value` there is a float that JSON cannot say, as a suffix; None if nowhere."""
    cls = value.__class__
    if (names := _loose.get(cls)) is None:
        if cls is float:
            return None if math.isfinite(value) else ""
        if cls is dict:
            return _non_finite_in(value.items(), "[{!r}]")
        if cls is list or cls is tuple:
            return _non_finite_in(enumerate(value), "[{}]")
        if not isinstance(value, msgspec.Struct):
            # Whatever else msgspec can write: a dataclass, a set, a subclass of dict or float.
            return _non_finite_other(value)
        names = _loose[cls] = _loose_fields(cls)
    for name in names:
        member = getattr(value, name)
        if member is not UNSET and member.__class__ not in _PLAIN:
            where = _non_finite(member)
            if where is not None:
                return f".{name}{where}"
    return None


def _non_finite_in(items: Any, step: str) -> str | None:
    for key, item in items:
        if item.__class__ not in _PLAIN:
            where = _non_finite(item)
            if where is not None:
                return step.format(key) + where
    return None


def _non_finite_other(value: Any) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    plain = msgspec.to_builtins(value, enc_hook=_hook_plain)
    return _non_finite(plain) if type(plain) in {dict, list, float} else None


def _hook_plain(value: Any) -> Any:
    """An `enc_hook` for `to_builtins`, which has no way to pass JSON text on."""
    if isinstance(value, Unknown):
        return value.data
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    return _hook(value)


def _loose_fields(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    names = cls.__struct_fields__
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):  # annotations that cannot be resolved from outside
        return names
    return tuple(name for name in names if _may_hold_float(hints[name]))


def _may_hold_float(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return False
    parts = typing.get_args(hint)
    if parts:
        return any(map(_may_hold_float, parts))
    return hint not in {str, int, bool, NoneType, msgspec.UnsetType}


_SURROGATE = "[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]"


def _mended(value: Any) -> Any:
    """`value` with text that can be written; what needs no mending is the same object."""
    if isinstance(value, str):
        return re.sub(_SURROGATE, _mended_surrogate, value)
    if is_object(value):
        return {_mended(key): _mended(item) for key, item in value.items()}
    if _is_sequence(value):
        return [_mended(item) for item in value]
    if isinstance(value, msgspec.Struct):
        changed: dict[str, Any] = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            new = _mended(old)
            if new is not old:
                changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if type(value) in _PLAIN or isinstance(value, float):
        return value
    plain = msgspec.to_builtins(value, enc_hook=_hook_plain)
    return _mended(plain) if type(plain) in {dict, list, str} else plain


def _is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def _mended_surrogate(match: re.Match[str]) -> str:
    units = match[0]
    if len(units) == 1:
        return "\ufffd"
    return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
