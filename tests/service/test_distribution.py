"""From a sample alone, the very distribution that each token was sampled from is computed again."""

from pathlib import Path

import numpy as np
import pytest

from scripts.distribution import Figures, mixed_samples, recompute
from scripts.distribution_run import TOKENS_AT_ONCE, SavedFigures, measure
from standins.tiny.llama import write_tiny_folder
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files

from .conftest import running

NUM_TOKENS = 2000
PROMPTS = ("it is", "a", "the one and the other", "no")


async def test_the_distribution_that_was_sampled_from_is_computed_again_from_the_sample_alone(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(max_batch=8, kv_tokens=4096))
    await engine.start()
    try:
        async with running(engine, make_renderer(load_model_files(folder), "auto")) as (url, _):
            samples = await mixed_samples(url, PROMPTS, num_tokens=NUM_TOKENS, max_tokens=24, concurrency=8)
    finally:
        await engine.aclose()
    config, weights = load_weights(folder)
    model, figures = NumpyForward(config, weights, num_kv_tokens=config.max_context), Figures()
    for sample in samples:
        recompute(sample, model, figures)
    assert len(figures.apart) >= NUM_TOKENS
    assert np.mean(figures.apart) <= 1e-4, figures
    assert max(figures.apart) <= 1e-3, figures
    assert np.mean(figures.ignored) > 1e-2, figures
    assert np.median(figures.num_bytes) <= 8, figures


def _batch(first: int, num_wanted: int) -> tuple[int, Figures]:
    """As many sessions as there are thousands of tokens, whose figures depend on the first one's number."""
    figures = Figures()
    for at in range(num_wanted):
        figures.apart.append(1e-6 * first + 1e-9 * at)
        figures.ignored.append(0.5)
        figures.num_bytes.append(at % 7)
        figures.num_ids.append(at % 3 - 1)
    return num_wanted // 1000, figures


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path: Path) -> None:
    num_tokens = 4 * TOKENS_AT_ONCE
    whole = SavedFigures(tmp_path / "whole")
    measure(whole, num_tokens, _batch, lambda line: None)
    num_calls = 0

    def interrupted(first: int, num_wanted: int) -> tuple[int, Figures]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt
        return _batch(first, num_wanted)

    with pytest.raises(KeyboardInterrupt):
        measure(SavedFigures(tmp_path / "cut"), num_tokens, interrupted, lambda line: None)
    lines: list[str] = []
    again = SavedFigures(tmp_path / "cut")
    measure(again, num_tokens, interrupted, lines.append)
    assert lines[0].startswith(f"going on after {2 * TOKENS_AT_ONCE} of {num_tokens} tokens")
    assert num_calls == 5
    assert again.figures == whole.figures


def test_a_file_of_figures_that_was_cut_short_is_measured_again(tmp_path: Path) -> None:
    measure(SavedFigures(tmp_path), 3 * TOKENS_AT_ONCE, _batch, lambda line: None)
    second = tmp_path / "00001.npz"
    whole = second.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        second.write_bytes(whole[:size])
        assert len(SavedFigures(tmp_path).figures.apart) == TOKENS_AT_ONCE, size
