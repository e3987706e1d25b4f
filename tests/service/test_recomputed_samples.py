"""A sample of the embedded engine says what it takes to compute its log-probabilities again."""

import itertools
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.tiny.llama import write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files

from .conftest import running

NUM_TOKENS = 32
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 5, "min_p": 0.05},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"logit_bias": {"70": 5}, "top_p": 0.9},
    {"regex": "(a|b){8}c{8}"},
)
TEMPERATURES = (0.6, 1.0, 1.7)


async def made_samples(url: str, folder: Path) -> list[dict[str, Any]]:
    """The samples of one completion each, in many ways."""
    async with aiohttp.ClientSession(url) as http:

        async def post(path: str, body: dict[str, Any]) -> Any:
            async with http.post(path, json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        session = (await post("/sessions", {}))["session_id"]
        for number, (how, temperature) in enumerate(itertools.product(HOW, TEMPERATURES)):
            ending = {} if "regex" in how else {"ignore_eos": True}
            body = {"prompt": f"it {number}", "seed": number, "max_tokens": NUM_TOKENS, "temperature": temperature}
            await post(f"/sessions/{session}/v1/completions", {**body, **ending, **how})
        asked = {"format": "json", "include_side": True}
        samples: list[dict[str, Any]] = (await post(f"/sessions/{session}/samples", asked))["samples"]
        return samples


async def test_every_logprob_is_computed_again_from_the_sample_alone(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(max_batch=4, kv_tokens=2048))
    await engine.start()
    try:
        async with running(engine, make_renderer(load_model_files(folder), "auto")) as (url, _):
            samples = await made_samples(url, folder)
    finally:
        await engine.aclose()
    model = TinyModel(folder)
    apart: list[float] = []
    ignored: list[float] = []
    for sample in samples:
        (row,) = sample["turns"]
        first, tokens = len(sample["tokens"]) - sample["response_length"], sample["tokens"]
        assert (row["start"], row["end"]) == (first, len(tokens))
        assert "logprobs_kind" not in sample
        assert sample["weight_versions"] == ["0"]
        tempered = np.array(model.score(tokens, first, row["temperature"]))
        raw = np.array(model.score(tokens, first))
        apart += np.abs(tempered - sample["rollout_log_probs"]).tolist()
        apart += np.abs(raw - sample["raw_log_probs"]).tolist()
        if row["temperature"] != 1.0:
            ignored += np.abs(raw - sample["rollout_log_probs"]).tolist()
        if not row.keys() & {"top_p", "top_k", "presence_penalty", "logit_bias", "grammar"}:
            assert sample["sampling_log_probs"] == pytest.approx(sample["rollout_log_probs"], abs=1e-9)
        for start, end in row.get("forced", ()):
            assert sample["sampling_log_probs"][start - first : end - first] == [0.0] * (end - start)
    assert len(apart) > 2 * 15 * NUM_TOKENS
    assert max(apart) <= 1e-4
    assert np.mean(ignored) > 1e-2
    forced = [sample["turns"][0]["forced"] for sample in samples if "grammar" in sample["turns"][0]]
    assert len(forced) == len(TEMPERATURES)
    assert all(spans for spans in forced)
