"""Texts, arrays and loose values as MessagePack has them. Pure.

Texts are UTF-8 with lone surrogates, which a JSON text can hold; arrays are their bytes, little-endian.
"""

import sys
from array import array
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from stenograph.core.types import Grammar, GrammarKind, RepetitionOver, SamplingParams

_IS_LITTLE = sys.byteorder == "little"
_DEFAULT_PARAMS = SamplingParams()


def params_written(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults in anything: 1 and 1.0 do, and 0.0 and -0.0."""
    found: dict[str, object] = {}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if repr(value) != repr(getattr(_DEFAULT_PARAMS, name)):
            found[name] = value
    return values_written(found)


def params_read(written: Mapping[str, Any]) -> SamplingParams:
    """The parameters of those fields."""
    values = values_read(written)
    if (over := values.get("repetition_over")) is not None:
        values["repetition_over"] = RepetitionOver(over)
    return SamplingParams(**values)


def values_written(values: Mapping[str, object]) -> dict[str, Any]:
    return {name: _value_written(value) for name, value in values.items()}


def _value_written(value: object) -> Any:
    """A field of SamplingParams: a text as bytes, a tuple as a list, a grammar as an object."""
    match value:
        case str():
            return text_written(value)
        case tuple() | list():
            return [_value_written(one) for one in cast("tuple[object, ...]", value)]
        case Grammar():
            return {"kind": value.kind, "source": text_written(value.source)}
        case _:
            return value


def values_read(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value_read(value) for name, value in values.items()}


def _value_read(value: Any) -> Any:
    match value:
        case bytes():
            return text_read(value)
        case list():
            return tuple(map(_value_read, cast("list[object]", value)))
        case dict():
            written = cast("dict[str, bytes | str]", value)
            return Grammar(kind=GrammarKind(str(written["kind"])), source=text_read(cast("bytes", written["source"])))
        case _:
            return value


def text_written(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def text_read(written: bytes) -> str:
    return written.decode("utf-8", "surrogatepass")


def maybe_written(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def maybe_read(written: bytes | None) -> str | None:
    return None if written is None else written.decode("utf-8", "surrogatepass")


def object_read(written: bytes) -> dict[str, object]:
    return msgspec.json.decode(written, type=dict[str, object])


def array_written(values: "array[int] | array[float]") -> bytes:
    if not _IS_LITTLE:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def ids_read(written: bytes) -> "array[int]":
    return cast("array[int]", _array_read("i", written))


def floats_read(written: bytes) -> "array[float]":
    return cast("array[float]", _array_read("d", written))


def _array_read(typecode: str, written: bytes) -> "array[Any]":
    values: array[Any] = array(typecode)
    values.frombytes(written)
    if not _IS_LITTLE:
        values.byteswap()
    return values
