"""The engine's process: it answers, it dies, it comes back, and it leaves no orphan. Real processes, real signals."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from standins.tiny.llama import write_tiny_folder
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import EngineUnavailable, InvalidRequest, StartupError, StenographError
from stenograph.core.types import (
    Chunk,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SamplingParams,
    token_ids,
)
from stenograph.embedded import engine as local
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import Generate, frame
from stenograph.engine.base import EngineState, GenerateRequest

OPTIONS = EmbeddedOptions(threads=1, max_batch=4, kv_tokens=2048)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[EmbeddedEngine]:
    running = EmbeddedEngine(folder, OPTIONS)
    await running.start()
    yield running
    await running.aclose()


def request(name: str, *, prompt: Sequence[int] = (1, 5, 9), max_tokens: int = 5, **params: object) -> GenerateRequest:
    settings = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    return GenerateRequest(request_id=RequestId(name), prompt=Prompt(new_ids=token_ids(prompt)), params=settings)


async def collect(engine: EmbeddedEngine, wanted: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(wanted)]


async def ready(engine: EmbeddedEngine) -> None:
    """Wait for the process that comes after a death, by asking it until it answers."""
    while True:
        try:
            await collect(engine, request("probe", max_tokens=1))
        except EngineUnavailable:
            await asyncio.sleep(0)
        else:
            return


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id_ for chunk in chunks for id_ in chunk.ids]


async def test_it_answers_and_the_last_chunk_alone_has_the_finish_and_the_times(engine: EmbeddedEngine) -> None:
    chunks = await collect(engine, request("r"))
    assert len(ids_of(chunks)) == 5
    assert [chunk.finish is not None for chunk in chunks] == [False] * 4 + [True]
    times = chunks[-1].times
    assert times is not None
    assert times.submitted <= times.admitted <= times.first_token <= times.finished


async def test_concurrent_requests_get_what_each_gets_alone(engine: EmbeddedEngine) -> None:
    alone = ids_of(await collect(engine, request("alone")))
    together = await asyncio.gather(*(collect(engine, request(f"r{index}")) for index in range(8)))
    assert all(ids_of(chunks) == alone for chunks in together)


async def test_an_abort_gives_the_partial_turn_and_a_close_stops_it(engine: EmbeddedEngine) -> None:
    async with aclosing(engine.generate(request("aborted", max_tokens=200))) as chunks:
        drawn = [await anext(chunks)]
        assert await engine.abort(RequestId("aborted"))
        drawn += [chunk async for chunk in chunks]
    assert drawn[-1].finish is not None
    assert drawn[-1].finish.reason is FinishReason.ABORT
    async with aclosing(engine.generate(request("closed", max_tokens=200))) as chunks:
        await anext(chunks)
    assert not await engine.abort(RequestId("closed"))
    assert len(ids_of(await collect(engine, request("after")))) == 5


async def test_a_bad_request_ends_alone(engine: EmbeddedEngine) -> None:
    for name, ids in (("stop_token_ids", (5, 10**6)), ("logit_bias", ((5, 1.0), (10**6, 1.0)))):
        with pytest.raises(InvalidRequest, match="1000000 is not a token id: the vocabulary has 320 ids") as caught:
            await collect(engine, request("bad", **{name: ids}))
        assert caught.value.blame == Blame(RequestPart.SAMPLING, path=(name,))
    assert engine.health().state is EngineState.READY


async def test_an_id_is_free_as_soon_as_its_generation_is_closed(
    engine: EmbeddedEngine,
) -> None:
    whole = ids_of(await collect(engine, request("alone")))
    others = asyncio.ensure_future(collect(engine, request("other", max_tokens=200)))
    for _ in range(20):
        async with aclosing(engine.generate(request("same", prompt=[5] * 20, max_tokens=200))) as chunks:
            await anext(chunks)
            with pytest.raises(ValueError, match="same"):
                await collect(engine, request("same"))
        assert ids_of(await collect(engine, request("same"))) == whole
    assert len(ids_of(await others)) == 200
    assert engine.num_running == 0


@pytest.mark.parametrize("eos_id", [None, 400])
async def test_a_model_that_has_no_end_ends_with_its_grammar(tmp_path: Path, eos_id: int | None) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos_id}))
    (folder / "tokenizer_config.json").write_text("{}")
    engine = EmbeddedEngine(folder, OPTIONS)
    await engine.start()
    free = collect(engine, request("free", max_tokens=20))
    guided = collect(engine, request("guided", max_tokens=20, grammar=Grammar(kind=GrammarKind.REGEX, source="ab")))
    outcomes = await asyncio.gather(free, guided)
    assert [len(ids_of(chunks)) for chunks in outcomes] == [20, 2]
    assert [chunks[-1].finish and chunks[-1].finish.reason for chunks in outcomes] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]
    await engine.aclose()


async def test_text_that_has_no_utf_8_is_refused_and_leaves_nothing(engine: EmbeddedEngine) -> None:
    with pytest.raises(InvalidRequest):
        await collect(engine, request("bad", stop=("\ud800",)))
    assert engine.num_running == 0
    assert not await engine.abort(RequestId("bad"))


async def test_a_generation_may_be_left_at_any_await_and_the_process_ends_it(engine: EmbeddedEngine) -> None:
    whole = ids_of(await collect(engine, request("alone")))
    left = [asyncio.ensure_future(collect(engine, request(f"r{n}", max_tokens=1 + n % 40))) for n in range(60)]
    for number, task in enumerate(left):
        for _ in range(number % 7):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    while engine.num_running:
        assert ids_of(await collect(engine, request("after"))) == whole


MIXED = [
    request("plain", max_tokens=30),
    request("guided", max_tokens=30, grammar=Grammar(kind=GrammarKind.REGEX, source="[a-f]{30}")),
    request("chunked", prompt=[5] * 100, max_tokens=10),
    *(request(f"waits {index}", max_tokens=10) for index in range(4)),
]


@pytest.mark.timeout(600)
async def test_whenever_the_process_is_killed_every_request_ends_with_an_answer_and_a_new_process_gives_it(
    folder: Path,
) -> None:
    engine = EmbeddedEngine(folder, replace(OPTIONS, step_tokens=16))
    await engine.start()
    whole = {wanted.request_id: ids_of(await collect(engine, wanted)) for wanted in MIXED}
    for num_chunks in (0, 1, 2, 5, 13, 34, 55, 89):
        seen = itertools.count(1)

        async def follow(wanted: GenerateRequest, seen: Iterator[int] = seen, at: int = num_chunks) -> list[int]:
            drawn: list[int] = []
            async for chunk in engine.generate(wanted):
                drawn += chunk.ids
                if next(seen) == at:
                    os.kill(engine.pid, signal.SIGKILL)
            return drawn

        running = [asyncio.ensure_future(follow(wanted)) for wanted in MIXED]
        if num_chunks == 0:
            await asyncio.sleep(0)
            os.kill(engine.pid, signal.SIGKILL)
        for wanted, outcome in zip(MIXED, await asyncio.gather(*running, return_exceptions=True), strict=True):
            # One that had finished before the signal came has its answer; all others are told.
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, EngineUnavailable)
                assert "SIGKILL" in str(outcome)
            else:
                assert outcome == whole[wanted.request_id]
        assert engine.num_running == 0
        await ready(engine)
        again = await asyncio.gather(*(collect(engine, wanted) for wanted in MIXED))
        assert [ids_of(chunks) for chunks in again] == list(whole.values())
    await engine.aclose()


async def test_requests_over_the_queues_capacity_are_refused_with_a_retry_time(folder: Path) -> None:
    engine = EmbeddedEngine(folder, replace(OPTIONS, max_batch=1, max_waiting=1))
    await engine.start()
    wanted = [request(f"r{index}", max_tokens=60) for index in range(4)]
    outcomes = await asyncio.gather(*(collect(engine, one) for one in wanted), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, EngineUnavailable)]
    assert len(refused) >= 2
    assert all(error.retry_after_s is not None and error.retry_after_s >= 1.0 for error in refused)
    answered = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert [len(ids_of(chunks)) for chunks in answered] == [60] * (4 - len(refused))
    await engine.aclose()


async def test_a_model_that_cannot_be_loaded_is_a_startup_error_in_one_line(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    engine = EmbeddedEngine(folder, OPTIONS)
    with pytest.raises(StartupError) as caught:
        await engine.start()
    assert str(folder) in str(caught.value)
    await engine.aclose()


async def test_a_model_that_cannot_be_loaded_again_is_said_until_it_can(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    engine = EmbeddedEngine(folder, OPTIONS)
    await engine.start()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    os.kill(engine.pid, signal.SIGKILL)
    pids, told = {engine.pid}, [""]
    while len(pids) < 4:  # it has tried twice in vain
        await asyncio.sleep(0)
        pids.add(engine.pid)
        if (detail := engine.health().detail) not in ("", told[-1]):
            told.append(detail)
            assert engine.health().state is EngineState.DOWN
            with pytest.raises(EngineUnavailable, match=re.escape(detail)):
                await collect(engine, request("refused"))
    _, killed, *since = told
    assert "SIGKILL" in killed
    assert since
    assert all(str(folder) in detail for detail in since)
    (folder / "model.safetensors").write_bytes(weights)
    await ready(engine)
    await engine.aclose()


async def test_an_engine_that_waits_to_start_again_is_stopped_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "FIRST_PAUSE_S", 1000.0)  # more than this test has
    monkeypatch.setattr(local, "STOP_GRACE_S", 1000.0)
    engine = EmbeddedEngine(folder, OPTIONS)
    await engine.start()
    async with aclosing(engine.generate(request("lost", max_tokens=200))) as chunks:
        await anext(chunks)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            _ = [chunk async for chunk in chunks]
    await engine.aclose()
    assert engine.health().state is EngineState.STOPPED


async def test_after_the_end_it_refuses(folder: Path) -> None:
    engine = EmbeddedEngine(folder, OPTIONS)
    await engine.start()
    waiting = asyncio.ensure_future(collect(engine, request("r", max_tokens=250)))
    await asyncio.sleep(0)
    await engine.aclose()
    with pytest.raises(StenographError):
        await waiting
    with pytest.raises(EngineUnavailable):
        await collect(engine, request("late"))


def test_when_its_input_ends_so_does_the_process_also_in_mid_turn(folder: Path) -> None:
    command = [sys.executable, "-m", "stenograph.embedded.child", str(folder), OPTIONS.to_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.read(1)  # it is loaded
        wanted = request("r", max_tokens=250)
        ids = wanted.prompt.ids.tobytes()
        process.stdin.write(frame(Generate(request_id=wanted.request_id, ids=ids, params=wanted.params)))
        process.stdin.close()
        assert process.wait() == 0
