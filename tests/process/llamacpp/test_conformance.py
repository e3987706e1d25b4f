"""A real llama.cpp keeps the laws of engines: its own process, on tiny weights and on real ones."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from standins.llamacpp_server import LlamaCppServer
from standins.tiny.llama import CONTEXT
from standins.tiny.model import TinyModel
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.conformance.laws import LAST_LAWS, LAWS
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import pieces_of
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

NOT_OFFERED = {"two_weight_versions", "stops_after_the_least_number", "supports_of_tokens"}
NEVER_WHOLE = {"grammar_json_object"}
"""Once it has opened a string, the tiny model, which knows nothing, does not close it."""
Make = Callable[[], AbstractAsyncContextManager[EngineUnderTest]]


def llamacpp(model: Path, prompt: str, *, slot_tokens: int, **facts: object) -> Make:
    """A way to start a server of the model and an engine of it, with every hook that a process allows."""
    files = load_model_files(model)
    tokenizer = Tokenizer(files.tokenizer_json)

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        with LlamaCppServer(model, slot_tokens=slot_tokens, slots=4) as server:
            adapter = LlamaCpp(
                AdapterOptions(
                    model="m",
                    vocab_size=files.vocab_size,
                ),
                pieces_of(files.tokenizer_json, files.vocab_size),
            )
            engine = HttpEngine(HttpEngineOptions(url=server.url, probe_pause_s=0.1), adapter)
            await engine.start()

            async def num_running() -> int:
                if server.is_paused:  # it cannot be asked: what was sent to it, it will run
                    return engine.num_running
                slots = await asyncio.to_thread(_slots, server.url)
                return sum(slot["is_processing"] for slot in slots)

            try:
                yield EngineUnderTest(
                    engine=engine,
                    prompt=tokenizer.encode(prompt).tolist(),
                    decode=lambda ids: tokenizer.decode(ids, skip_special=True),
                    eos_ids=files.eos_token_ids,
                    num_running=num_running,
                    pause=_async(server.pause),
                    resume=_async(server.resume),
                    kill=_async(server.kill),
                    revive=_async(server.revive),
                    **facts,  # type: ignore[arg-type]
                )
            finally:
                await engine.aclose()

    return make


def _async(act: Callable[[], None]) -> Callable[[], "asyncio.Future[None]"]:
    return lambda: asyncio.to_thread(act)  # type: ignore[return-value]


def _slots(url: str) -> list[dict[str, bool]]:
    with urllib.request.urlopen(url + "/slots") as response:
        slots: list[dict[str, bool]] = json.loads(response.read())
    return slots


async def test_llama_cpp_keeps_the_laws_on_a_tiny_model(tiny_gguf: Path, tiny_folder: Path) -> None:
    model = TinyModel(tiny_folder)

    async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
        return model.score(ids, num_prompt)

    make = llamacpp(
        tiny_gguf,
        "the user asks and",
        slot_tokens=CONTEXT,
        score=score,
        max_sequence_tokens=CONTEXT,
        tolerance_nats=1e-4,
    )
    report = await check_engine(make, deadline_s=600.0)
    assert set(report.not_offered) == NOT_OFFERED | NEVER_WHOLE
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - NOT_OFFERED - NEVER_WHOLE


@pytest.mark.weights
@pytest.mark.timeout(600)
async def test_llama_cpp_keeps_the_laws_on_smollm2(smollm2_path: Path) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    make = llamacpp(
        smollm2_path,
        prompt,
        slot_tokens=512,
        num_tokens=10,
        num_long_tokens=40,
        tolerance_nats=0.05,
        not_offered={"alternatives": "with ignore_eos, by which it is shown, the likeliest may be ruled out here"},
    )
    report = await check_engine(make, deadline_s=300.0)
    not_offered = {*NOT_OFFERED, "alternatives", "logprobs_of_the_model", "refuses_what_is_too_long"}
    assert set(report.not_offered) == not_offered
