"""`stenograph fetch --folder`: the default model as a folder that torch's libraries read, whole or not at all."""

import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from stenograph.embedded.forward.weights import load_weights
from stenograph.model.files import load_model_files

from .test_serve import command

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]


def fetched(gguf: Path, folder: Path, *, limit_bytes: int | None = None) -> "subprocess.CompletedProcess[str]":
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        command("fetch", "--model", str(gguf), "--folder", str(folder)),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )


def test_the_folder_has_the_model_s_weights_tokenizer_and_template(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    done = fetched(smollm2_path, folder)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert f"writing {folder}: 100 %" in done.stderr
    (config, weights), (read_config, read) = load_weights(smollm2_path), load_weights(folder)
    assert read_config == config
    assert np.array_equal(read.embed, weights.embed)
    for layer, other in zip(weights.layers, read.layers, strict=True):
        assert np.array_equal(layer.qkv, other.qkv)
        assert np.array_equal(layer.gate_up, other.gate_up)
    assert load_model_files(folder).eos_token_ids == load_model_files(smollm2_path).eos_token_ids
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<|im_start|>user\nhi<|im_end|>" in text
    again = fetched(smollm2_path, folder)
    assert again.returncode == 2
    assert (
        again.stderr == f"stenograph: --folder: {str(folder)!r} is there already: name another folder, or remove it\n"
    )
    of_a_folder = fetched(folder, tmp_path / "other")
    assert "is a folder already: use it as it is" in of_a_folder.stderr
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_no_folder_and_one_line(smollm2_path: Path, tmp_path: Path) -> None:
    done = fetched(smollm2_path, tmp_path / "model", limit_bytes=10_000_000)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"stenograph: --folder: cannot write {str(tmp_path / 'model')!r}: ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
