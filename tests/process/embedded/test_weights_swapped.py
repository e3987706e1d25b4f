"""Other weights, swapped into an engine's process that goes on: what ran goes on, and each token is labelled."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from standins.tiny.llama import write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.core.errors import EngineUnavailable
from stenograph.core.types import Chunk, Grammar, GrammarKind, Prompt, RequestId, SamplingParams, token_ids
from stenograph.core.weights import (
    ContinueGeneration,
    FlushCache,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
    WeightCommand,
)
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.base import GenerateRequest

OPTIONS = EmbeddedOptions(threads=1, max_batch=4, kv_tokens=2048)
PROMPT = (1, 5, 9, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape."""
    base = tmp_path_factory.mktemp("models")
    return write_tiny_folder(base / "old", seed=0), write_tiny_folder(base / "new", seed=1)


@pytest.fixture
async def engine(folders: tuple[Path, Path]) -> AsyncIterator[EmbeddedEngine]:
    running = EmbeddedEngine(folders[0], OPTIONS)
    await running.start()
    yield running
    await running.aclose()


def asked(name: str, *, prompt: Sequence[int] = PROMPT, max_tokens: int = 8, **params: object) -> GenerateRequest:
    how = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})  # type: ignore[arg-type]
    return GenerateRequest(request_id=RequestId(name), prompt=Prompt(new_ids=token_ids(prompt)), params=how)


async def collect(engine: EmbeddedEngine, wanted: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(wanted)]


async def told(engine: EmbeddedEngine, command: WeightCommand) -> str:
    """The problem that the engine has with a command."""
    (answer,) = await engine.control(command)
    return answer.problem


def update(folder: Path, version: str = "1") -> UpdateWeights:
    return UpdateWeights(path=str(folder), version=version)


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [id_ for chunk in chunks for id_ in chunk.ids]


async def over_a_swap(
    engine: EmbeddedEngine, wanted: GenerateRequest, folder: Path, *, at: int, mode: PauseMode
) -> list[Chunk]:
    """A generation whose weights are swapped after so many tokens, or a few more."""
    chunks: list[Chunk] = []
    async for chunk in engine.generate(wanted):
        chunks.append(chunk)
        if len(chunks) == at:
            assert not await told(engine, PauseGeneration(mode=mode))
            (answer,) = await engine.control(update(folder))
            assert answer.problem == ""
            assert answer.num_paused == (mode is PauseMode.IN_PLACE)
            assert not await told(engine, ContinueGeneration())
    return chunks


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_each_side_of_a_swap_has_the_logprobs_of_its_own_weights(
    engine: EmbeddedEngine, folders: tuple[Path, Path], mode: PauseMode
) -> None:
    wanted = asked("r", max_tokens=200, temperature=1.0, seed=7)
    chunks = await over_a_swap(engine, wanted, folders[1], at=100, mode=mode)
    ids, line = ids_of(chunks), [*PROMPT, *ids_of(chunks)]
    assert len(ids) == 200
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.ids]
    border = versions.index("1")
    assert 100 <= border < 200
    assert versions == ["0"] * border + ["1"] * (200 - border)
    told_logprobs = np.array([logprob for chunk in chunks for logprob in chunk.logprobs])
    old, new = (np.array(TinyModel(folder).score(line, len(PROMPT))) for folder in folders)
    assert np.abs(told_logprobs[:border] - old[:border]).max() <= 1e-4
    assert np.abs(told_logprobs[border:] - new[border:]).max() <= 1e-4
    assert np.abs(old - new).mean() > 1e-2, "the weights cannot be told apart"


async def test_a_grammar_goes_on_over_a_swap(engine: EmbeddedEngine, folders: tuple[Path, Path]) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, source="(ab|cd){20}e{5}")
    wanted = asked("r", max_tokens=200, temperature=1.0, seed=3, grammar=grammar, ignore_eos=False)
    chunks = await over_a_swap(engine, wanted, folders[1], at=10, mode=PauseMode.RETRACT)
    text = TinyModel(folders[0]).tokenizer.decode([id_ for id_ in ids_of(chunks) if id_ != 2])
    assert re.fullmatch(grammar.source, text)


async def test_steps_go_on_while_weights_are_read_and_a_pause_changes_no_token(engine: EmbeddedEngine) -> None:
    alone = ids_of(await collect(engine, asked("alone", max_tokens=60)))
    for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
        chunks: list[Chunk] = []
        async for chunk in engine.generate(asked("r", max_tokens=60)):
            chunks.append(chunk)
            if len(chunks) == 20:
                assert not await told(engine, PauseGeneration(mode=mode))
                waiting = asyncio.ensure_future(collect(engine, asked("later", max_tokens=60)))
                assert not await told(engine, ContinueGeneration())
        assert ids_of(chunks) == alone
        assert ids_of(await waiting) == alone


async def test_a_paused_generation_is_aborted_at_once(engine: EmbeddedEngine) -> None:
    chunks: list[Chunk] = []
    async for chunk in engine.generate(asked("r", max_tokens=200)):
        chunks.append(chunk)
        if len(chunks) == 5:
            assert not await told(engine, PauseGeneration(mode=PauseMode.IN_PLACE))
            assert await engine.abort(RequestId("r"))
    assert chunks[-1].finish is not None
    assert len(ids_of(chunks)) < 200
    assert not await told(engine, ContinueGeneration())
    assert len(ids_of(await collect(engine, asked("next")))) == 8


async def test_nothing_that_was_computed_by_the_old_weights_is_found(
    engine: EmbeddedEngine, folders: tuple[Path, Path]
) -> None:
    await collect(engine, asked("first"))
    assert (await collect(engine, asked("again")))[-1].num_cached_tokens > 0
    assert not await told(engine, FlushCache())
    assert (await collect(engine, asked("flushed")))[-1].num_cached_tokens == 0
    assert not await told(engine, update(folders[1]))
    after = await collect(engine, asked("swapped"))
    assert after[-1].num_cached_tokens == 0
    assert {chunk.weight_version for chunk in after} == {"1"}


async def test_a_name_alone_changes_no_token(engine: EmbeddedEngine) -> None:
    before = ids_of(await collect(engine, asked("before")))
    assert not await told(engine, NameWeights(version="7"))
    after = await collect(engine, asked("after"))
    assert ids_of(after) == before
    assert {chunk.weight_version for chunk in after} == {"7"}


def edited(
    folder: Path,
    base: Path,
    *,
    config: dict[str, object] | None = None,
    drop: str = "",
    cut: int = 0,
    bad: Mapping[str, float] | None = None,
) -> Path:
    """A copy of a model with a fault; `bad` are last weights of tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({**json.loads((base / "config.json").read_text()), **(config or {})})
    )
    tensors = {name: tensor for name, tensor in load((base / "model.safetensors").read_bytes()).items() if name != drop}
    for name, value in (bad or {}).items():
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] = value
    data = save(tensors)
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut])
    return folder


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_go_on(
    engine: EmbeddedEngine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    before = ids_of(await collect(engine, asked("before")))
    base = folders[1]
    for number, (folder, problem) in enumerate(
        [
            (tmp_path / "none", "there is no such file"),
            (edited(tmp_path / "cut", base, cut=100), "is cut short"),
            (edited(tmp_path / "missing", base, drop="model.norm.weight"), "tensor model.norm.weight is missing"),
            (
                edited(tmp_path / "nan", base, bad={"model.layers.1.mlp.up_proj.weight": np.nan}),
                "tensor model.layers.1.mlp.up_proj.weight has 1 NaN or infinite values of 1536",
            ),
            (
                edited(tmp_path / "inf", base, bad={"model.norm.weight": -np.inf}),
                "tensor model.norm.weight has 1 NaN or infinite values of 32",
            ),
            (edited(tmp_path / "vocab", base, config={"vocab_size": 321}), "expected (321, 32)"),
            (edited(tmp_path / "layers", base, config={"num_hidden_layers": 2}), "num_layers is 2, the model"),
            (edited(tmp_path / "context", base, config={"max_position_embeddings": 128}), "its context is shorter"),
            (edited(tmp_path / "kind", base, config={"architectures": ["Qwen2ForCausalLM"]}), "supported are Llama"),
        ]
    ):
        told_problem = await told(engine, update(folder))
        assert problem in told_problem
        assert str(folder) in told_problem
        after = await collect(engine, asked(f"after {number}"))
        assert ids_of(after) == before
        assert {chunk.weight_version for chunk in after} == {"0"}


async def test_what_the_engine_does_not_do_is_said(engine: EmbeddedEngine, folders: tuple[Path, Path]) -> None:
    path = str(folders[1])
    stale = UpdateWeights(path=path, version="1", flushes_cache=False)
    assert "computes all keys and values again" in await told(engine, stale)
    foreign = UpdateWeights(path=path, version="1", options={"load_format": "dummy"})
    assert "does not know load_format" in await told(engine, foreign)


async def test_a_process_that_dies_comes_back_with_the_swapped_weights(
    engine: EmbeddedEngine, folders: tuple[Path, Path]
) -> None:
    assert not await told(engine, update(folders[1], "12"))
    before = ids_of(await collect(engine, asked("before")))
    os.kill(engine.pid, signal.SIGKILL)
    after: list[Chunk] = []
    while not after:
        with suppress(EngineUnavailable):
            after = await collect(engine, asked("after"))
        await asyncio.sleep(0)
    assert ids_of(after) == before
    assert {chunk.weight_version for chunk in after} == {"12"}
