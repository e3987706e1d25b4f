"""The whole server: a sample says which log-probabilities it has, and is refused where it must have others."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from standins.planned_server import PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.core.types import LogprobsKind
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.vllm.adapter import VLLM
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, running, user

RAW, TEMPERED, SAMPLING, OTHER = LogprobsKind
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]


def vllm(kind: LogprobsKind) -> tuple[PlannedServer, EngineAdapter]:
    adapter = VLLM(
        AdapterOptions(model="tiny", vocab_size=320, max_context_tokens=4096, eos_token_ids=(END,), logprobs=kind)
    )
    return VLLMServer(scale_out=False, dev_mode=True), adapter


def sglang(kind: LogprobsKind) -> tuple[PlannedServer, EngineAdapter]:
    return SGLangServer(stop_id=END), SGLangChat(AdapterOptions(model="tiny", vocab_size=320, logprobs=kind))


@asynccontextmanager
async def served(
    made: tuple[PlannedServer, EngineAdapter], renderer: Renderer, **settings: Any
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    server, adapter = made
    server.plan(ReplyScript(ids=(*renderer.tokenizer.encode("hi"), END), text="hi", matched=END))
    async with server:
        engine = HttpEngine(HttpEngineOptions(url=server.url), adapter)
        await engine.start()
        try:
            async with running(engine, renderer, **settings) as (url, _), aiohttp.ClientSession() as client:
                yield url, client
        finally:
            await engine.aclose()


async def sampled(url: str, client: aiohttp.ClientSession, **asked: Any) -> tuple[Answer, str]:
    """The samples of a session of one chat, and what its record calls its log-probabilities."""

    async def call(method: str, path: str, body: Any = None) -> Answer:
        async with client.request(method, url + path, json=body) as response:
            return Answer(status=response.status, headers=response.headers, body=await response.read())

    session = f"/sessions/{(await call('POST', '/sessions', {})).json()['session_id']}"
    reply = await call("POST", f"{session}/v1/chat/completions", {"messages": [user("a")], **asked})
    assert reply.status == 200, reply.body
    (record,) = (await call("GET", session)).json()["records"]
    told: str = record["response"]["choices"][0]["meta_info"]["logprobs_kind"]
    return await call("POST", f"{session}/samples", {"format": "json"}), told


@pytest.mark.parametrize(
    ("make", "kind", "asked", "recorded", "told"),
    [
        (vllm, RAW, {"temperature": 1}, RAW, None),
        (vllm, RAW, {"temperature": 0.7}, RAW, RAW),
        (vllm, SAMPLING, {"temperature": 0.7}, TEMPERED, None),
        (vllm, SAMPLING, {"temperature": 0.7, "top_p": 0.9}, SAMPLING, SAMPLING),
        (sglang, TEMPERED, {"temperature": 0.7, "top_p": 0.9}, TEMPERED, None),
        (sglang, RAW, {"temperature": 0.7}, RAW, RAW),
        (sglang, TEMPERED, {"temperature": 0}, RAW, RAW),
        (sglang, TEMPERED, {"presence_penalty": 1}, SAMPLING, SAMPLING),
        (sglang, TEMPERED, {"presence_penalty": 1, "top_k": 5}, OTHER, OTHER),
        (sglang, TEMPERED, {"tools": TOOLS}, TEMPERED, None),
        (sglang, TEMPERED, {"tools": STRICT}, SAMPLING, SAMPLING),
        (sglang, TEMPERED, {"tools": TOOLS, "tool_choice": "required"}, SAMPLING, SAMPLING),
    ],
)
async def test_a_sample_says_what_its_logprobs_are_where_they_are_not_tempered(
    renderer: Renderer, make: Any, kind: LogprobsKind, asked: Mapping[str, Any], recorded: str, told: str | None
) -> None:
    async with served(make(kind), renderer) as (url, client):
        answer, in_record = await sampled(url, client, **asked)
    assert in_record == recorded
    assert answer.status == 200, answer.body
    (sample,) = answer.json()["samples"]
    assert sample.get("logprobs_kind") == told
    assert sample["turns"][0]["temperature"] == asked.get("temperature", 1.0)
    async with served(make(kind), renderer, require_logprobs="tempered") as (url, client):
        answer, _ = await sampled(url, client, **asked)
    assert answer.status == (200 if told is None else 422)
    if told is not None:
        error = answer.json()["error"]
        assert error["code"] == "samples_inconsistent"
        assert "--require-logprobs tempered" in error["message"]


@pytest.mark.parametrize("version", [None, "7"])
async def test_weights_that_an_engine_does_not_name_have_the_name_of_the_settings(
    renderer: Renderer, version: str | None
) -> None:
    async with served(vllm(RAW), renderer, weight_version=version) as (url, client):
        (sample,) = (await sampled(url, client))[0].json()["samples"]
    start, end = sample["turns"][0]["start"], sample["turns"][0]["end"]
    assert end == len(sample["tokens"])
    assert sample["weight_versions"] == ([] if version is None else ["7"])
    assert sample["weight_spans"] == ([] if version is None else [{"version": "7", "start": start, "end": end}])
