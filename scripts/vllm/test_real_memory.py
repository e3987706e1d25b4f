"""Forty sessions at once before two real vLLMs with memory for few of them: turns wait here, and none is lost. Run by
scripts/test-vllm.

The model has two layers and random weights: what counts is how much is held, not what is said.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from scripts.engine_table import serving
from scripts.real_engine import ask

from .conftest import RealVLLM

NUM_SESSIONS, NUM_TURNS, MAX_TOKENS = 40, 2, 160
BLOCK_TOKENS, NUM_BLOCKS = 32, 64
FLAGS = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}', "--max-num-seqs", "32")
MEMORY = ("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(NUM_BLOCKS))
READ_S = 0.2
say = sys.stdout.write


@pytest.fixture(scope="module")
def small_vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealVLLM]]:
    folder, model = tmp_path_factory.mktemp("vllm"), Path(os.environ["VLLM_JOB_MODEL"])
    started = [
        RealVLLM(model, scale_out=True, log=folder / f"memory{number}.log", flags=(*FLAGS, *MEMORY))
        for number in range(2)
    ]
    try:
        for one in started:
            one.start()
        yield started
    finally:
        for one in started:
            one.kill()


def figures(url: str, names: Mapping[str, str]) -> dict[str, float]:
    """Each metric's largest value over its labels."""
    text: str = ask(url, "/metrics")
    found = {key: re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)", text, re.MULTILINE) for key, name in names.items()}
    return {key: max(map(float, values), default=0.0) for key, values in found.items()}


OURS = {
    "waiting here": "stenograph_turns_waiting",
    "use read": "stenograph_engine_kv_usage",
    "queue read": "stenograph_engine_requests_waiting",
    "preemptions read": "stenograph_engine_preemptions_total",
}
THEIRS = {
    "use": "vllm:kv_cache_usage_perc",
    "queue": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
}


def rollout(url: str, number: int) -> int:
    """A session's turns, one after the other: its sampled tokens."""
    session, messages, num_tokens = ask(url, "/sessions", {"group": "g"}), list[Any](), 0
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Rollout {number}, turn {turn}. " + "Say more. " * 20})
        body = {"model": "m", "messages": messages, "max_tokens": MAX_TOKENS, "seed": number}
        reply = ask(session["base_url"], "/chat/completions", body)
        num_tokens += reply["usage"]["completion_tokens"]
        messages.append(reply["choices"][0]["message"])
    return num_tokens


@pytest.mark.parametrize("load_interval", ["0.2", "0"], ids=["memory", "affinity"])
def test_under_pressure_turns_wait_and_none_is_lost(small_vllms: list[RealVLLM], load_interval: str) -> None:
    flags = ["--engine", "vllm", "--engine-load-interval", load_interval, "--engine-wait", "600"]
    for one in small_vllms:
        flags += ["--engine-url", one.url]
    before = [figures(one.url, THEIRS) for one in small_vllms]
    most = Counter[str]()
    with serving(small_vllms[0].model, *flags) as url, ThreadPoolExecutor(NUM_SESSIONS) as pool:
        asked = [pool.submit(rollout, url, number) for number in range(NUM_SESSIONS)]
        while wait(asked, timeout=READ_S).not_done:
            for seen in (figures(url, OURS), *(figures(one.url, THEIRS) for one in small_vllms)):
                most |= Counter(seen)
        num_tokens = sum(one.result() for one in asked)
        whole = ask(url, "/accounts")["whole"]
    after = [figures(one.url, THEIRS) for one in small_vllms]
    preempted = [new["preemptions"] - old["preemptions"] for old, new in zip(before, after, strict=True)]
    most["preemptions"] = int(max(preempted))
    say(f"\n--engine-load-interval {load_interval}: {num_tokens} tokens, preempted {preempted}, most {dict(most)}\n")
    assert whole["sampled"] == num_tokens
    assert most["use"] > 0.5
    if load_interval != "0":
        assert most["waiting here"] > 0
        assert 0 < most["use read"] <= 1
