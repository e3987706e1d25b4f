"""Routing hints: from a request, by header or field, to the engine's request and the turn's record, or a refusal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import AskedRequest, PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.core.routing import Routing
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, running, user
from .test_doors import KEYS, Serve, opened
from .workers_kit import two_workers

VOCAB = 320
SERVER_INFO = {"tool_call_parser": "hermes", "return_output_ids": True, "tokenizer_worker_num": 1}
RANK = "x-data-parallel-rank"
ADAPTERS: dict[str, type[Any]] = {"sglang": SGLangChat, "sglang-generate": SGLangGenerate, "lmdeploy": LMDeploy}
RANKS = {"priority": -1, "routed_dp_rank": 3}
FIELDS = {
    **RANKS,
    "disagg_prefill_dp_rank": 0,
    "bootstrap_host": "prefill-0",
    "bootstrap_port": 8998,
    "bootstrap_room": 2**63 - 1,
}
CALLS: dict[str, dict[str, Any]] = {
    "v1/chat/completions": {"messages": [user("hi")]},
    "v1/completions": {"prompt": "hi"},
    "v1/responses": {"input": "hi"},
    "v1/messages": {"messages": [user("hi")], "max_tokens": 9},
    "v1beta/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
"""A request of each dialect, by its path."""


def server_of(kind: str) -> PlannedServer:
    if kind.startswith("vllm"):
        return VLLMServer(scale_out=kind == "vllm")
    if kind == "lmdeploy":
        return LMDeployServer()
    standin = SGLangServer(stop_id=END)
    standin.server_info = SERVER_INFO
    return standin


def adapter_of(kind: str) -> EngineAdapter:
    if kind.startswith("vllm"):
        return VLLM(AdapterOptions(model="stand-in", vocab_size=VOCAB, max_context_tokens=4096))
    adapter: EngineAdapter = ADAPTERS[kind](AdapterOptions(model="stand-in", vocab_size=VOCAB))
    return adapter


class Rig:
    """A server before a stand-in."""

    def __init__(self, url: str, renderer: Renderer, client: aiohttp.ClientSession, standin: PlannedServer) -> None:
        self.url = url
        self._ids = (*renderer.tokenizer.encode("ok"), END)
        self.client = client
        self.standin = standin

    async def post(self, path: str, body: dict[str, Any], rank: str | None = None) -> Answer:
        self.standin.plan(ReplyScript(ids=self._ids, text="ok", matched=END))
        headers = {} if rank is None else {RANK: rank}
        async with self.client.post(f"{self.url}/{path}", json=body, headers=headers) as response:
            return Answer(status=response.status, headers=response.headers, body=await response.read())

    async def sent(self, path: str, body: dict[str, Any], rank: str | None = None) -> AskedRequest:
        """The engine's request for one that is answered."""
        answer = await self.post(path, body, rank)
        assert answer.status == 200, answer.body
        return self.standin.requests[-1]


@asynccontextmanager
async def before(kind: str, renderer: Renderer) -> AsyncIterator[Rig]:
    async with server_of(kind) as standin, aiohttp.ClientSession() as client:
        engine = HttpEngine(HttpEngineOptions(url=standin.url), adapter_of(kind))
        await engine.start()
        try:
            async with running(engine, renderer) as (url, _):
                yield Rig(url, renderer, client, standin)
        finally:
            await engine.aclose()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["sglang", "sglang-generate"])
async def test_sglang_gets_every_hint_by_its_own_names(kind: str, stream: bool, renderer: Renderer) -> None:
    async with before(kind, renderer) as rig:
        for path in ("v1/chat/completions", "v1/completions", "v1/responses"):
            fields = RANKS if "responses" in path else FIELDS  # as at SGLang's own
            asked = await rig.sent(path, {**CALLS[path], **fields, "stream": stream})
            assert bool(asked.json.get("stream")) is stream
            assert {name: asked.json.get(name) for name in fields} == fields
            assert asked.json["data_parallel_rank"] == 3, "the only name that older versions know"
        plain = await rig.sent("v1/chat/completions", CALLS["v1/chat/completions"])
        assert not {*FIELDS, "data_parallel_rank"} & set(plain.json)


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions"])
async def test_vllm_gets_the_rank_in_its_header_and_has_no_other_hint(kind: str, renderer: Renderer) -> None:
    path = "v1/chat/completions"
    async with before(kind, renderer) as rig:
        for name in ("routed_dp_rank", "data_parallel_rank"):
            asked = await rig.sent(path, {**CALLS[path], name: 2, "priority": 4})
            assert (asked.header(RANK), asked.json["priority"]) == ("2", 4)
            assert name not in asked.json
        assert (await rig.sent(path, CALLS[path])).header(RANK) is None
        for name in ("disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
            answer = await rig.post(path, {**CALLS[path], name: FIELDS[name]})
            error = answer.json()["error"]
            assert (answer.status, error["param"]) == (400, f"/{name}")
            assert "vllm" in error["message"]
            assert "sglang" in error["message"]


async def test_a_guided_turn_is_scored_where_it_was_sampled(renderer: Renderer) -> None:
    path = "v1/chat/completions"
    async with before("vllm", renderer) as rig:
        await rig.sent(path, {**CALLS[path], "structured_outputs": {"choice": ["ok"]}}, "1")
        scored = [one for one in rig.standin.asked if b"prompt_logprobs" in one.body]
        assert [one.header(RANK) for one in (*rig.standin.requests, *scored)] == ["1", "1"]


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("kind", ["sglang", "sglang-generate", "vllm"])
async def test_the_header_goes_with_every_dialect_and_before_the_body(kind: str, path: str, renderer: Renderer) -> None:
    body_has_it = {**CALLS[path], "routed_dp_rank": 3} if "v1/c" in path or "responses" in path else CALLS[path]
    async with before(kind, renderer) as rig:
        session = (await rig.post("sessions", {})).json()["session_id"]
        asked = await rig.sent(f"sessions/{session}/{path}", body_has_it, "1")
        assert (asked.header(RANK) if kind == "vllm" else asked.json["routed_dp_rank"]) in ("1", 1)
        async with rig.client.get(f"{rig.url}/sessions/{session}") as response:
            (record,) = (await response.json())["records"]
        recorded = record["request"]["parameters"]["recorded"]
        assert recorded[RANK] == 1
        assert recorded.get("routed_dp_rank") == body_has_it.get("routed_dp_rank")


@pytest.mark.parametrize("path", CALLS)
async def test_an_engine_without_ranks_is_named_with_those_that_have_them(path: str, renderer: Renderer) -> None:
    async with before("lmdeploy", renderer) as rig:
        asked = await rig.sent("v1/chat/completions", {**CALLS["v1/chat/completions"], "priority": 3})
        assert "priority" not in asked.json
        answer = await rig.post(path, CALLS[path], "0")
        assert answer.status == 400, answer.body
        for word in ("X-data-parallel-rank", "lmdeploy", "sglang-generate", "vllm"):
            assert word in answer.json()["error"]["message"]
        assert len(rig.standin.requests) == 1, "nothing reached the engine"


async def test_the_hints_of_a_body_are_in_its_record_as_they_came(live: Live) -> None:
    session = await live.open()
    live.says("a")
    assert (await live.chat(session, user("x"), **FIELDS)).status == 200
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert record["request"]["parameters"]["recorded"] == FIELDS


async def test_a_room_is_for_one_prompt(live: Live) -> None:
    body = {"prompt": ["a", "b"], "bootstrap_room": 7}
    answer = await live.call("POST", "/v1/completions", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/bootstrap_room")
    assert "send each in a request" in answer.json()["error"]["message"]


async def test_a_header_that_is_no_rank_is_refused_before_the_engine(live: Live) -> None:
    loop = asyncio.get_running_loop()

    async def one(value: str) -> None:
        live.engine.requests.clear()
        live.says("a")
        answer = await live.call("POST", "/v1/messages", CALLS["v1/messages"], **{RANK: value})
        rank = value.strip(" ")
        if rank.isascii() and rank.isdigit() and len(rank) <= 9:
            assert answer.status == 200, answer.body
            assert live.engine.requests[-1].routing == Routing(dp_rank=int(rank))
        else:
            assert answer.status == 400, answer.body
            assert "X-data-parallel-rank" in answer.json()["error"]["message"]
            assert not live.engine.requests

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(value=st.text("0123456789-+ .eExX_\u00e9", max_size=12) | st.integers(0, 2**31).map(str))
    def any_value(value: str) -> None:
        asyncio.run_coroutine_threadsafe(one(value), loop).result()

    await asyncio.to_thread(any_value)


async def test_hints_are_the_deployment_s_where_there_are_keys(serve: Serve) -> None:
    async with serve(**KEYS) as live:
        session = await opened(live)
        at, bearer = f"/sessions/{session['session_id']}/v1/chat/completions", f"Bearer {session['token']}"
        for fields, rank in (({"bootstrap_host": "127.0.0.1"}, {}), ({"routed_dp_rank": 0}, {}), ({}, {RANK: "0"})):
            body = {**CALLS["v1/chat/completions"], **fields}
            refused = await live.call("POST", at, body, authorization=bearer, **rank)
            assert (refused.status, refused.json()["error"]["code"]) == (403, "forbidden")
            assert "x-api-key" in refused.json()["error"]["message"]
            live.says("a")
            assert (await live.call("POST", at, body, authorization=bearer, x_api_key="trainer", **rank)).status == 200
            assert live.engine.requests[-1].routing is not None
        live.says("a")
        body = {**CALLS["v1/chat/completions"], "priority": 1}
        assert (await live.call("POST", at, body, authorization=bearer)).status == 200


async def test_the_header_reaches_the_worker_that_has_the_session(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer) as workers:
        session = await workers.open_at(1)
        workers.lives[0].says("a")
        path = f"/sessions/{session}/v1/chat/completions"
        answer = await workers.lives[0].call("POST", path, CALLS["v1/chat/completions"], **{RANK: "5"})
        assert answer.status == 200, answer.body
        assert workers.engine.requests[-1].routing == Routing(dp_rank=5)
