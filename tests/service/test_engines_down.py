"""The whole server before engines that are not there, or are something else than they are said to be."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from standins.faults import Answer
from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import AskedRequest, ReplyScript
from standins.scripted_engine import ScriptedEngine
from standins.sglang_server import SGLangServer
from stenograph.core.clock import SystemClock
from stenograph.engine.base import Engine
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.text.renderer import Renderer

from .conftest import END, Live, running, user

JSON_OBJECT = {"type": "json_object"}


@asynccontextmanager
async def live_before(engine: Engine, renderer: Renderer) -> AsyncIterator[Live]:
    """A server before an engine, which is started and closed here."""
    await engine.start()
    try:
        async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
            unused = ScriptedEngine(vocab_size=1)
            yield Live(url=url, engine=unused, renderer=renderer, manager=manager, client=client)
    finally:
        await engine.aclose()


def lmdeploys(servers: Sequence[LMDeployServer], renderer: Renderer) -> Engine:
    """The engine that one or more servers are."""
    engines = [
        HttpEngine(
            HttpEngineOptions(url=server.url),
            LMDeploy(AdapterOptions(model="tiny", vocab_size=renderer.tokenizer.vocab_size, eos_token_ids=(END,))),
        )
        for server in servers
    ]
    if len(engines) == 1:
        return engines[0]
    return Fleet([FleetMember(name=engine.name, engine=engine) for engine in engines], clock=SystemClock())


@asynccontextmanager
async def stand_ins(num: int, *, num_down: int, **options: Any) -> AsyncIterator[list[LMDeployServer]]:
    """So many servers, of which the first `num_down` are not there."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(LMDeployServer(**options)) for _ in range(num)]
        for server in servers[:num_down]:
            await server.aclose()
        yield servers


@pytest.mark.parametrize("num", [1, 2])
async def test_a_guided_turn_for_an_lmdeploy_that_was_never_reached_finds_no_engine(
    renderer: Renderer, num: int
) -> None:
    async with stand_ins(num, num_down=num) as servers, live_before(lmdeploys(servers, renderer), renderer) as live:
        answer = await live.chat(await live.open(), user("one"), response_format=JSON_OBJECT)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_an_lmdeploy_that_is_down_takes_no_grammar_from_the_others(renderer: Renderer) -> None:
    ids = (*renderer.tokenizer.encode("{}"), END)
    async with (
        stand_ins(2, num_down=1, generate_fields=None) as servers,  # the chat route, which takes grammars
        live_before(lmdeploys(servers, renderer), renderer) as live,
    ):
        servers[1].plan(ReplyScript(ids=ids, matched=END))
        answer = await live.chat(await live.open(), user("one"), response_format=JSON_OBJECT)
        assert (answer.status, servers[1].requests[0].json["response_format"]) == (200, JSON_OBJECT), answer.body


async def test_a_grammar_is_refused_once_an_lmdeploy_is_known_not_to_take_it(renderer: Renderer) -> None:
    async with stand_ins(2, num_down=1) as servers, live_before(lmdeploys(servers, renderer), renderer) as live:
        answer = await live.chat(await live.open(), user("one"), response_format=JSON_OBJECT)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "/response_format")


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_that_has_no_path_of_the_engine_s_is_not_ready_and_that_is_said(
    renderer: Renderer, status: int
) -> None:
    async def nothing_there(asked: AskedRequest) -> Answer:
        return Answer(status=status)

    async with SGLangServer(routes=nothing_there) as other:
        engine = HttpEngine(HttpEngineOptions(url=other.url), SGLangChat(AdapterOptions(model="tiny", vocab_size=320)))
        async with live_before(engine, renderer) as live:
            ready = await live.call("GET", "/ready")
            (told,) = ready.json()["engines"]
            assert (ready.status, told["state"]) == (503, "down")
            assert all(f"GET {path} answered {status}" in told["detail"] for path in ("/health", "/v1/models"))


async def test_a_router_without_the_first_path_is_ready_by_the_second(renderer: Renderer) -> None:
    async with SGLangServer(max_model_len=4096) as router:
        router.health_status = 404
        engine = HttpEngine(HttpEngineOptions(url=router.url), SGLangChat(AdapterOptions(model="tiny", vocab_size=320)))
        async with live_before(engine, renderer) as live:
            assert (await live.call("GET", "/ready")).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_refusal_by_sglang_s_own_route_has_a_code_and_its_words(renderer: Renderer, path: str) -> None:
    words = "Failed to compile regex grammar: the parenthesis is not closed."
    body = json.dumps({"error": {"message": words}}).encode()
    asked = {"messages": [user("a")], "max_tokens": 4} if path != "/v1/completions" else {"prompt": "a"}
    asked = {"input": "a"} if path == "/v1/responses" else asked
    async with SGLangServer() as server:
        server.plan(ReplyScript(status=400, body=body))
        engine = HttpEngine(
            HttpEngineOptions(url=server.url), SGLangGenerate(AdapterOptions(model="tiny", vocab_size=320))
        )
        async with live_before(engine, renderer) as live:
            answer = await live.call("POST", path, asked)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (400, "upstream_refused")
    assert error["message"].endswith(words)
    assert "{" not in error["message"]
