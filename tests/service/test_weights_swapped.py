"""Swaps under a whole server with the embedded engine: no turn is lost, and a trainer reads what each sampled with."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load

from standins.tiny.llama import write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files

from .conftest import running

NUM_SESSIONS = 32
NUM_SWAPS = int(os.environ.get("SWAPS", "12"))
TURNS_PER_SWAP = 6


class MilesSample(NamedTuple):
    """What miles' `Sample` takes from a payload. Source: miles/utils/types.py (2026-08), written from its layout."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    weight_versions: list[str]

    @property
    def oldest_weight_version(self) -> int | None:
        """Its staleness rule: the oldest of the versions that are numbers."""
        numeric = [int(version) for version in self.weight_versions if str(version).isdigit()]
        return min(numeric) if numeric else None


def read_by_miles(payload: bytes) -> list[MilesSample]:
    """The samples of a payload, decoded as miles' session client does."""
    tensors = load(payload)
    meta = json.loads(tensors["_samples_meta"].tobytes())
    return [
        MilesSample(
            tokens=tensors[f"tokens.{index}"].tolist(),
            response_length=sample["response_length"],
            loss_mask=tensors[f"loss_mask.{index}"].tolist(),
            rollout_log_probs=tensors[f"rollout_log_probs.{index}"].tolist(),
            weight_versions=sample["weight_versions"],
        )
        for index, sample in enumerate(meta["samples"])
    ]


class Trainer:
    """A client of the server that samples and swaps."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def rollout(self, session: str, number: int, num_tokens: int) -> None:
        how = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0, "seed": number}
        await self.post(f"/sessions/{session}/v1/completions", {"prompt": f"it {number}", **how})

    async def swap(self, folder: Path, version: int) -> None:
        await self.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})

    async def payload(self, session: str) -> bytes:
        async with self._http.post(f"/sessions/{session}/samples", json={"include_side": True}) as response:
            assert response.status == 200
            return await response.read()


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.timeout(600)
async def test_swaps_under_sessions_lose_no_turn_and_label_every_token(tmp_path: Path) -> None:
    folders = [write_tiny_folder(tmp_path / name, seed=seed) for seed, name in enumerate(("even", "odd"))]
    engine = EmbeddedEngine(folders[0], EmbeddedOptions(max_batch=16, kv_tokens=8192))
    await engine.start()
    try:
        renderer = make_renderer(load_model_files(folders[0]), "auto")
        async with (
            running(engine, renderer, weights_dir=tmp_path) as (url, manager),
            aiohttp.ClientSession(url) as http,
        ):
            trainer = Trainer(http)
            sessions = [(await trainer.post("/sessions", {}))["session_id"] for _ in range(NUM_SESSIONS)]
            turns: set[asyncio.Task[None]] = set()
            memory: list[int] = []
            for version in range(1, NUM_SWAPS + 1):
                for _ in range(TURNS_PER_SWAP):
                    number = len(turns)
                    session = sessions[number % NUM_SESSIONS]
                    turns.add(asyncio.create_task(trainer.rollout(session, number, 40)))
                while manager.num_in_flight < TURNS_PER_SWAP and not all(one.done() for one in turns):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await trainer.swap(folders[version % 2], version)
                memory.append(resident_kib(engine.pid))
            await asyncio.gather(*turns)
            payloads = [await trainer.payload(session) for session in sessions]
    finally:
        await engine.aclose()
    assert len(turns) == NUM_SWAPS * TURNS_PER_SWAP
    check_labels(payloads, [TinyModel(folder) for folder in folders], num_turns=len(turns))
    settled = len(memory) // 3
    assert max(memory[settled:]) - memory[settled] < 24 * 1024, memory


def check_labels(payloads: list[bytes], models: list[TinyModel], *, num_turns: int) -> None:
    """Every sampled token has the log-probability of the weights that its span names; miles' rule reads the oldest."""
    num_samples = num_over = 0
    for payload in payloads:
        described = json.loads(load(payload)["_samples_meta"].tobytes())["samples"]
        for sample, row in zip(read_by_miles(payload), described, strict=True):
            spans, first = row["weight_spans"], len(sample.tokens) - sample.response_length
            assert [spans[0]["start"], spans[-1]["end"]] == [first, len(sample.tokens)]
            assert [span["end"] for span in spans[:-1]] == [span["start"] for span in spans[1:]]
            assert sample.loss_mask == [1] * sample.response_length
            assert sample.oldest_weight_version == min(int(span["version"]) for span in spans)
            scored = [np.array(model.score(sample.tokens, first)) for model in models]
            for span in spans:
                told = np.array(sample.rollout_log_probs[span["start"] - first : span["end"] - first])
                own = scored[int(span["version"]) % 2][span["start"] - first : span["end"] - first]
                assert np.abs(told - own).max() <= 1e-4
            num_samples += 1
            num_over += len(spans) > 1
    assert num_samples == num_turns
    assert num_over > 0, "no turn ran over a swap"


async def test_miles_staleness_rule_fires(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(max_batch=4, kv_tokens=2048))
    await engine.start()
    try:
        renderer = make_renderer(load_model_files(folder), "auto")
        async with running(engine, renderer, weights_dir=tmp_path) as (url, _), aiohttp.ClientSession(url) as http:
            trainer = Trainer(http)
            old, new = [(await trainer.post("/sessions", {}))["session_id"] for _ in range(2)]
            await trainer.rollout(old, 1, 5)
            for version in (1, 2, 3):
                await trainer.swap(folder, version)
            await trainer.rollout(new, 2, 5)
            async with http.get("/model_info") as response:
                current = int((await response.json())["weight_version"])
            staleness = []
            for session in (old, new):
                (sample,) = read_by_miles(await trainer.payload(session))
                assert sample.oldest_weight_version is not None
                staleness.append(current - sample.oldest_weight_version)
            assert staleness == [3, 0]
    finally:
        await engine.aclose()
