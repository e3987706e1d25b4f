"""Sessions of a mixture of experts: what their samples say of routes is what the engine computed with."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load

from standins.tiny.llama import LAYERS, write_tiny_folder
from standins.tiny.mixture import TOP_K, write_mixture_folder
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.teacher_forcing import line_logprobs
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.embedded import EmbeddedEngine
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.store.database import FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore

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

    async def samples(self, session: str, **asked: Any) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """Each sample's description, and its arrays."""
        async with self.http.post(f"/sessions/{session}/samples", json={"include_side": True, **asked}) as response:
            assert response.status == 200, await response.text()
            tensors = load(await response.read())
        described = json.loads(tensors["_samples_meta"].tobytes())["samples"]
        return [
            (row, {name.rpartition(".")[0]: tensor for name, tensor in tensors.items() if name.endswith(f".{number}")})
            for number, row in enumerate(described)
        ]


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
    ((_, arrays),) = await rollouts.samples(session)
    tokens, mask, routes = arrays["tokens"], arrays["loss_mask"], arrays["rollout_routed_experts"]
    first = len(tokens) - len(mask)
    assert routes.shape == (len(tokens) - 1, LAYERS, TOP_K)
    assert routes.dtype == np.uint8
    model = NumpyForward(*load_weights(rollouts.folder), num_kv_tokens=len(tokens))
    trained = mask.astype(bool)
    again = np.array(line_logprobs(model, tokens.tolist(), first, routes=routes))
    assert np.abs(again - arrays["rollout_log_probs"])[trained].max() <= 1e-4
    shifted = np.array(line_logprobs(model, tokens.tolist(), first, routes=np.roll(routes, 1, axis=0)))
    assert np.abs(shifted - arrays["rollout_log_probs"])[trained].max() > 0.1


NUM_TURNS, NUM_SWAPS, CONTEXT = 50, 20, 4096


def wide(folder: Path, seed: int) -> Path:
    """A mixture whose context holds a long session."""
    config = write_mixture_folder(folder, seed) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    return folder


def versions_of_rows(row: dict[str, Any], num_rows: int) -> list[str]:
    """The weights whose forward reported each row: those that sampled the next token, or a prompt's first answer."""
    of_token = {at: span["version"] for span in row["weight_spans"] for at in range(span["start"], span["end"])}
    for turn in row["turns"]:
        of_token.update(dict.fromkeys(range(turn["prompt_start"], turn["start"]), of_token[turn["start"]]))
    return [of_token[at + 1] for at in range(num_rows)]


def apart(
    row: dict[str, Any], arrays: dict[str, np.ndarray], folders: list[Path], routes: np.ndarray, *, only_own: bool
) -> float:
    """The largest difference of a sample's trained log-probabilities from those of the weights of each under `routes`.

    `only_own`: positions that other weights routed are routed by those that sample, which computed them again.
    """
    tokens, told = arrays["tokens"].tolist(), arrays["rollout_log_probs"]
    first, versions = len(tokens) - len(told), np.array(versions_of_rows(row, len(tokens) - 1))
    largest = 0.0
    for span in row["weight_spans"]:
        start, end, version = span["start"], span["end"], span["version"]
        given = routes[: end - 1].astype(np.intc)
        if only_own:
            given[versions[: end - 1] != version] = -1
        loaded = load_weights(folders[int(version) % len(folders)])
        again = line_logprobs(NumpyForward(*loaded, num_kv_tokens=end), tokens[:end], start, routes=given)
        trained = arrays["loss_mask"][start - first : end - first].astype(bool)
        largest = max(largest, float(np.abs(again - told[start - first : end - first])[trained].max()))
    return largest


@pytest.mark.timeout(600)
async def test_fifty_turns_over_twenty_swaps_are_scored_again_under_their_routes(tmp_path: Path) -> None:
    """Under load, beside a tree of forks, with a cache too small for all, and over a restart of server and engine."""
    folders = [wide(tmp_path / f"model {seed}", seed) for seed in range(4)]
    data = DataFolder(tmp_path / "data", address="")
    sessions: dict[str, str] = {}
    messages: list[dict[str, str]] = []
    versions = iter(range(1, NUM_SWAPS + 1))
    version = 0
    options = EmbeddedOptions(max_batch=8, kv_tokens=CONTEXT, reports_routes=True)
    for half in range(2):
        engine = EmbeddedEngine(folders[version % 4], replace(options, weight_version=str(version)))
        await engine.start()
        store = await SqliteStore.open(data, connect=FileConnection)
        renderer = make_renderer(load_model_files(folders[0]), "auto")
        async with (
            running(engine, renderer, moe_shape=(LAYERS, TOP_K), store=store, weights_dir=tmp_path) as (url, _),
            aiohttp.ClientSession(url) as http,
        ):
            rollouts = Rollouts(http, folders[0])
            if not half:
                for name, body in (("line", {}), ("tree", {"history": "tree"}), ("load", {})):
                    sessions[name] = (await rollouts.post("/sessions", body))["session_id"]
            for turn in range(half * NUM_TURNS // 2, (half + 1) * NUM_TURNS // 2):
                messages.append({"role": "user", "content": f"ask {turn}"})
                line = asyncio.create_task(rollouts.chat(sessions["line"], messages, seed=turn))
                forks = [
                    asyncio.create_task(rollouts.chat(sessions["tree"], messages[-7:], seed=number, max_tokens=12))
                    for number in range(2 if turn % 10 == 0 else 0)
                ]
                beside = asyncio.create_task(
                    rollouts.post(
                        f"/sessions/{sessions['load']}/v1/completions",
                        {"prompt": f"it {turn} " * 20, "max_tokens": 60, "ignore_eos": True, "seed": turn},
                    )
                )
                if turn % 5 in (1, 3):
                    version = next(versions)
                    body = {"model_path": str(folders[version % 4]), "weight_version": str(version)}
                    await rollouts.post("/update_weights_from_disk", body)
                messages.append(await line)
                await asyncio.gather(beside, *forks)
            made = {name: await rollouts.samples(session) for name, session in sessions.items()}
            cut = await rollouts.samples(sessions["line"], max_seq_len=700)
        await store.aclose()
        await engine.aclose()
    data.close()
    assert version == NUM_SWAPS
    ((row, arrays),) = made["line"]
    assert len(row["turns"]) == NUM_TURNS
    assert len({span["version"] for span in row["weight_spans"]}) > NUM_SWAPS // 2
    every = [*made["line"], *made["tree"], *made["load"], *cut]
    assert any(len(turn) > 1 for turn in [one["weight_spans"] for one, _ in made["load"]]), "no turn was over a swap"
    own = [apart(one, found, folders, found["rollout_routed_experts"], only_own=True) for one, found in every]
    assert max(own) <= 1e-4
    for one, _ in every:
        sampled_by = {at: span["version"] for span in one["weight_spans"] for at in range(span["start"], span["end"])}
        assert all(turn["cached_from"] == sampled_by[turn["start"]] for turn in one["turns"])
    tokens = arrays["tokens"]
    last = NumpyForward(*load_weights(folders[NUM_SWAPS % 4]), num_kv_tokens=len(tokens))
    place = (RowSpan(0, len(tokens) - 1),)
    last.forward([Segment(ids=tokens[:-1].astype(np.intc), start=0, spans=place, logits_for=LogitsFor.NONE)])
    old_way = last.routes(place)
    assert old_way is not None
    assert apart(row, arrays, folders, old_way, only_own=True) > 0.1


async def test_a_dense_model_has_no_routes_to_replay(tmp_path: Path) -> None:
    engine = EmbeddedEngine(write_tiny_folder(tmp_path / "dense"), OPTIONS)
    with pytest.raises(StartupError, match="is a dense model, without experts to report"):
        await engine.start()
    await engine.aclose()
