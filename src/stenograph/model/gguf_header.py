"""The header of a GGUF file, read strictly: key/value metadata, and whether all the tensor data is there.

Owns the byte layout (GGUF versions 2 and 3, little-endian; source: docs/gguf.md of the ggml project). Knows nothing of
the keys' meaning. A length in a damaged file is checked against the remaining bytes before it is believed, so no file
makes the reader loop, allocate or raise anything but `BadGguf`.
"""

import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from stenograph.core.loaded import entry

SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


class BadGguf(ValueError):
    """The bytes are not a whole GGUF file; the message says why, without the file's name."""


class _Cursor:
    """A position in the file's bytes, never beyond their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes. Raises BadGguf when there are fewer."""
        end = self.offset + num_bytes
        if end > len(self._data):
            raise BadGguf(f"it is cut short: byte {end} is needed, but the file has {len(self._data)}")
        taken = self._data[self.offset : end]
        self.offset = end
        return taken

    def unpack(self, layout: str) -> tuple[int, ...]:
        """The next little-endian integers, as `struct` spells their layout."""
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def text(self) -> str:
        """A string: its length in bytes, then UTF-8."""
        (num_bytes,) = self.unpack("Q")
        try:
            return str(self.take(num_bytes), "utf-8")
        except UnicodeDecodeError as error:
            raise BadGguf(f"a string before byte {self.offset} is not UTF-8") from error

    def value(self, kind: int) -> object:
        """A value of the type numbered `kind`; an array becomes a list."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array()
        if kind in SCALAR_CODES:
            return struct.unpack("<" + SCALAR_CODES[kind], self.take(struct.calcsize(SCALAR_CODES[kind])))[0]
        raise BadGguf(f"a value before byte {self.offset} has the unknown type {kind}")

    def _array(self) -> list[object]:
        kind, length = self.unpack("IQ")
        if kind == STRING:
            return self._texts(length)
        if kind in SCALAR_CODES:
            size = struct.calcsize("<" + SCALAR_CODES[kind])
            return list(struct.unpack(f"<{length}{SCALAR_CODES[kind]}", self.take(length * size)))
        raise BadGguf(f"an array before byte {self.offset} has elements of the unsupported type {kind}")

    def _texts(self, num: int) -> list[object]:
        """So many strings: a vocabulary and its merges are 100,000, most of a header's time."""
        data, offset, texts = self._data, self.offset, list[object]()
        with suppress(struct.error, UnicodeDecodeError):
            for _ in range(num):
                start = offset + _LENGTH.size
                end = start + _LENGTH.unpack_from(data, offset)[0]
                if end > len(data):
                    break
                texts.append(str(data[start:end], "utf-8"))
                offset = end
        self.offset = offset
        while len(texts) < num:  # one is damaged: this says how
            texts.append(self.text())
        return texts


class TensorType(NamedTuple):
    """A type of numbers in blocks: so many values in so many bytes."""

    number: int
    name: str
    block_values: int
    block_bytes: int


F32, F16, Q4_1, Q8_0 = (
    TensorType(0, "F32", 1, 4), TensorType(1, "F16", 1, 2), TensorType(3, "Q4_1", 32, 20), TensorType(8, "Q8_0", 32, 34)
)  # fmt: skip
_OWN_TYPES = {kind.number: kind for kind in (F32, F16, Q4_1, Q8_0)}
"""Types read without `gguf` (50 ms to import): the default model's, and plain numbers."""
_TYPE_OF = "stenograph.model.gguf_types:type_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor's data is: `num_bytes` from byte `start` of the file. `shape` has the fastest dimension first."""

    kind: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The metadata (scalars, strings and lists by key), and the tensors by name."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises BadGguf when it is malformed or any tensor's data is missing, OSError when it cannot be read.
    """
    if path.stat().st_size == 0:
        raise BadGguf("it is empty")
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    cursor = _Cursor(data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise BadGguf("it does not begin with the bytes GGUF")
    (version,) = cursor.unpack("I")
    if version not in (2, 3):
        raise BadGguf(f"it is of GGUF version {version}; 2 and 3, little-endian, are supported")
    num_tensors, num_values = cursor.unpack("QQ")
    metadata: dict[str, object] = {}
    for _ in range(num_values):
        key = cursor.text()
        (kind,) = cursor.unpack("I")
        if key in metadata:
            raise BadGguf(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(kind)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise BadGguf(f"general.alignment is {alignment!r}")
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name, tensor = _tensor(cursor)
        if name in tensors:
            raise BadGguf(f"the tensor {name!r} is there twice")
        tensors[name] = tensor
    start = -(-cursor.offset // alignment) * alignment
    end = start + max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=-start)
    if end > len(data):
        raise BadGguf(f"it is cut short: its tensors end at byte {end}, the file has {len(data)}")
    placed = {name: replace(tensor, start=start + tensor.start) for name, tensor in tensors.items()}
    return GgufHeader(metadata=metadata, tensors=placed)


def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """Read one tensor's entry: its name, and where its data is, from the start of all tensor data."""
    name = cursor.text()
    (num_dimensions,) = cursor.unpack("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise BadGguf(f"the tensor {name!r} has {num_dimensions} dimensions")
    shape = cursor.unpack(f"{num_dimensions}Q")
    kind, offset = cursor.unpack("IQ")
    try:
        found: TensorType = _OWN_TYPES.get(kind) or entry(_TYPE_OF)(kind)
    except (ValueError, KeyError) as error:
        raise BadGguf(f"the tensor {name!r} has the unknown type {kind}") from error
    num_bytes = prod(shape) // found.block_values * found.block_bytes
    return name, GgufTensor(kind=found, shape=shape, start=offset, num_bytes=num_bytes)
