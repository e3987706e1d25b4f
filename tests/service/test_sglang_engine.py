"""The SGLang engine against a stand-in of SGLang on a real socket: bytes, faults, cancellation, aborts."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from standins.faults import Fault
from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnreachable,
)
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.replay import PackedInts
from stenograph.core.types import Chunk, Finish, FinishReason, Prompt, RequestId, SamplingParams, token_ids
from stenograph.engine.base import Engine, EngineState, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.http.transport import EngineTransport, end_to_end
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat import SGLangChat

VOCAB = 1000
IDS = (104, 105, 7)
CHAT = ChatRequest(
    messages=(Message(role=Role.USER, content="hi"),),
    messages_json=b'[{"role":"user", "content":"hi"}]',
    tools=(Tool(name="f", json='{"type":"function","function":{"name":"f"}}'),),
)

AIOHTTP_IS_STRICT = sys.flags.dev_mode or bool(os.environ.get("PYTHONASYNCIODEBUG"))
"""Its parser refuses doubled headers when Python is in development mode, and only then."""

Connect = Callable[..., AbstractAsyncContextManager[HttpEngine]]


def sglang(
    url: str, *, probe_pause_s: float = 3.0, replay: ReplayKind = ReplayKind.NONE, max_reply_bytes: int = 2**27
) -> HttpEngine:
    """The engine of a server, not started."""
    adapter = SGLangChat(AdapterOptions(model="m", vocab_size=VOCAB, replay=replay))
    options = HttpEngineOptions(url=url, probe_pause_s=probe_pause_s, max_reply_bytes=max_reply_bytes)
    return HttpEngine(options, adapter)


@pytest.fixture
async def server() -> AsyncIterator[SGLangServer]:
    async with SGLangServer() as running:
        yield running


@pytest.fixture
def connect() -> Connect:
    """Engines of a server: `async with connect(server) as engine`; leaves no task behind."""

    @asynccontextmanager
    async def connected(to: SGLangServer, **options: Any) -> AsyncIterator[HttpEngine]:
        before = asyncio.all_tasks()
        engine = sglang(to.url, **options)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.aclose()
        ours = {task for task in asyncio.all_tasks() - before if not task.get_name().startswith("stand-in")}
        assert not {task for task in ours if task.get_name().startswith("sglang")}

    return connected


@pytest.fixture
async def engine(server: SGLangServer, connect: Connect) -> AsyncIterator[HttpEngine]:
    async with connect(server) as running:
        yield running


def request(rid: str = "r-0", *, key: str | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(rid),
        prompt=Prompt(new_ids=token_ids((1, 2, 3))),
        params=SamplingParams(**params),
        chat=CHAT,
        affinity_key=key,
    )


async def generated(engine: Engine, of: GenerateRequest) -> Chunk:
    """The one chunk of a generation."""
    chunks = [chunk async for chunk in engine.generate(of)]
    assert len(chunks) == 1
    return chunks[0]


def says(text: str = "hi", **changes: Any) -> ReplyScript:
    return ReplyScript(**{"ids": IDS, "text": text, "matched": 7, **changes})


async def test_a_generation_is_one_chunk_with_the_engine_s_reply_byte_for_byte(
    server: SGLangServer, engine: HttpEngine
) -> None:
    server.plan(
        says(
            "Grüße",
            reasoning="hm",
            tool_calls=(("c0", "add", '{"a": 1.0}'),),
            num_cached=2,
            weight_version="step-3",
            routed_experts=bytes(8),
            headers=(("X-Model", "A"), ("connection", "X-Hop"), ("x-hop", "1"), ("set-cookie", "a=b")),
            content_type="application/json; charset=utf-8",
        )
    )
    chunk = await generated(engine, request())
    assert tuple(chunk.ids) == IDS
    assert tuple(chunk.logprobs) == (-0.125, -0.25, -0.375)
    assert chunk.sampling_logprobs is None
    assert chunk.finish == Finish(reason=FinishReason.STOP)  # a call has no stop token there
    assert (chunk.num_cached_tokens, chunk.weight_version) == (2, "step-3")
    assert (chunk.replay, chunk.unasked_replay) == (None, ("routed_experts",))
    assert chunk.reply is not None
    assert chunk.reply.body == server.replies[0].body
    assert chunk.reply.content_type == "application/json; charset=utf-8"
    assert chunk.reply.headers == (("x-model", "A"),)
    assert chunk.reply.id == "r-0"
    assert chunk.reply.message == Message(
        role=Role.ASSISTANT,
        content="Grüße",
        reasoning="hm",
        tool_calls=(ToolCall(id="c0", name="add", arguments='{"a": 1.0}'),),
    )


async def test_the_request_carries_ids_and_id_and_the_session_s_key(server: SGLangServer, engine: HttpEngine) -> None:
    await generated(engine, request("r-1", key="session-1", num_top_logprobs=2, max_tokens=5))
    await generated(engine, request("r-2"))
    first, second = server.requests
    assert (first.json["input_ids"], first.json["rid"], first.json["model"]) == ([1, 2, 3], "r-1", "m")
    assert (first.json["top_logprobs"], first.json["max_tokens"]) == (2, 5)
    assert CHAT.messages_json in first.body
    assert first.header("x-smg-routing-key") == "session-1"
    assert second.header("x-smg-routing-key") is None
    for asked in (first, second):
        assert asked.header("accept-encoding") == "identity"
        assert asked.header("content-type") == "application/json"
        assert len([name for name, _ in asked.headers if name == "accept-encoding"]) == 1
    assert not server.aborts


async def test_replay_and_alternatives_are_asked_for_and_read(server: SGLangServer, connect: Connect) -> None:
    async with connect(server, replay=ReplayKind.ALL) as engine:
        server.plan(says(num_top=2, triples=False, indexer_topk=bytes(12)))
        chunk = await generated(engine, request(num_top_logprobs=2))
    assert server.requests[0].json["return_routed_experts"] is True
    assert server.requests[0].json["return_indexer_topk"] is True
    assert chunk.replay is not None
    assert chunk.replay.routed_experts is None
    assert chunk.top_logprobs is not None
    assert [[top.id for top in row] for row in chunk.top_logprobs] == [[0, 1]] * 3


def test_its_capabilities_leave_the_context_to_the_engine() -> None:
    engine = sglang("http://127.0.0.1:1")
    assert engine.forwards
    capabilities = engine.capabilities
    assert (capabilities.engine, capabilities.model, capabilities.vocab_size) == ("sglang", "m", VOCAB)
    assert (capabilities.max_context_tokens, capabilities.streams, capabilities.parses) == (None, False, True)
    assert sorted(capabilities.grammars) == ["choice", "ebnf", "json_object", "json_schema", "regex"]


# -- replies that are unusual, false or cut


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503, 302, 201, 204])
async def test_any_other_status_is_passed_on_as_it_came(server: SGLangServer, engine: HttpEngine, status: int) -> None:
    body = b"" if status == 204 else b'{"object":"error",  "message":"too long"}'
    headers = (("Retry-After", "7"), ("location", "/elsewhere"))
    server.plan(says(status=status, body=body, content_type="application/problem+json", headers=headers))
    with pytest.raises(UpstreamRefused) as caught:
        await generated(engine, request())
    error = caught.value
    assert (error.engine_status, error.body, error.content_type) == (status, body, "application/problem+json")
    assert error.headers == (("retry-after", "7"), ("location", "/elsewhere"))
    assert not server.aborts
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault.CHUNKED,
        Fault.GZIP,
        Fault.DEFLATE,
        Fault.RAW_DEFLATE,
        pytest.param(Fault.DOUBLED_HEADERS, marks=pytest.mark.skipif(AIOHTTP_IS_STRICT, reason="aiohttp is strict")),
    ],
)
async def test_an_unusual_reply_is_the_same_reply(server: SGLangServer, engine: HttpEngine, fault: Fault) -> None:
    server.plan(says(fault=fault, headers=(("x-kept", "1"),)))
    chunk = await generated(engine, request())
    assert chunk.reply is not None
    assert chunk.reply.body == server.replies[0].body
    assert chunk.reply.headers == (("x-kept", "1"),)
    await generated(engine, request("r-1"))


@pytest.mark.parametrize(
    "fault",
    [
        Fault.CLOSED,
        Fault.RESET,
        Fault.CUT_BODY,
        Fault.CUT_CHUNK,
        Fault.BAD_CHUNK,
        Fault.LONG_LENGTH,
        Fault.GARBAGE,
    ],
)
async def test_a_reply_that_is_not_whole_is_unreachable_and_aborted(
    server: SGLangServer, engine: HttpEngine, fault: Fault
) -> None:
    server.plan(says(fault=fault))
    with pytest.raises(UpstreamUnreachable) as caught:
        await generated(engine, request())
    assert "\n" not in caught.value.message
    await server.aborted(1)
    assert server.aborts == ["r-0"]
    assert (await generated(engine, request("r-1"))).ids


async def test_a_reset_within_the_body_is_unreachable(server: SGLangServer, engine: HttpEngine) -> None:
    server.plan(says(fault=Fault.RESET_IN_BODY))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(_error_of(engine, request()))
        await server.held(1)
        server.release()
    assert isinstance(generation.result(), UpstreamUnreachable)


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        (Fault.FALSE_GZIP, "content_encoding"),
        (Fault.CUT_GZIP, "content_encoding"),
        (Fault.UNKNOWN_ENCODING, "content_encoding"),
    ],
)
async def test_a_reply_that_is_whole_and_false_breaks_a_law(
    server: SGLangServer, engine: HttpEngine, fault: Fault, law: str
) -> None:
    server.plan(says(fault=fault))
    with pytest.raises(UpstreamInvalid) as caught:
        await generated(engine, request())
    assert caught.value.law == law
    assert (await generated(engine, request("r-1"))).ids


async def test_a_reply_longer_than_it_says_is_refused(server: SGLangServer, engine: HttpEngine) -> None:
    server.plan(says(fault=Fault.SHORT_LENGTH))
    with pytest.raises(
        (UpstreamInvalid, UpstreamUnreachable)
    ):  # whether the rest comes with it is the network's choice
        await generated(engine, request())
    assert (await generated(engine, request("r-1"))).ids


@pytest.mark.parametrize(
    ("body", "law"), [(b"", "json"), (b"\xff", "utf8"), (b"{}", "shape"), (b'{"id":"a","choices":[]}', "one_choice")]
)
async def test_a_200_is_not_trusted(server: SGLangServer, engine: HttpEngine, body: bytes, law: str) -> None:
    server.plan(says(body=body))
    with pytest.raises(UpstreamInvalid) as caught:
        await generated(engine, request())
    assert caught.value.law == law
    assert not server.aborts


async def test_a_megabyte_comes_through_unchanged(server: SGLangServer, connect: Connect) -> None:
    payload = bytes(range(256)) * 8192
    server.plan(says(routed_experts=payload), says(routed_experts=payload, fault=Fault.GZIP))
    async with connect(server, replay=ReplayKind.ROUTED_EXPERTS) as engine:
        for rid in ("a", "b"):
            chunk = await generated(engine, request(rid))
            assert chunk.replay is not None
            assert chunk.replay.routed_experts == PackedInts(payload, 4)


async def test_a_reply_that_does_not_end_is_not_gathered(server: SGLangServer, connect: Connect) -> None:
    """Refused by its length alone, or, without one, where it goes beyond the limit."""
    server.plan(says("x" * 200_000), says("x" * 200_000, fault=Fault.CHUNKED), says("x" * 200_000, fault=Fault.GZIP))
    async with connect(server, max_reply_bytes=100_000) as engine:
        for rid in "abc":
            with pytest.raises(UpstreamInvalid, match=r"100000 bytes \(--max-reply-bytes\)") as caught:
                await generated(engine, request(rid))
            assert caught.value.law == "reply_size"
        assert (await generated(engine, request("d"))).ids


def test_only_end_to_end_headers_are_passed_on() -> None:
    hops = ["Connection", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Authenticate"]
    own = ["Server", "Date", "Content-Type", "Content-Length", "Content-Encoding", "Set-Cookie"]
    headers = [(name, "x, Y-Hop") for name in (*hops, *own)]
    kept = [("X-A", "1"), ("x-a", "2"), ("ETag", '"e"')]
    assert end_to_end([*headers, ("y-hop", "1"), ("X", "1"), *kept]) == (("x-a", "1"), ("x-a", "2"), ("etag", '"e"'))


# -- leaving early


async def _error_of(engine: Engine, of: GenerateRequest) -> BaseException | None:
    """What a generation ends with, where that is an error of ours."""
    try:
        await generated(engine, of)
    except (UpstreamUnreachable, EngineUnavailable) as error:
        return error
    return None


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.HELD_HEADERS, Fault.HELD_BODY])
async def test_a_cancelled_wait_hangs_up_and_aborts_by_our_id(
    server: SGLangServer, engine: HttpEngine, fault: Fault
) -> None:
    server.plan(says(fault=fault))
    generation = asyncio.create_task(generated(engine, request("mine")))
    await (server.begun(1) if fault is Fault.HANG else server.held(1))
    generation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generation
    await server.left(1)
    await server.aborted(1)
    assert (server.hung_up, server.aborts) == (["mine"], ["mine"])
    assert engine.num_running == 0
    assert (await generated(engine, request("r-1"))).ids


async def test_a_generation_that_is_cancelled_before_it_is_sent_is_aborted_too(
    server: SGLangServer, engine: HttpEngine
) -> None:
    generation = asyncio.create_task(generated(engine, request("mine")))
    await asyncio.sleep(0)
    assert engine.num_running == 1
    generation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generation
    await server.aborted(1)
    assert server.aborts == ["mine"]


async def test_a_reader_that_leaves_after_the_whole_reply_aborts_nothing(
    server: SGLangServer, engine: HttpEngine
) -> None:
    chunks = engine.generate(request())
    assert (await anext(chunks)).finish is not None
    await chunks.aclose()
    await generated(engine, request("r-1"))
    assert not server.aborts


# -- abort


async def test_an_abort_of_a_running_generation_yields_what_was_drawn(server: SGLangServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=2))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(generated(engine, request("mine")))
        await server.held(1)
        assert await engine.abort(RequestId("mine"))
    chunk = generation.result()
    assert (tuple(chunk.ids), chunk.finish) == (IDS[:2], Finish(reason=FinishReason.ABORT))
    assert chunk.reply is not None
    assert json.loads(chunk.reply.body)["choices"][0]["finish_reason"] == "abort"
    assert set(server.aborts) == {"mine"}
    assert not await engine.abort(RequestId("mine"))


async def test_an_aborted_generation_may_have_drawn_nothing(server: SGLangServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(generated(engine, request("mine")))
        await server.held(1)
        await engine.abort(RequestId("mine"))
    assert (tuple(generation.result().ids), generation.result().finish) == ((), Finish(reason=FinishReason.ABORT))


async def test_an_abort_of_an_unknown_generation_asks_nobody(server: SGLangServer, engine: HttpEngine) -> None:
    assert not await engine.abort(RequestId("nobody"))
    await generated(engine, request())
    assert not server.aborts


async def test_an_abort_is_repeated_until_the_engine_has_heard_it(server: SGLangServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=1, ignored_aborts=2))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(generated(engine, request("mine")))
        await server.begun(1)
        for _ in range(3):  # asking again while one asks already adds nothing
            assert await engine.abort(RequestId("mine"))
    assert generation.result().finish == Finish(reason=FinishReason.ABORT)
    assert server.aborts == ["mine"] * 3


async def test_an_abort_may_overtake_its_request(server: SGLangServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=1))
    server.hold_arrivals()
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(generated(engine, request("mine")))
        await asyncio.sleep(0)
        assert await engine.abort(RequestId("mine"))
        await server.aborted(1)
        assert not server.requests
        server.release()
    assert generation.result().finish == Finish(reason=FinishReason.ABORT)


async def test_64_generations_that_are_aborted_at_once_each_have_a_reply(
    server: SGLangServer, engine: HttpEngine
) -> None:
    num = 64
    server.plan(*[says(paused=True, num_drawn=1)] * num)
    async with asyncio.TaskGroup() as tasks:
        generations = [tasks.create_task(generated(engine, request(f"r-{i}"))) for i in range(num)]
        await server.held(num)
        assert all([await engine.abort(RequestId(f"r-{i}")) for i in range(num)])
    assert [tuple(generation.result().ids) for generation in generations] == [IDS[:1]] * num
    assert engine.num_running == 0
    assert not server.hung_up


async def test_a_failing_abort_is_logged_and_no_error(
    server: SGLangServer, engine: HttpEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server.abort_status = 404  # a router's answer
    server.plan(says(paused=True))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(generated(engine, request("mine")))
        await server.held(1)
        assert await engine.abort(RequestId("mine"))
        await server.aborted(2)
        server.release()
    assert generation.result().finish == Finish(reason=FinishReason.STOP, matched=7)
    assert "could not abort mine" in caplog.text


# -- the end, and health


async def test_closing_ends_generations_as_unavailable_and_aborts_them(server: SGLangServer, connect: Connect) -> None:
    async with asyncio.TaskGroup() as tasks, connect(server) as engine:
        server.plan(says(fault=Fault.HANG), says(fault=Fault.HELD_BODY), says(paused=True))
        generations = [tasks.create_task(_error_of(engine, request(f"r-{i}"))) for i in range(3)]
        await server.held(2)
        await server.begun(3)
    assert [type(generation.result()) for generation in generations] == [EngineUnavailable] * 3
    await server.left(3)
    assert sorted(server.aborts) == ["r-0", "r-1", "r-2"]
    assert engine.health().state is EngineState.STOPPED
    with pytest.raises(EngineUnavailable):
        await generated(engine, request())
    await engine.aclose()


async def becomes(engine: Engine, state: EngineState) -> None:
    """Wait until a probe has told so; health is read, never awaited."""
    while engine.health().state is not state:  # noqa: ASYNC110 - there is no event to wait for, by design
        await asyncio.sleep(0)


async def test_an_engine_that_is_not_there_is_down_and_found_when_it_comes(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = SGLangServer()
    await server.start()
    await server.aclose()
    async with connect(server, probe_pause_s=0.01) as engine:
        health = engine.health()
        assert health.state is EngineState.DOWN
        assert health.detail == "connection refused"
        refused = f"The engine at {server.url.removeprefix('http://')} could not be reached: connection refused."
        with pytest.raises(UpstreamUnreachable) as raised:
            await generated(engine, request())
        assert raised.value.message == refused
        async with server:
            await becomes(engine, EngineState.READY)
            assert (await generated(engine, request("r-1"))).ids
        await becomes(engine, EngineState.DOWN)
    assert "is down" in caplog.text
    assert "is ready" in caplog.text


@pytest.mark.parametrize(
    ("status", "state"), [(200, EngineState.READY), (404, EngineState.READY), (503, EngineState.DOWN)]
)
async def test_a_probe_tells_the_health_at_the_start(
    server: SGLangServer, connect: Connect, status: int, state: EngineState
) -> None:
    server.health_status = status
    async with connect(server) as engine:
        assert engine.health().state is state
        await generated(engine, request())
        assert engine.health().state is EngineState.READY
    paths = ["/model_info", "/get_model_info", "/health", "/v1/models"]
    tried = paths if status == 404 else paths[:1]
    assert [asked.path for asked in server.asked[: len(tried)]] == tried


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends_however_many_turns_it_costs(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = SGLangServer()
    await server.start()
    async with connect(server, probe_pause_s=0.01) as engine:
        await server.aclose()
        for number in range(5):
            with pytest.raises(UpstreamUnreachable):
                await generated(engine, request(f"r-{number}"))
        async with server:
            await becomes(engine, EngineState.READY)
    told = [record.getMessage() for record in caplog.records if record.name == "stenograph.engine.http.engine"]
    where = f"the engine at {server.url} is"
    assert told[0] == told[-1] == f"{where} ready"
    assert all(line.startswith(f"{where} down: ") for line in told[1:-1])
    assert len(set(told[1:-1])) == len(told[1:-1])  # each reason once


async def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    transport = EngineTransport("http://engine.invalid:1", 5.0)
    transport.open()
    with pytest.raises(UpstreamUnreachable, match=r"The engine at engine\.invalid:1 could not be reached: \w"):
        await transport.post("/", b"{}", (), lambda reply: reply)
    await transport.aclose()


async def test_a_connection_that_is_never_accepted_is_unreachable() -> None:
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):  # fill what the kernel accepts by itself
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        transport = EngineTransport(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.05)
        transport.open()
        with pytest.raises(UpstreamUnreachable, match="in time"):
            await transport.post("/", b"{}", (), lambda reply: reply)
        await transport.aclose()


# -- other routes


async def test_other_requests_are_forwarded_as_they_are(server: SGLangServer, engine: HttpEngine) -> None:
    headers = [("X-Mine", "1"), ("Host", "elsewhere"), ("Connection", "X-Hop"), ("X-Hop", "1"), ("Content-Length", "9")]
    answer = await engine.forward("POST", "/tokenize?a=%2F&b", headers, b'{"prompt": "hi"}')
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert json.loads(answer.body) == {"tokens": [104, 105], "count": 2}
    asked = server.asked[-1]
    assert (asked.method, asked.path, asked.body) == ("POST", "/tokenize?a=%2F&b", b'{"prompt": "hi"}')
    assert asked.header("x-mine") == "1"
    assert asked.header("x-hop") is None
    assert asked.header("host") == server.url.removeprefix("http://")
    assert asked.header("content-length") == "16"
    assert (await engine.forward("GET", "/nowhere", (), b"")).status == 404
    back = await engine.forward("POST", "/detokenize", (), b'{"tokens": [104, 105]}')
    assert json.loads(back.body) == {"text": "hi"}


@pytest.mark.parametrize("target", ["", "v1/models", "@evil/", "/a b", "/a\r\nx: y", "/\u00e9", "/\x7f"])
async def test_a_path_that_cannot_be_on_a_request_line_is_refused(engine: HttpEngine, target: str) -> None:
    with pytest.raises(InvalidRequest):
        await engine.forward("GET", target, (), b"")


async def test_a_forwarded_request_to_nobody_is_unreachable(server: SGLangServer, engine: HttpEngine) -> None:
    await server.aclose()
    with pytest.raises(UpstreamUnreachable):
        await engine.forward("GET", "/v1/models", (), b"")


def test_the_name_and_password_of_an_address_are_not_shown() -> None:
    url = "http://me:secret@127.0.0.1:1/base"
    engine = HttpEngine(HttpEngineOptions(url=url), SGLangChat(AdapterOptions(model="tiny", vocab_size=320)))
    assert engine.name == "http://127.0.0.1:1/base"
    assert "secret" not in f"{engine!r} {engine.statuses()!r}"
