"""Tensors and metadata of a GGUF file, by name. The only user of the `gguf` package, whose failures end here."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import StartupError


class GgufTensors:
    """A GGUF file, mapped; tensors are dequantized when asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises StartupError: no such file, not GGUF, or cut short."""
        self._path = path
        if not path.is_file():
            raise StartupError(f"{path}: there is no such file")
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:
            raise StartupError(f"{path}: is cut short, or not a GGUF file: {_one_line(error)}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.fields: Mapping[str, object] = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")
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
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, out: NDArray[np.float32]) -> None:
        """Write a tensor, dequantized to float32, to `out`, which has its shape. Raises StartupError for a type that
        cannot be; KeyError if unknown."""
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:
            kind = tensor.tensor_type.name
            raise StartupError(f"{self._path}: tensor {name} ({kind}) cannot be read: {_one_line(error)}") from error
        out[...] = values.reshape(out.shape)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
