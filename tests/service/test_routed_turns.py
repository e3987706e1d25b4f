"""Sessions of a mixture of experts: what their samples say of routes is what the engine computed with."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.shared_rows import MemoryRows, SharedTables
from standins.teacher_forcing import line_logprobs
from standins.tiny.llama import LAYERS, write_tiny_folder
from standins.tiny.mixture import TOP_K, write_mixture_folder
from stenograph.client.samples import DecodedSample, DecodedSamples, ReplayRows, decoded
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.trainers.rows import NO_VERSION, route_versions

from .conftest import running

OPTIONS = EmbeddedOptions(max_batch=8, kv_tokens=4096, reports_routes=True)


@dataclass(frozen=True)
class Rollouts:
    """A client of a server around a mixture."""

    http: aiohttp.ClientSession
    folder: Path

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def chat(self, session: str, messages: list[dict[str, str]], **params: Any) -> dict[str, str]:
        """A turn; returns the reply's message as a client sends it back."""
        body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, **params}
        reply = await self.post(f"/sessions/{session}/v1/chat/completions", body)
        return {"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""}

    async def samples(self, session: str, **asked: Any) -> DecodedSamples:
        async with self.http.post(f"/sessions/{session}/samples", json={"include_side": True, **asked}) as response:
            assert response.status == 200, await response.text()
            return decoded(await response.read())


@pytest.fixture
async def rollouts(tmp_path: Path) -> AsyncIterator[Rollouts]:
    folder = write_mixture_folder(tmp_path / "mixture")
    engine = EmbeddedEngine(folder, OPTIONS)
    await engine.start()
    try:
        renderer = make_renderer(load_model_files(folder), "auto")
        async with (
            running(engine, renderer, moe_shape=(LAYERS, TOP_K)) as (url, _),
            aiohttp.ClientSession(url) as http,
        ):
            yield Rollouts(http, folder)
    finally:
        await engine.aclose()


async def test_a_session_of_turns_is_scored_again_under_its_routes(rollouts: Rollouts) -> None:
    session = (await rollouts.post("/sessions", {}))["session_id"]
    messages: list[dict[str, str]] = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"ask {turn}"})
        messages.append(await rollouts.chat(session, messages, seed=turn))
    (sample,) = await rollouts.samples(session)
    tokens, first, routes = sample.tokens, sample.prompt_length, sample.routed_experts
    assert routes is not None
    assert routes.shape == (len(tokens) - 1, LAYERS, TOP_K)
    assert routes.dtype == np.uint8
    model = NumpyForward(*load_weights(rollouts.folder), num_kv_tokens=len(tokens))
    trained = sample.loss_mask.astype(bool)
    again = np.array(line_logprobs(model, tokens.tolist(), first, routes=routes))
    assert np.abs(again - sample.log_probs)[trained].max() <= 1e-4
    shifted = np.array(line_logprobs(model, tokens.tolist(), first, routes=np.roll(routes, 1, axis=0)))
    assert np.abs(shifted - sample.log_probs)[trained].max() > 0.1


NUM_TURNS, NUM_SWAPS, CONTEXT = 50, 20, 2048
KV_TOKENS = 1280
"""The line's last turn needs 1,266 of them alone."""


def wide(folder: Path, seed: int) -> Path:
    """A mixture whose context holds a long session."""
    config = write_mixture_folder(folder, seed) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    return folder


def apart(sample: DecodedSample, folders: list[Path], routes: ReplayRows, *, only_own: bool) -> float:
    """The largest difference of a sample's trained log-probabilities from those of the weights of each under `routes`.

    `only_own`: positions that other weights routed are routed by those that sample, which computed them again.
    """
    tokens, first, of_row = sample.tokens.tolist(), sample.prompt_length, route_versions(sample)
    largest = 0.0
    for span in sample.weight_spans:
        given = routes[: span.end - 1].astype(np.intc)
        if only_own:
            given[of_row[: span.end - 1] != int(span.version)] = -1
        loaded = load_weights(folders[int(span.version) % len(folders)])
        model = NumpyForward(*loaded, num_kv_tokens=span.end)
        again = line_logprobs(model, tokens[: span.end], span.start, routes=given)
        place = slice(span.start - first, span.end - first)
        trained = sample.loss_mask[place].astype(bool)
        largest = max(largest, float(np.abs(again - sample.log_probs[place])[trained].max()))
    return largest


@dataclass
class Stretch:
    """A session of a line, one of a tree, and one that loads the engine beside them, over servers and engines."""

    folders: list[Path]
    tables: SharedTables = field(default_factory=lambda: SharedTables(time.monotonic))
    sessions: dict[str, str] = field(default_factory=dict[str, str])
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    version: int = 0
    num_evicted: int = 0
    made: dict[str, DecodedSamples] = field(default_factory=dict[str, DecodedSamples])
    cut: Sequence[DecodedSample] = ()

    async def turns(self, numbers: range, engine: EmbeddedEngine) -> None:
        """A server of its own takes these turns; the sessions go to it from the one that has left their database."""
        name = f"http://server-{numbers.start}"
        store = await PostgresStore.open(MemoryRows(self.tables), SystemClock(), url=name, lease_s=30.0)
        renderer, folder = make_renderer(load_model_files(self.folders[0]), "auto"), self.folders[0].parent
        async with (
            running(engine, renderer, moe_shape=(LAYERS, TOP_K), store=store, weights_dir=folder) as (url, manager),
            aiohttp.ClientSession(url) as http,
        ):
            rollouts = Rollouts(http, self.folders[0])
            for name, body in () if self.sessions else (("line", {}), ("tree", {"history": "tree"}), ("load", {})):
                self.sessions[name] = (await rollouts.post("/sessions", body))["session_id"]
            for number in numbers:
                await self._turn(rollouts, number)
            self.made = {name: await rollouts.samples(session) for name, session in self.sessions.items()}
            self.cut = await rollouts.samples(self.sessions["line"], max_seq_len=700)
            nodes = manager.sessions.get(self.sessions["line"]).nodes[-len(numbers) :]
        await store.aclose()
        for parent, node in pairwise(nodes):
            before, found = parent.turn.sampled, node.turn.sampled
            versions = {before.cached_from, *(span.version for span in before.weights)}
            # Where one version computed all of the parent, nothing but an eviction takes that from the next turn.
            self.num_evicted += versions == {found.cached_from} and found.num_cached_tokens < parent.num_tokens - 1

    async def _turn(self, rollouts: Rollouts, number: int) -> None:
        """A turn of each session, two at once of the tree; a swap beside some of them."""
        self.messages.append({"role": "user", "content": f"ask {number}"})
        line = asyncio.create_task(rollouts.chat(self.sessions["line"], self.messages, seed=number))
        forks = [
            asyncio.create_task(rollouts.chat(self.sessions["tree"], self.messages[-7:], seed=fork, max_tokens=12))
            for fork in range(2 if number % 10 == 0 else 0)
        ]
        load = {"prompt": f"it {number} " * 20, "max_tokens": 60, "ignore_eos": True, "seed": number}
        beside = asyncio.create_task(rollouts.post(f"/sessions/{self.sessions['load']}/v1/completions", load))
        if number % 5 in (1, 3):
            self.version += 1
            body = {"model_path": str(self.folders[self.version % 4]), "weight_version": str(self.version)}
            await rollouts.post("/update_weights_from_disk", body)
        self.messages.append(await line)
        await asyncio.gather(beside, *forks)


@pytest.mark.timeout(600)
async def test_fifty_turns_over_twenty_swaps_are_scored_again_under_their_routes(tmp_path: Path) -> None:
    """Under load, beside a tree of forks, with a cache too small for all; the sessions go to another server of the same
    engine, and over a restart of both."""
    stretch = Stretch([wide(tmp_path / f"model {seed}", seed) for seed in range(4)])
    folders = stretch.folders
    options = EmbeddedOptions(max_batch=8, kv_tokens=KV_TOKENS, reports_routes=True)
    for servers in ((range(15), range(15, 30)), (range(30, NUM_TURNS),)):
        version = stretch.version
        engine = EmbeddedEngine(folders[version % 4], replace(options, weight_version=str(version)))
        await engine.start()
        for numbers in servers:
            await stretch.turns(numbers, engine)
        await engine.aclose()
    assert stretch.version == NUM_SWAPS
    assert stretch.num_evicted, "the cache held all"
    (sample,) = stretch.made["line"]
    assert len(sample.turns) == NUM_TURNS
    assert len({span.version for span in sample.weight_spans}) > NUM_SWAPS // 2
    every = [*chain(*stretch.made.values()), *stretch.cut]
    assert any(len(one.weight_spans) > 1 for one in stretch.made["load"]), "no turn was over a swap"
    for one in every:
        assert one.routed_experts is not None
        assert (route_versions(one) != NO_VERSION).all()
    assert max(apart(one, folders, one.routed_experts, only_own=True) for one in every) <= 1e-4
    # One array of routes is not enough for who forces all of it: what other weights routed was computed again.
    assert apart(sample, folders, sample.routed_experts, only_own=False) > 1e-4
    tokens = sample.tokens
    last = NumpyForward(*load_weights(folders[NUM_SWAPS % 4]), num_kv_tokens=len(tokens))
    place = (RowSpan(0, len(tokens) - 1),)
    last.forward([Segment(ids=tokens[:-1].astype(np.intc), start=0, spans=place, logits_for=LogitsFor.NONE)])
    old_way = last.routes(place)
    assert old_way is not None
    assert apart(sample, folders, old_way, only_own=True) > 0.1


async def test_a_dense_model_has_no_routes_to_replay(tmp_path: Path) -> None:
    engine = EmbeddedEngine(write_tiny_folder(tmp_path / "dense"), OPTIONS)
    with pytest.raises(StartupError, match="is a dense model, without experts to report"):
        await engine.start()
    await engine.aclose()
