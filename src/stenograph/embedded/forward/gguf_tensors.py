"""Tensors and metadata of a GGUF file, by name; what `gguf` cannot dequantize ends here.

The header is read by our own reader: `gguf`'s makes an array of each token of a vocabulary, which takes seconds.
"""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import StartupError
from stenograph.model.gguf_header import BadGguf, read_gguf_header

PIECE_VALUES = 2**16
"""Values that are dequantized at once: few enough for a core's cache, and for memory that `malloc` hands out again. Of
a whole tensor the copies that `gguf` makes are new pages each, which took most of a model's start."""


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
        """Write a tensor, dequantized to float32, to `out`, which has its shape. Raises StartupError for a type that
        cannot be; KeyError if unknown."""
        tensor = self._tensors[name]
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        stored = self._data[tensor.start : tensor.start + tensor.num_bytes].reshape(-1, block_bytes)
        flat, at_once = out.reshape(-1), PIECE_VALUES // block_values
        if len(stored) * block_values != len(flat):
            raise StartupError(f"{self._path}: tensor {name} has {len(flat)} values, which are no whole blocks")
        try:
            for start in range(0, len(stored), at_once):
                piece = stored[start : start + at_once].reshape(1, -1)  # one row: `gguf` takes 16 at a time
                values = gguf.quants.dequantize(piece, tensor.kind)
                flat[start * block_values : (start + at_once) * block_values] = values.reshape(-1)
        except Exception as error:
            kind = tensor.kind.name
            raise StartupError(f"{self._path}: tensor {name} ({kind}) cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
