"""Every engine keeps the laws, the embedded one as the reference: its own process, on tiny weights and on real ones."""

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from standins.tiny.llama import CONTEXT, write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.conformance.laws import LAST_LAWS, LAWS
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

NOT_OFFERED = {"two_weight_versions"}
Make = Callable[[], AbstractAsyncContextManager[EngineUnderTest]]


def embedded(folder: Path, options: EmbeddedOptions, prompt: str, **facts: object) -> Make:
    """A way to start the engine on a model, with every hook that a process allows."""
    files = load_model_files(folder)
    tokenizer = Tokenizer(files.tokenizer_json)

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        engine = EmbeddedEngine(folder, options)
        await engine.start()

        async def num_running() -> int:
            return engine.num_running

        async def kill() -> None:
            os.kill(engine.pid, signal.SIGKILL)

        async def pause() -> None:
            os.kill(engine.pid, signal.SIGSTOP)

        async def resume() -> None:
            os.kill(engine.pid, signal.SIGCONT)

        async def revive() -> None:
            """The engine starts its process again by itself."""

        try:
            yield EngineUnderTest(
                engine=engine,
                prompt=tokenizer.encode(prompt).tolist(),
                decode=lambda ids: tokenizer.decode(ids, skip_special=True),
                eos_ids=files.eos_token_ids,
                tolerance_nats=1e-4,
                num_running=num_running,
                pause=pause,
                resume=resume,
                kill=kill,
                revive=revive,
                **facts,  # type: ignore[arg-type]
            )
        finally:
            await engine.aclose()

    return make


async def test_the_embedded_engine_keeps_the_laws_on_a_tiny_model(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    model = TinyModel(folder)

    async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
        return model.score(ids, num_prompt)

    async def score_at(ids: Sequence[int], num_prompt: int, temperature: float) -> Sequence[float]:
        return model.score(ids, num_prompt, temperature)

    options = EmbeddedOptions(threads=1, max_batch=4, kv_tokens=4096)
    make = embedded(folder, options, "the user asks and", score=score, score_at=score_at, max_sequence_tokens=CONTEXT)
    report = await check_engine(make, deadline_s=600.0)
    assert set(report.not_offered) == NOT_OFFERED
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - NOT_OFFERED


@pytest.mark.weights
@pytest.mark.timeout(600)
async def test_the_embedded_engine_keeps_the_laws_on_smollm2(smollm2_path: Path) -> None:
    options = EmbeddedOptions(threads=1, max_batch=8, kv_tokens=8192)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    report = await check_engine(
        embedded(smollm2_path, options, prompt, num_tokens=6, num_long_tokens=24), deadline_s=300.0
    )
    assert set(report.not_offered) == {*NOT_OFFERED, "logprobs_of_the_model", "refuses_what_is_too_long"}
