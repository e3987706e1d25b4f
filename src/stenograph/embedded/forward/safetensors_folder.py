"""Tensors of a Hugging Face folder, by name, as float32.

Owns the safetensors layout (8 bytes little-endian header length, JSON header, data) because bfloat16, the type of most
published weights, has no numpy type and is widened here. Knows no architecture.
"""

from io import RawIOBase
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import StartupError
from stenograph.model.shards import SHARD_INDEX, weight_files

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors README)."""

_PIECE_ITEMS = 2**18
"""Numbers of 16 bits widened at once: they stay in the processor's cache."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFolder:
    """All tensors of `model.safetensors`, or of the shards named in `model.safetensors.index.json`."""

    def __init__(self, folder: Path) -> None:
        """Read the headers. Raises StartupError naming the file at fault."""
        self._entries: dict[str, tuple[Path, int, _Entry]] = {}
        for path in _files(folder):
            self._read_header(path)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's stored shape. Raises KeyError for an unknown name."""
        return self._entries[name][2].shape

    def read(self, name: str, out: NDArray[np.float32]) -> None:
        """Read a tensor to `out`, contiguous and of its stored shape, widened to float32. Float32 data is copied
        nowhere else.

        Raises StartupError; KeyError for an unknown name.
        """
        path, base, entry = self._entries[name]
        if entry.dtype not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise StartupError(f"{path}: tensor {name} is {entry.dtype}; supported are {known}")
        start, end = entry.data_offsets
        if min(entry.shape, default=0) < 0 or end - start != int(np.prod(entry.shape)) * _ITEM_BYTES[entry.dtype]:
            raise StartupError(f"{path}: tensor {name} has {end - start} bytes, which is not its shape {entry.shape}")
        with path.open("rb", buffering=0) as file:
            file.seek(base + start)
            flat = out.reshape(-1)
            num_read = _read_into(file, flat) if entry.dtype == "F32" else _read_halves(file, flat, entry.dtype)
            if num_read != end - start:
                raise StartupError(f"{path}: is cut short inside tensor {name}")

    def _read_header(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                    raise StartupError(f"{path}: is cut short, or not a safetensors file")
                header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except FileNotFoundError as error:
            raise StartupError(f"{path}: there is no such file") from error
        except (OSError, msgspec.DecodeError) as error:
            raise StartupError(f"{path}: cannot be read as safetensors: {error}") from error
        for name, entry in entries.items():
            start, end = entry.data_offsets
            if not 0 <= start <= end <= size - 8 - length:
                raise StartupError(f"{path}: is cut short: tensor {name} ends after the file does")
            self._entries[name] = (path, 8 + length, entry)


def _files(folder: Path) -> list[Path]:
    index = folder / SHARD_INDEX
    try:
        names = weight_files(folder)
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"{index}: cannot be read: {error}") from error
    if any(Path(name).name != name for name in names):
        raise StartupError(f"{index}: names a shard outside of the folder")
    return [folder / name for name in names]


def _read_halves(file: RawIOBase, out: NDArray[np.float32], dtype: str) -> int:
    """Fill `out` with numbers of 16 bits, widened piece by piece; returns how many bytes there were."""
    piece, num_read = np.empty(min(_PIECE_ITEMS, len(out)), np.uint16), 0
    for at in range(0, len(out), _PIECE_ITEMS):
        wide = out[at : at + _PIECE_ITEMS]
        stored = piece[: len(wide)]
        num_read += _read_into(file, stored)
        _widen(stored, dtype, wide)
    return num_read


def _read_into(file: RawIOBase, place: NDArray[np.float32] | NDArray[np.uint16]) -> int:
    """Fill `place` from a file; returns how many bytes there were."""
    left, num_read = memoryview(place.view(np.uint8).data), 0
    while num_read < len(left) and (num := file.readinto(left[num_read:])):
        num_read += num
    return num_read


def _widen(stored: NDArray[np.uint16], dtype: str, out: NDArray[np.float32]) -> None:
    """Numbers of 16 bits as float32."""
    if dtype == "BF16":
        np.left_shift(stored, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = stored.view(np.dtype("<f2"))
