"""Sessions of a mixture of experts: what their samples say of routes is what the engine computed with."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load

from standins.tiny.llama import LAYERS, write_tiny_folder
from standins.tiny.mixture import TOP_K, write_mixture_folder
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.teacher_forcing import line_logprobs
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.embedded import EmbeddedEngine
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files

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

    async def samples(self, session: str) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """Each sample's description, and its arrays."""
        async with self.http.post(f"/sessions/{session}/samples", json={"include_side": True}) as response:
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


async def test_a_dense_model_has_no_routes_to_replay(tmp_path: Path) -> None:
    engine = EmbeddedEngine(write_tiny_folder(tmp_path / "dense"), OPTIONS)
    with pytest.raises(StartupError, match="is a dense model, without experts to report"):
        await engine.start()
    await engine.aclose()
