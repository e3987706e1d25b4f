"""Routed experts over engines, weights and retries: each row of a sample is of the turn that sampled its next token."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import AskedRequest, PlannedServer, Play, ReplyScript
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.client.samples import decoded
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat import SGLangChat, SGLangChatReading
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.sglang.generate_wire import SGLangGenerateReading
from stenograph.engine.vllm.adapter import VLLM
from stenograph.session.steps import RunningTurn
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

VOCAB = 320
EXPERTS = ReplayKind.ROUTED_EXPERTS
Answers = Callable[[AskedRequest], ReplyScript]


class OlderSGLang(SGLangServer):
    """SGLang before `routed_experts_start_len` (May 2026, https://github.com/sgl-project/sglang/pull/24851): it passes
    over that field, as over any that it does not know, and sends the rows of all tokens but the last."""

    def _experts(self, play: Play) -> bytes | None:
        return play.script.routed_experts


SERVERS: dict[str, Callable[[Answers], PlannedServer]] = {
    "sglang": lambda answers: SGLangServer(answers=answers),
    "sglang-generate": lambda answers: SGLangServer(answers=answers),
    "older-sglang": lambda answers: OlderSGLang(answers=answers),
    "older-sglang-generate": lambda answers: OlderSGLang(answers=answers),
    "vllm": lambda answers: VLLMServer(answers=answers),
    "vllm-completions": lambda answers: VLLMServer(answers=answers, scale_out=False, dev_mode=True),
    "lmdeploy": lambda answers: LMDeployServer(answers=answers, moe_shape=(2, 2)),
}
SGLANG = AdapterOptions(model="tiny", vocab_size=VOCAB, replay=EXPERTS, route_size=4)
ADAPTERS: dict[str, Callable[[], EngineAdapter]] = {
    "sglang": lambda: SGLangChat(SGLANG),
    "sglang-generate": lambda: SGLangGenerate(SGLANG),
    "older-sglang": lambda: SGLangChat(SGLANG),
    "older-sglang-generate": lambda: SGLangGenerate(SGLANG),
    "vllm": lambda: VLLM(AdapterOptions(model="tiny", vocab_size=VOCAB, max_context_tokens=4096, replay=EXPERTS)),
    "vllm-completions": lambda: VLLM(
        AdapterOptions(model="tiny", vocab_size=VOCAB, max_context_tokens=4096, replay=EXPERTS)
    ),
    "lmdeploy": lambda: LMDeploy(AdapterOptions(model="tiny", vocab_size=VOCAB, eos_token_ids=(END,), replay=EXPERTS)),
}
FIRST_ROW = {
    **dict.fromkeys(SERVERS, lambda asked: asked.get("routed_experts_start_len", 0)),
    "vllm": lambda asked: asked["sampling_params"].get("routed_experts_prompt_start", 0),
    "vllm-completions": lambda asked: asked.get("routed_experts_prompt_start", 0),
    "lmdeploy": lambda asked: 0,
}
"""The row from which an engine is asked for experts; LMDeploy has no such field."""


class RoutingModel:
    """A model whose experts at a position are the request's number, its weights, and the position."""

    def __init__(self, kind: str, renderer: Renderer) -> None:
        self._is_npy = kind.startswith("vllm")
        self._renderer = renderer
        self.weights = 7
        self.num_asked = 0

    def answer(self, asked: AskedRequest) -> ReplyScript:
        text = f"Reply {self.num_asked}"
        ids = (*self._renderer.tokenizer.encode(text), END)
        prompt = asked.json.get("input_ids") or asked.json.get("token_ids") or asked.json["prompt"]
        num_rows = len(prompt) + len(ids) - 1
        rows = np.array([self.row(self.num_asked, self.weights, at) for at in range(num_rows)], "<i4")
        self.num_asked += 1
        experts = rows.tobytes()
        if self._is_npy:
            file = io.BytesIO()
            np.save(file, rows.astype(np.uint16))
            experts = file.getvalue()
        return ReplyScript(ids=ids, text=text, matched=END, routed_experts=experts)

    def row(self, request: int, weights: int, position: int) -> list[list[int]]:
        return [[request, weights], [position, 0]]


@pytest.mark.parametrize("compat", [None, "miles"])
@pytest.mark.parametrize("kind", list(SERVERS))
async def test_after_new_weights_and_a_retry_each_row_is_of_the_turn_that_sampled(
    renderer: Renderer, kind: str, compat: str | None
) -> None:
    model = RoutingModel(kind, renderer)
    async with SERVERS[kind](model.answer) as server:
        engine = HttpEngine(HttpEngineOptions(url=server.url), ADAPTERS[kind]())
        await engine.start()
        async with running(engine, renderer) as (url, manager), aiohttp.ClientSession(url) as client:
            sample, records = await trained(client, model, {} if compat is None else {"compat": compat})
            session = manager.sessions.get(next(iter(manager.sessions)))
        await engine.aclose()
    turns = list(zip([0, 2, 3], [7, 8, 9], sample.turns, strict=True))  # request 1 was made again, under new weights
    expected = [
        model.row(request, weights, at)
        for request, weights, turn in turns
        for at in range(max(0, int(str(turn["prompt_start"])) - 1), int(str(turn["end"])) - 1)
    ]
    assert sample.routed_experts is not None
    assert sample.routed_experts.tolist() == expected
    assert sample.routed_experts.dtype == (np.uint8 if compat is None else np.int32)
    for node in session.nodes:
        replay = node.turn.sampled.replay
        assert replay is not None
        assert replay.routed_experts is not None
        assert replay.routed_experts.values.size == 4 * (node.num_tokens - 1 - replay.first_row)
    ends = [0, *(int(str(turn["end"])) for _, _, turn in turns)]
    asked = [FIRST_ROW[kind](one.json) for one in server.requests if one.method == "POST"]
    lines = [0, *([ends[1] - 1] * 2), ends[2] - 1]
    assert asked[-4:] == ([0] * 4 if kind == "lmdeploy" else lines)
    kept = [lines[0], *lines[-2:]]
    assert [record["request"]["routed_experts_start_len"] for record in records] == kept  # as miles' own merge reads it


async def trained(client: aiohttp.ClientSession, model: RoutingModel, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The sample and records of three turns. The second was asked for twice; new weights come before each request."""
    async with client.post("/sessions", json=options) as response:
        path = f"/sessions/{(await response.json())['session_id']}"
    messages: list[dict[str, Any]] = []
    for number in range(4):
        model.weights = 7 + max(0, number - 1) if number != 1 else 99
        if number != 2:
            messages.append(user(f"question {number}"))
        async with client.post(f"{path}/v1/chat/completions", json={"messages": messages}) as response:
            assert response.status == 200, await response.text()
            reply = (await response.json())["choices"][0]["message"]
        if number != 1:
            messages.append({"role": "assistant", "content": reply["content"]})
    async with client.post(f"{path}/samples", json={}) as response:
        (sample,) = decoded(await response.read())
    async with client.get(path) as response:
        return sample, (await response.json())["records"]


@pytest.mark.parametrize("kind", ["sglang", "sglang-generate"])
async def test_nothing_comes_between_a_large_reply_of_routes_and_its_commit(
    renderer: Renderer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No callback of the loop: no deadline, no end of a pause's grace and no client that leaves can lose the turn."""
    loop, reading = asyncio.get_running_loop(), SGLangChatReading if kind == "sglang" else SGLangGenerateReading
    num_passes, seen = 0, list[int]()

    def count() -> None:
        nonlocal num_passes
        num_passes += 1
        loop.call_soon(count)

    def noted(of: type, name: str) -> None:
        call = getattr(of, name)

        def called(*args: Any, **options: Any) -> Any:
            seen.append(num_passes)
            return call(*args, **options)

        monkeypatch.setattr(of, name, called)

    noted(reading, "whole")
    noted(RunningTurn, "commit")
    experts = np.arange(10**6, dtype="<i4").tobytes()
    script = ReplyScript(ids=(5, END), text="x", matched=END, routed_experts=experts)
    async with SERVERS[kind](lambda asked: script) as server:
        engine = HttpEngine(HttpEngineOptions(url=server.url), ADAPTERS[kind]())
        await engine.start()
        async with running(engine, renderer) as (url, manager), aiohttp.ClientSession(url) as client:
            async with client.post("/sessions", json={}) as response:
                session = (await response.json())["session_id"]
            count()
            body = {"messages": [user("question")]}
            async with client.post(f"/sessions/{session}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
            replay = manager.sessions.get(session).nodes[0].turn.sampled.replay
        await engine.aclose()
    assert replay is not None
    assert replay.routed_experts is not None
    assert replay.routed_experts.values.size == 10**6
    read, committed = seen
    assert read == committed
