"""The whole server before engines that are sent ids: sessions over SGLang's own route and over LMDeploy's."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from standins.faults import Fault
from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.session.manager import SessionManager
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

VOCAB = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A server, the stand-in behind it, and a plain client."""

    url: str
    stand_in: PlannedServer
    renderer: Renderer
    client: aiohttp.ClientSession
    manager: SessionManager

    def script(self, text: str, **options: Any) -> ReplyScript:
        """A reply of this text that ends with `<|im_end|>`."""
        return ReplyScript(**{"ids": (*self.renderer.tokenizer.encode(text), END), "matched": END, **options})

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        async with self.client.post(self.url + path, json=body) as response:
            return response.status, await response.text()

    async def records(self, session: str) -> list[Any]:
        async with self.client.get(f"{self.url}/sessions/{session}") as response:
            return list((await response.json())["records"])


KINDS: dict[str, tuple[Callable[[], PlannedServer], Callable[[], EngineAdapter]]] = {
    "sglang-generate": (SGLangServer, lambda: SGLangGenerate(AdapterOptions(model="tiny", vocab_size=VOCAB))),
    "sglang-generate-incremental": (
        lambda: SGLangServer(incremental=True),
        lambda: SGLangGenerate(AdapterOptions(model="tiny", vocab_size=VOCAB)),
    ),
    "lmdeploy": (
        LMDeployServer,
        lambda: LMDeploy(AdapterOptions(model="tiny", vocab_size=VOCAB, eos_token_ids=(END,))),
    ),
}


def vllm() -> VLLM:
    return VLLM(AdapterOptions(model="tiny", vocab_size=VOCAB, max_context_tokens=4096, eos_token_ids=(END,)))


STREAMING: dict[str, tuple[Callable[[], PlannedServer], Callable[[], EngineAdapter]]] = {
    **KINDS,
    "vllm": (lambda: VLLMServer(scale_out=True), vllm),
    "vllm-completions": (lambda: VLLMServer(scale_out=False, dev_mode=True), vllm),
}


@asynccontextmanager
async def rig_of(
    make_server: Callable[[], PlannedServer],
    make_adapter: Callable[[], EngineAdapter],
    renderer: Renderer,
    **settings: Any,
) -> AsyncIterator[Rig]:
    async with make_server() as stand_in:
        engine = HttpEngine(HttpEngineOptions(url=stand_in.url), make_adapter())
        await engine.start()
        try:
            async with running(engine, renderer, **settings) as (url, manager), aiohttp.ClientSession() as client:
                yield Rig(url=url, stand_in=stand_in, renderer=renderer, client=client, manager=manager)
        finally:
            await engine.aclose()


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest, renderer: Renderer) -> AsyncIterator[Rig]:
    async with rig_of(*KINDS[request.param], renderer) as made:
        yield made


def message_of(answer: str, *, streamed: bool) -> dict[str, Any]:
    """The message of a reply, joined of its events where it was streamed."""
    if not streamed:
        message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
        return message
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "data: [DONE]" in answer
    return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}


async def test_a_session_s_turns_are_the_same_tokens_streamed_or_not(rig: Rig) -> None:
    session = json.loads((await rig.post("/sessions", {}))[1])["session_id"]
    messages: list[dict[str, Any]] = []
    texts = ("Naïve ☃", "two", "three")
    for number, text in enumerate(texts):
        rig.stand_in.plan(rig.script(text))
        messages.append(user(f"question {number}"))
        streamed = number != 1
        body = {"messages": messages, "stream": streamed}
        status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
        assert status == 200, answer
        messages.append(message_of(answer, streamed=streamed))
        assert messages[-1]["content"] == text
    asked = [request.json["input_ids"] for request in rig.stand_in.requests]
    drawn = [list(rig.script(text).ids) for text in texts]
    for turn in range(2):
        assert asked[turn + 1][: len(asked[turn] + drawn[turn])] == asked[turn] + drawn[turn]
    (sample,) = json.loads((await rig.post(f"/sessions/{session}/samples", {"format": "json"}))[1])["samples"]
    assert sample["tokens"] == asked[-1] + drawn[-1]
    assert [request.header("x-smg-routing-key") for request in rig.stand_in.requests] == [session] * 3


FAULTS: list[dict[str, Any]] = [
    {"fault": Fault.CLOSED},
    {"fault": Fault.RESET},
    {"fault": Fault.GARBAGE},
    {"cut_at": 100},
    {"edit": lambda part: part.pop("meta_info")},
    {"edit": lambda part: part.update(output_ids=[VOCAB])},
]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("options", FAULTS)
async def test_a_turn_that_its_engine_broke_is_502_and_leaves_the_session_as_it_was(
    rig: Rig, options: dict[str, Any], streamed: bool
) -> None:
    session = json.loads((await rig.post("/sessions", {}))[1])["session_id"]
    body = {"messages": [user("hi")], "stream": streamed}
    rig.stand_in.plan(rig.script("no", **options))
    status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
    assert status == 502 or (streamed and '"error"' in answer), answer
    assert ("upstream_unreachable" in answer) == ("edit" not in options), answer
    assert "[DONE]" not in answer
    assert await rig.records(session) == []
    if "edit" not in options or streamed:
        await rig.stand_in.aborted(1)
    rig.stand_in.plan(rig.script("yes"))
    status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", {"messages": [user("hi")]})
    assert (status, message_of(answer, streamed=False)["content"]) == (200, "yes")
    assert len(await rig.records(session)) == 1


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("kind", STREAMING)
async def test_a_turn_that_stalls_past_its_deadline_is_504_stops_the_engine_and_keeps_nothing(
    renderer: Renderer, kind: str, streamed: bool
) -> None:
    async with rig_of(*STREAMING[kind], renderer, request_timeout_s=0.5) as rig:
        session = json.loads((await rig.post("/sessions", {}))[1])["session_id"]
        rig.stand_in.plan(rig.script("never", paused=True, num_drawn=2))
        body = {"messages": [user("hi")], "stream": streamed}
        status, answer = await rig.post(f"/sessions/{session}/v1/chat/completions", body)
        assert status == 504 or (streamed and status == 200), answer
        assert '"upstream_timeout"' in answer
        assert "[DONE]" not in answer
        await rig.stand_in.aborted(1)
        assert await rig.records(session) == []
        assert not rig.manager.sessions.get(session).is_busy
