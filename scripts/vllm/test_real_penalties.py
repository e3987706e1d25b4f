"""What a real vLLM samples from under penalties, recomputed; and that no CPU has its sampling masks. Run by
scripts/test-vllm."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.distribution import Figures, recompute
from scripts.engine_table import serving
from scripts.real_engine import apart_by_rule, ask
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights

from .conftest import MAX_MODEL_LEN, RealVLLM

PROCESSED = ("--logprobs-mode", "processed_logprobs")
TOLERANCE_NATS = 2e-3
say = sys.stdout.write


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    """One that reports log-probabilities of what it samples from."""
    log = tmp_path_factory.mktemp("vllm") / "processed.log"
    server = RealVLLM(Path(os.environ["VLLM_JOB_MODEL"]), scale_out=True, log=log, flags=PROCESSED)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def model(processed: RealVLLM) -> NumpyForward:
    config, weights = load_weights(processed.model)
    return NumpyForward(config, weights, num_kv_tokens=MAX_MODEL_LEN)


def sample_of(vllm: RealVLLM, **asked: Any) -> dict[str, Any]:
    """The sample of a session of two chats with these parameters."""
    flags = ("--engine", "vllm", "--engine-url", vllm.url, "--engine-logprobs", "sampling")
    with serving(vllm.model, *flags) as url:
        session = ask(url, "/sessions", {})
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Say red red red blue blue, then a story."}]
        for text in ("And then?", ""):
            body = {"model": "m", "messages": messages, "max_tokens": 24, "ignore_eos": True, **asked}
            reply = ask(session["base_url"].removesuffix("/v1"), "/v1/chat/completions", body)
            messages += [reply["choices"][0]["message"], {"role": "user", "content": text}]
        (sample,) = ask(url, f"/sessions/{session['session_id']}/samples", {"format": "json"})["samples"]
    return dict(sample)


@pytest.mark.parametrize(
    "asked", [{"temperature": 0.7}, {"presence_penalty": 0.5, "frequency_penalty": 0.4, "temperature": 0.8}]
)
def test_what_it_samples_from_is_computed_again(
    processed: RealVLLM, model: NumpyForward, asked: dict[str, Any]
) -> None:
    figures = Figures()
    recompute(sample_of(processed, **asked), model, figures)
    say(f"\n{asked}: {len(figures.apart)} tokens apart at most {max(figures.apart):.1e} nats\n")
    assert max(figures.apart) < TOLERANCE_NATS


def test_a_repetition_penalty_counts_the_prompt_and_the_turn_s_own_tokens(
    processed: RealVLLM, model: NumpyForward
) -> None:
    sample = sample_of(processed, repetition_penalty=1.3, temperature=1.0)
    worst = apart_by_rule(sample, model)
    say(f"\na repetition penalty: apart at most, by what it counts: {worst}\n")
    assert {row["repetition_over"] for row in sample["turns"]} == {"line"}
    assert worst["line"] < TOLERANCE_NATS < worst["turn"]


def test_sampling_masks_need_a_runner_that_no_cpu_has(tmp_path: Path) -> None:
    """So supports are shown by a stand-in alone: vLLM's masks are made by kernels in Triton."""
    log = tmp_path / "masks.log"
    flags = (*PROCESSED, "--return-sampling-mask")
    server = RealVLLM(Path(os.environ["VLLM_JOB_MODEL"]), scale_out=True, log=log, flags=flags)
    try:
        with pytest.raises(AssertionError, match="it has ended"):
            server.start()
    finally:
        server.kill()
    assert "sampling distribution replay requires Model Runner V2" in log.read_text(encoding="utf-8")
