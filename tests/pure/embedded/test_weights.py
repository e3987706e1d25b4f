"""A model's files that are damaged are refused in one line that names them."""

import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.tiny.llama import tiny_tensors, write_tiny_folder, write_tiny_gguf
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.gguf_tensors import PIECE_VALUES, GgufTensors
from stenograph.embedded.forward.weights import load_weights
from stenograph.model.gguf_header import F16, F32, Q4_1, Q8_0, TensorType
from stenograph.model.gguf_types import type_of


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_shape(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 48', '"intermediate_size": 47'))


def other_architecture(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "GPT2LMHeadModel"))


@pytest.mark.parametrize("damage", [damage_config, remove_weights, cut_weights, other_shape, other_architecture])
def test_a_damaged_folder_is_one_line_that_names_it(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(StartupError) as caught:
        load_weights(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_a_gguf_file_that_is_cut_short_is_one_line_that_names_it(share: float, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(StartupError) as caught:
        load_weights(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shape_that_no_memory_holds_is_the_shape_s_fault_and_takes_none(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        (folder / "config.json").write_text(json.dumps({**config, name: 2**31 - 1}))
        with pytest.raises(StartupError, match="has shape"):
            load_weights(folder)


BITS = {"F32": (0x7F800000, 0x7FC00000, 0xFF800001), "F16": (0x7C00, 0x7E00, 0xFC01), "BF16": (0x7F80, 0x7FC0, 0xFF81)}
"""Infinity, NaN, and a signaling NaN that is negative, as bits."""


def write_safetensors(folder: Path, kind: str, name: str, at: int, bits: int | None) -> None:
    """The tiny model in a type, with these bits as the number `at` of a tensor."""
    write_tiny_folder(folder)
    entries, data = {}, bytearray()
    for other, tensor in tiny_tensors().items():
        stored = tensor.astype(np.float16).view(np.uint16) if kind == "F16" else tensor.view(np.uint32)
        if kind == "BF16":
            stored = (stored >> 16).astype(np.uint16)
        stored = stored.ravel().copy()
        if other == name and bits is not None:
            stored[at % len(stored)] = bits
        entries[other] = {
            "dtype": kind,
            "shape": tensor.shape,
            "data_offsets": [len(data), len(data) + stored.nbytes],
        }
        data += stored.tobytes()
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


@given(st.sampled_from(list(BITS)), st.sampled_from(list(tiny_tensors())), st.integers(0, 2**20), st.integers(0, 2))
def test_a_weight_that_is_no_number_is_refused_by_its_tensors_name(kind: str, name: str, at: int, which: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "model"
        write_safetensors(folder, kind, name, at, BITS[kind][which])
        size = tiny_tensors()[name].size
        with pytest.raises(StartupError) as caught:
            load_weights(folder)
        assert str(caught.value).startswith(f"{folder}: tensor {name} has 1 NaN or infinite values of {size}:")


def test_the_largest_numbers_of_each_type_are_taken(tmp_path: Path) -> None:
    for kind, bits in (("F32", 0x7F7FFFFF), ("F16", 0x7BFF), ("BF16", 0x7F7F)):
        write_safetensors(tmp_path / kind, kind, "model.norm.weight", 0, bits)
        assert load_weights(tmp_path / kind)[1].final_norm[0] == np.max(load_weights(tmp_path / kind)[1].final_norm)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("name", ["token_embd", "blk.1.attn_q", "blk.2.ffn_gate", "output_norm"])
def test_a_gguf_file_whose_numbers_or_scales_are_none_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", matrices=gguf.GGMLQuantizationType[kind])
    load_weights(path)
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == f"{name}.weight")
    block = b"\x00\x00\xc0\x7f" if tensor.tensor_type.name == "F32" else b"\xff\x7f"  # a block begins with its scale
    data = bytearray(path.read_bytes())
    data[int(tensor.data_offset) : int(tensor.data_offset) + len(block)] = block
    path.write_bytes(data)
    num_bad = gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]
    with pytest.raises(StartupError) as caught:
        load_weights(path)
    assert f"{path}: tensor {name}.weight has {num_bad} NaN or infinite values of " in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_a_gguf_file_is_read_as_the_format_s_own_reader_reads_it(kind: str, tmp_path: Path) -> None:
    """Which is not used: it makes an array of each token of a vocabulary."""
    path = write_tiny_gguf(tmp_path / "model.gguf", matrices=gguf.GGMLQuantizationType[kind])
    ours, theirs = GgufTensors(path), gguf.GGUFReader(path)
    assert ours.names == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        read = np.empty(ours.shape(tensor.name), np.float32)
        ours.read(tensor.name, read)
        assert read.shape == shape
        assert read.tobytes() == values.tobytes()
    named = {name: field.contents() for name, field in theirs.fields.items()}
    assert ours.fields == {k: value for k, value in named.items() if not k.startswith(("tokenizer.", "GGUF."))}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q6_K"])
def test_a_large_tensor_is_read_in_pieces_that_take_no_new_memory(kind: str, tmp_path: Path) -> None:
    """Of 2**20 values and a half piece, which are 4 MiB; `tracemalloc` counts NumPy's arrays."""
    wanted = gguf.GGMLQuantizationType[kind]
    shape = (PIECE_VALUES // 256 * 16 + PIECE_VALUES // 512, 256)
    data = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = np.zeros((shape[0], gguf.quant_shape_to_byte_shape(shape, wanted)[1]), np.uint8)
    if kind == "Q6_K":  # which `gguf` cannot write: any bytes, with a scale of 1 at each block's end
        stored[:] = np.random.default_rng(0).integers(0, 256, stored.shape, np.uint8)
        stored[:, -2:] = np.ones(1, np.float16).view(np.uint8)
    else:
        stored[:] = gguf.quants.quantize(data, wanted).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("large", stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors, out = GgufTensors(tmp_path / "model.gguf"), np.empty(shape, np.float32)
    tracemalloc.start()
    try:
        tensors.read("large", out)
        assert tracemalloc.get_traced_memory()[1] < out.nbytes / 2
    finally:
        tracemalloc.stop()
    assert out.tobytes() == gguf.quants.dequantize(stored, wanted).tobytes()


def test_a_tensor_that_is_no_whole_number_of_blocks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("odd", np.zeros(96, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    entry = b"odd" + (1).to_bytes(4, "little") + (96).to_bytes(8, "little")
    assert data.count(entry) == 1
    shape_and_kind = (1).to_bytes(4, "little") + (40).to_bytes(8, "little") + (8).to_bytes(4, "little")  # Q8_0
    path.write_bytes(data.replace(entry + bytes(4), b"odd" + shape_and_kind))
    with pytest.raises(StartupError, match="odd has 40 values, which are no whole blocks"):
        GgufTensors(path).read("odd", np.empty(40, np.float32))


@pytest.mark.parametrize("kind", [F32, F16, Q4_1, Q8_0])
def test_a_type_that_is_read_without_gguf_is_the_one_that_gguf_knows(kind: TensorType) -> None:
    assert kind == type_of(kind.number)


@pytest.mark.parametrize(("kind", "needs_gguf"), [("F16", False), ("Q4_1", False), ("Q8_0", False), ("Q5_1", True)])
def test_the_default_models_types_are_read_without_gguf(kind: str, needs_gguf: bool, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", matrices=gguf.GGMLQuantizationType[kind])
    program = (
        "import sys; from pathlib import Path; from stenograph.embedded.forward.weights import load_weights\n"
        "load_weights(Path(sys.argv[1])); print('gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout == f"{needs_gguf}\n"
