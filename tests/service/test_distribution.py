"""From a sample alone, the very distribution that each token was sampled from is computed again."""

from pathlib import Path

import numpy as np

from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.embedded import EmbeddedEngine
from stenograph.http.app import make_renderer
from stenograph.model.files import load_model_files
from stenograph.testing.suite.distribution import Figures, mixed_samples, recompute
from stenograph.testing.tiny.llama import write_tiny_folder

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
