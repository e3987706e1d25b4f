"""A model's files that are damaged are refused in one line that names them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stenograph.core.errors import StartupError
from stenograph.embedded.forward.weights import load_weights
from stenograph.testing.tiny.llama import write_tiny_folder, write_tiny_gguf


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
