"""Tensors and metadata of a GGUF file, by name; an unsupported type ends here.

The default model's types are dequantized here, in half of `gguf`'s time; the others by `gguf`.

The header is read by our own reader: `gguf`'s makes an array of each token of a vocabulary, and so takes seconds.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.model.gguf_header import F16, F32, Q4_1, Q8_0, BadGguf, TensorType, read_gguf_header

PIECE_VALUES = 2**16
"""Values dequantized at once: few enough for a core's cache, and for `malloc` to reuse its memory. Of a whole tensor
the copies on the way are new pages each: they took most of a model's start."""

_OTHERS = "stenograph.model.gguf_types:dequantize"


class GgufTensors:
    """A GGUF file, mapped; tensors are dequantized when asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises StartupError: no such file, not GGUF, or cut short."""
        self._path = path
        if not path.is_file():
            raise StartupError(f"{path}: there is no such file")
        try:
            header = read_gguf_header(path)
            self._data: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
        except (BadGguf, OSError) as error:
            raise StartupError(f"{path}: is cut short, or not a GGUF file: {_one_line(error)}") from error
        self._tensors = header.tensors
        self.fields: Mapping[str, object] = {
            name: value for name, value in header.metadata.items() if not name.startswith("tokenizer.")
        }

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._tensors)

    def field(self, key: str) -> object:
        """A metadata value, None where there is none."""
        return self.fields.get(key)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in numpy's order (GGUF lists it reversed). Raises StartupError where it is missing."""
        if name not in self._tensors:
            raise StartupError(f"{self._path}: tensor {name} is missing")
        return self._tensors[name].shape[::-1]

    def read(self, name: str, out: NDArray[np.float32]) -> None:
        """Write a tensor, dequantized to float32, to `out` of the same shape. Raises StartupError for an unsupported
        type; KeyError if unknown."""
        tensor = self._tensors[name]
        kind = tensor.kind
        stored = self._data[tensor.start : tensor.start + tensor.num_bytes].reshape(-1, kind.block_bytes)
        flat, at_once = out.reshape(-1), PIECE_VALUES // kind.block_values
        if len(stored) * kind.block_values != len(flat):
            raise StartupError(f"{self._path}: tensor {name} has {len(flat)} values, which are no whole blocks")
        values = flat.reshape(-1, kind.block_values)
        try:
            for start in range(0, len(stored), at_once):
                _dequantize(stored[start : start + at_once], kind, values[start : start + at_once])
        except Exception as error:
            why = _one_line(error)
            raise StartupError(f"{self._path}: tensor {name} ({kind.name}) cannot be read: {why}") from error


def _dequantize(blocks: NDArray[np.uint8], kind: TensorType, out: NDArray[np.float32]) -> None:
    """Write the values of blocks [N, bytes] to `out` [N, values]."""
    if kind is F32:
        out[...] = blocks.view(np.float32)
    elif kind is F16:
        out[...] = blocks.view(np.float16)
    elif kind is Q8_0:
        out[...] = blocks[:, 2:].view(np.int8)
        out *= _scales(blocks, 1)
    elif kind is Q4_1:
        out[:, :16] = blocks[:, 4:] & 15
        out[:, 16:] = blocks[:, 4:] >> 4
        scales = _scales(blocks, 2)
        out *= scales[:, :1]
        out += scales[:, 1:]
    else:
        out[...] = entry(_OTHERS)(blocks, kind).reshape(out.shape)


def _scales(blocks: NDArray[np.uint8], num: int) -> NDArray[np.float32]:
    """The numbers of 16 bits at the beginning of each block [N, num]."""
    return blocks[:, : 2 * num].view(np.float16).astype(np.float32)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
