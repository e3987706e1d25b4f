"""A GGUF file becomes a folder only where the folder says the same model."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from standins.tiny.llama import HEAD_DIM, write_tiny_gguf
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.hf_folder import write_folder
from stenograph.embedded.forward.weights import load_weights


def silent(what: str, done: int, total: int) -> None:
    """Show no progress."""


def test_a_model_with_rope_factors_of_its_own_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = write_tiny_gguf(tmp_path / "model.gguf", rope_factors=factors)
    with pytest.raises(StartupError, match=r"has rope factors of its own \(rope_freqs\.weight\)"):
        write_folder(path, tmp_path / "folder", progress=silent)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("factors", [None, np.ones(HEAD_DIM // 2, np.float32)])
def test_a_model_whose_rope_a_config_says_has_the_same_frequencies_in_its_folder(
    factors: NDArray[np.float32] | None, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", rope_factors=factors)
    write_folder(path, tmp_path / "folder", progress=silent)
    (config, weights), (read_config, read) = load_weights(path), load_weights(tmp_path / "folder")
    assert read_config == config
    assert np.array_equal(read.inv_freq, weights.inv_freq)
