"""Memory for weights is handed out in parts that stay apart, and again from its beginning; files are read to it."""

import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.tiny.llama import write_tiny_folder
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.safetensors_folder import SafetensorsFolder
from stenograph.embedded.forward.weight_memory import CHUNK_BYTES, WeightMemory
from stenograph.embedded.forward.weights import load_weights

SHAPES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), max_size=12)


@given(shapes=SHAPES)
def test_arrays_are_whole_aligned_and_apart(shapes: list[tuple[int, ...]]) -> None:
    memory = WeightMemory()
    arrays = [memory.empty(shape) for shape in shapes]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        assert (array == number).all()


@given(shapes=SHAPES)
def test_cleared_memory_is_the_same_memory(shapes: list[tuple[int, ...]]) -> None:
    memory = WeightMemory()
    whole = (CHUNK_BYTES // 4 + 1,)  # has a mapping of its own
    first = [memory.empty(shape).ctypes.data for shape in (*shapes, whole, *shapes)]
    num_bytes = memory.num_bytes
    memory.clear()
    assert [memory.empty(shape).ctypes.data for shape in (*shapes, whole, *shapes)] == first
    assert memory.num_bytes == num_bytes


def test_arrays_outlive_their_memory() -> None:
    memory = WeightMemory()
    array = memory.empty((1000,))
    array[...] = 3
    del memory
    assert (array == 3).all()


def test_more_than_there_is_is_a_memory_error() -> None:
    for shape in ((2**31, 2**31), (2**60, 2**60)):
        with pytest.raises(MemoryError):
            WeightMemory().empty(shape)


def test_weights_are_read_to_the_memory_of_those_before(tmp_path: Path) -> None:
    folders = [write_tiny_folder(tmp_path / str(seed), seed=seed) for seed in range(2)]
    _, old = load_weights(folders[0])
    address, head = old.layers[0].qkv.ctypes.data, old.head.copy()
    _, new = load_weights(folders[1], old.memory)
    assert new.layers[0].qkv.ctypes.data == address
    assert not np.array_equal(new.head, head)
    fresh = load_weights(folders[1])[1]
    for ours, theirs in zip(new.layers, fresh.layers, strict=True):
        np.testing.assert_array_equal(ours.qkv, theirs.qkv)
        np.testing.assert_array_equal(ours.gate_up, theirs.gate_up)


NUM_ITEMS = 3 * 2**18 + 5
"""More numbers of 16 bits than are widened at once."""


def write_tensor(folder: Path, dtype: str, data: bytes) -> None:
    """A file of one tensor of `NUM_ITEMS` numbers."""
    entry = {"dtype": dtype, "shape": [NUM_ITEMS], "data_offsets": [0, len(data)]}
    header = msgspec.json.encode({"x": entry})
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_numbers_of_each_width_are_read_exactly(dtype: str, tmp_path: Path) -> None:
    stored = np.random.default_rng(0).standard_normal(NUM_ITEMS).astype(np.float16 if dtype == "F16" else np.float32)
    if dtype == "BF16":
        halves = (stored.view(np.uint32) >> 16).astype(np.uint16)
        data, wanted = halves.tobytes(), (halves.astype(np.uint32) << 16).view(np.float32)
    else:
        data, wanted = stored.tobytes(), stored.astype(np.float32)
    write_tensor(tmp_path, dtype, data)
    out = np.full(NUM_ITEMS, np.nan, np.float32)
    folder = SafetensorsFolder(tmp_path)
    folder.read("x", out)
    np.testing.assert_array_equal(out, wanted)
    path = tmp_path / "model.safetensors"
    for cut in (2, 2**20):  # after its header was read
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(StartupError, match="cut short inside tensor x"):
            folder.read("x", out)
