"""Engines that are sent ids and give ids, each against its stand-in on a real socket: SGLang's own route, LMDeploy."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from standins.faults import Fault
from standins.lmdeploy_server import GENERATE_FIELDS, LMDeployServer
from standins.planned_server import PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from stenograph.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnreachable,
)
from stenograph.core.replay import PackedInts
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SampledTurn,
    SamplingParams,
    TopLogprob,
    token_ids,
)
from stenograph.engine.base import EngineState, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.lmdeploy.request import session_of
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.validate import TurnCollector

VOCAB = 1000
EOS = 7
IDS = (104, 105, EOS)
PROMPT = (1, 2, 3)
STOPPED = Finish(reason=FinishReason.STOP, matched=EOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A server, the adapter that speaks to it, and the name under which it knows a request."""

    server: Callable[[], PlannedServer]
    adapter: Callable[[], EngineAdapter]
    named: Callable[[str], str] = str


def lmdeploy() -> LMDeploy:
    return LMDeploy(AdapterOptions(model="m", vocab_size=VOCAB, eos_token_ids=(EOS,)))


def session(rid: str) -> str:
    return str(session_of(RequestId(rid)))


KINDS = {
    "sglang-generate": Kind(
        server=SGLangServer, adapter=lambda: SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB))
    ),
    "sglang-generate-incremental": Kind(
        server=lambda: SGLangServer(incremental=True, has_spans=True),
        adapter=lambda: SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)),
    ),
    "sglang-without-a-chat": Kind(
        server=SGLangServer, adapter=lambda: SGLangChat(AdapterOptions(model="m", vocab_size=VOCAB))
    ),
    "lmdeploy": Kind(server=LMDeployServer, adapter=lmdeploy, named=session),
    "lmdeploy-chat-route": Kind(server=lambda: LMDeployServer(generate_fields=None), adapter=lmdeploy, named=session),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
async def server(kind: Kind) -> AsyncIterator[PlannedServer]:
    async with kind.server() as running:
        yield running


async def connected(server: PlannedServer, adapter: EngineAdapter) -> HttpEngine:
    engine = HttpEngine(HttpEngineOptions(url=server.url), adapter)
    await engine.start()
    assert engine.health().state is EngineState.READY, engine.health().detail
    return engine


@pytest.fixture
async def engine(server: PlannedServer, kind: Kind) -> AsyncIterator[HttpEngine]:
    before = asyncio.all_tasks()
    running = await connected(server, kind.adapter())
    name = running.capabilities.engine
    yield running
    await running.aclose()
    left = {task for task in asyncio.all_tasks() - before if task.get_name().startswith(name)}
    assert not left


def request(rid: str = "r-0", *, streams: bool = True, key: str | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(rid),
        prompt=Prompt(new_ids=token_ids(PROMPT)),
        params=SamplingParams(**params),
        affinity_key=key,
        streams=streams,
    )


def says(**changes: Any) -> ReplyScript:
    return ReplyScript(**{"ids": IDS, "matched": EOS, **changes})


async def drawn(engine: HttpEngine, of: GenerateRequest) -> SampledTurn:
    """A generation, checked as the server checks it."""
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=of.params.max_tokens)
    async with aclosing(engine.generate(of)) as chunks:
        async for chunk in chunks:
            collector.add(chunk)
    return collector.result()


async def failed(engine: HttpEngine, of: GenerateRequest) -> tuple[list[Chunk], StenographError | None]:
    """What a generation gave before its error, and the error; after it, nothing more comes."""
    taken: list[Chunk] = []
    chunks = engine.generate(of)
    try:
        async for chunk in chunks:
            taken.append(chunk)
    except StenographError as error:
        assert [chunk async for chunk in chunks] == []
        return taken, error
    return taken, None


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id_ for chunk in chunks for id_ in chunk.ids]


# -- ids in, ids out


@pytest.mark.parametrize("per_event", [1, 2, 3])
async def test_a_streamed_turn_is_the_turn_that_comes_at_once(
    server: PlannedServer, engine: HttpEngine, per_event: int
) -> None:
    plan = says(num_cached=2, per_event=per_event)
    server.plan(plan, plan)
    streamed, whole = await drawn(engine, request("a")), await drawn(engine, request("b", streams=False))
    assert (list(whole.ids), list(whole.logprobs), whole.finish) == (list(IDS), [-0.125, -0.25, -0.375], STOPPED)
    assert streamed == whole
    assert [asked.json["stream"] for asked in server.requests] == [True, False]
    assert not server.aborts


async def test_tokens_come_as_they_are_drawn(server: PlannedServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=2))
    async with aclosing(engine.generate(request())) as chunks:
        early = [await anext(chunks), await anext(chunks)]
        await server.held(1)
        server.release()
        late = [chunk async for chunk in chunks]
    assert (ids_of(early), ids_of(late)) == ([104, 105], [EOS])
    assert late[-1].finish == STOPPED


async def test_the_request_carries_ids_and_id_and_the_session_s_key(
    server: PlannedServer, engine: HttpEngine, kind: Kind
) -> None:
    await drawn(engine, request("mine", key="session-1", max_tokens=5))
    (asked,) = server.requests
    assert asked.json["input_ids"] == list(PROMPT)
    assert str(asked.json.get("rid", asked.json.get("session_id"))) == kind.named("mine")
    assert asked.header("x-smg-routing-key") == "session-1"
    assert asked.header("accept-encoding") == "identity"
    assert asked.header("content-type") == "application/json"


async def test_a_turn_may_end_by_length(server: PlannedServer, engine: HttpEngine) -> None:
    server.plan(says(finish="length", matched=None), says(finish="length", matched=None))
    for streams in (True, False):
        turn = await drawn(engine, request(f"r-{streams}", streams=streams))
        assert (list(turn.ids), turn.finish) == (list(IDS), Finish(reason=FinishReason.LENGTH))


# -- what goes wrong

EARLY = [Fault.CLOSED, Fault.RESET, Fault.GARBAGE]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fault", EARLY)
async def test_a_reply_that_never_begins_is_unreachable_and_aborted(
    server: PlannedServer, engine: HttpEngine, kind: Kind, fault: Fault, streams: bool
) -> None:
    server.plan(says(fault=fault))
    taken, error = await failed(engine, request("mine", streams=streams))
    assert (taken, type(error)) == ([], UpstreamUnreachable)
    await server.aborted(1)
    assert set(server.aborts) == {kind.named("mine")}
    assert list((await drawn(engine, request("r-1"))).ids)


@pytest.mark.parametrize("fault", [Fault.CUT_BODY, Fault.CUT_CHUNK, Fault.BAD_CHUNK, Fault.LONG_LENGTH])
async def test_a_reply_that_is_not_whole_is_unreachable(
    server: PlannedServer, engine: HttpEngine, kind: Kind, fault: Fault
) -> None:
    server.plan(says(fault=fault))
    taken, error = await failed(engine, request("mine", streams=False))
    assert (taken, type(error)) == ([], UpstreamUnreachable)
    await server.aborted(1)
    assert set(server.aborts) == {kind.named("mine")}


@pytest.mark.parametrize("fault", [Fault.FALSE_GZIP, Fault.UNKNOWN_ENCODING])
async def test_a_reply_that_is_falsely_encoded_breaks_a_law(
    server: PlannedServer, engine: HttpEngine, fault: Fault
) -> None:
    server.plan(says(fault=fault))
    assert isinstance((await failed(engine, request(streams=False)))[1], UpstreamInvalid)


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.UNFRAMED])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_reply_that_is_cut_at_any_byte_is_an_error_or_whole(
    server: PlannedServer, engine: HttpEngine, kind: Kind, fault: Fault, streams: bool
) -> None:
    cut_at = 0
    while True:
        server.plan(says(fault=fault, cut_at=cut_at, per_event=2))
        taken, error = await failed(engine, request(f"r-{cut_at}", streams=streams))
        assert ids_of(taken) == list(IDS)[: len(ids_of(taken))]
        if error is None:
            break
        assert all(chunk.finish is None for chunk in taken)
        # A body whose end only the connection tells is cut unnoticed: then it is no JSON, or lacks something.
        assert isinstance(error, UpstreamUnreachable) or (fault is Fault.UNFRAMED and type(error) is UpstreamInvalid)
        cut_at += 1
        assert cut_at < 5000, "the reply has no end"
    assert cut_at > 150
    assert (ids_of(taken), taken[-1].finish) == (list(IDS), STOPPED)
    if streams:  # who left a stream early has told the engine so
        assert kind.named("r-0") in server.aborts
    assert list((await drawn(engine, request("last"))).ids)


async def test_a_reset_within_a_stream_is_unreachable(server: PlannedServer, engine: HttpEngine, kind: Kind) -> None:
    server.plan(says(fault=Fault.RESET_IN_BODY))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(failed(engine, request("mine")))
        await server.held(1)
        server.release()
    assert isinstance(generation.result()[1], UpstreamUnreachable)
    await server.aborted(1)
    assert set(server.aborts) == {kind.named("mine")}


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
async def test_who_leaves_a_stalled_stream_hangs_up_and_aborts(
    server: PlannedServer, engine: HttpEngine, kind: Kind, num_drawn: int
) -> None:
    server.plan(says(paused=True, num_drawn=num_drawn))
    generation = asyncio.create_task(drawn(engine, request("mine")))
    await server.held(1)
    generation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generation
    await server.left(1)
    await server.aborted(1)
    assert (server.hung_up, set(server.aborts)) == ([kind.named("mine")], {kind.named("mine")})
    assert engine.num_running == 0


BAD = [
    b"",
    b"{",
    b"\xff",
    b"null",
    b"[]",
    b"{}",
    b'{"meta_info": {}, "choices": [{}, {}]}',
]


@pytest.mark.parametrize("bad", BAD)
async def test_an_event_that_is_none_ends_the_turn_and_stops_the_engine(
    server: PlannedServer, engine: HttpEngine, kind: Kind, bad: bytes
) -> None:
    server.plan(says(events=(bad,)), says(body=bad))
    taken, error = await failed(engine, request("mine"))
    assert (taken, type(error)) == ([], UpstreamInvalid)
    await server.aborted(1)
    assert set(server.aborts) == {kind.named("mine")}
    taken, error = await failed(engine, request("r-1", streams=False))
    assert (taken, type(error)) == ([], UpstreamInvalid)
    assert list((await drawn(engine, request("r-2"))).ids)


def rows_of(part: dict[str, Any]) -> list[list[Any]]:
    told = part["meta_info"] if "meta_info" in part else next(iter(part.get("choices") or [{}]))
    rows: list[list[Any]] = told.get("output_token_logprobs") or []
    return rows


def lies(change: Callable[[list[list[Any]], dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """An edit of every part that has rows."""

    def edit(part: dict[str, Any]) -> None:
        if rows := rows_of(part):
            change(rows, part)

    return edit


def set_id(rows: list[list[Any]], part: dict[str, Any]) -> None:
    rows[-1][1] = VOCAB
    told = part if "output_ids" in part else part["choices"][0]
    told["output_ids"][-1] = VOCAB


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("change", "law"),
    [
        (set_id, "id_in_vocab"),
        (lambda rows, _: rows[-1].__setitem__(1, True), "id_in_vocab"),
        (lambda rows, _: rows[-1].__setitem__(0, None), "logprob_is_finite"),
        (lambda rows, _: rows[-1].__setitem__(0, float("nan")), "json"),
        (lambda rows, _: rows[-1].__setitem__(0, float("inf")), "json"),
        (lambda rows, _: rows[-1].append(1), "row_shape"),
        (lambda rows, _: rows[-1].clear(), "row_shape"),
        (lambda rows, _: rows[-1].__setitem__(1, 1), "ids_agree"),
        (lambda rows, _: rows.append(rows[-1]), None),
        (lambda rows, _: rows.pop(), None),
    ],
)
async def test_a_lie_in_a_reply_is_found_in_a_stream_as_well(
    server: PlannedServer, engine: HttpEngine, kind: Kind, streams: bool, change: Any, law: str | None
) -> None:
    server.plan(says(edit=lies(change)))
    taken, error = await failed(engine, request("mine", streams=streams))
    assert taken == []
    assert isinstance(error, UpstreamInvalid)
    assert error.law == law or (law is None and error.law in ("count_agrees", "ids_agree", "has_logprobs"))
    if streams:
        await server.aborted(1)
        assert set(server.aborts) == {kind.named("mine")}


async def test_a_stream_that_ends_twice_is_refused(server: PlannedServer, engine: HttpEngine) -> None:
    events: list[bytes] = []
    server.plan(says(edit=lambda part: events.append(json.dumps(part).encode())))
    await drawn(engine, request("a"))
    last = next(event for event in reversed(events) if b'"stop"' in event)
    server.plan(says(events=(*events, last)))
    taken, error = await failed(engine, request("a"))
    assert isinstance(error, UpstreamInvalid)
    assert error.law == "finish_is_last"
    assert all(chunk.finish is None for chunk in taken)


# -- refusals


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_any_other_status_is_passed_on_as_it_came(
    server: PlannedServer, engine: HttpEngine, status: int, streams: bool
) -> None:
    server.plan(says(status=status, body=b'{"error":  {"message": "no", "code": 7}}', headers=(("Retry-After", "7"),)))
    taken, error = await failed(engine, request(streams=streams))
    assert taken == []
    assert isinstance(error, UpstreamRefused)
    assert (error.engine_status, error.body) == (status, b'{"error":  {"message": "no", "code": 7}}')
    assert error.headers == (("retry-after", "7"),)
    assert not server.aborts


async def test_an_error_within_a_stream_is_a_refusal_too(server: PlannedServer, engine: HttpEngine) -> None:
    server.plan(says(status=400, error_event=True))
    taken, error = await failed(engine, request())
    assert taken == []
    assert isinstance(error, UpstreamRefused)
    assert error.engine_status == 400
    assert json.loads(error.body)["error"]["message"] == "as planned"


# -- abort


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("num_drawn", [0, 2])
async def test_an_abort_ends_a_turn_with_what_it_has_drawn(
    server: PlannedServer, engine: HttpEngine, kind: Kind, num_drawn: int, streams: bool
) -> None:
    server.plan(says(paused=True, num_drawn=num_drawn))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(drawn(engine, request("mine", streams=streams)))
        await server.held(1)
        assert await engine.abort(RequestId("mine"))
    turn = generation.result()
    assert (list(turn.ids), turn.finish) == (list(IDS)[:num_drawn], Finish(reason=FinishReason.ABORT))
    assert set(server.aborts) == {kind.named("mine")}
    assert not await engine.abort(RequestId("mine"))


async def test_an_abort_is_repeated_until_the_engine_has_heard_it(server: PlannedServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=1, ignored_aborts=2))
    async with asyncio.TaskGroup() as tasks:
        generation = tasks.create_task(drawn(engine, request("mine")))
        await server.held(1)
        assert await engine.abort(RequestId("mine"))
    assert generation.result().finish == Finish(reason=FinishReason.ABORT)
    assert len(server.aborts) == 3


async def test_closing_ends_streams_as_unavailable_and_aborts_them(server: PlannedServer, kind: Kind) -> None:
    engine = await connected(server, kind.adapter())
    server.plan(says(paused=True, num_drawn=1), says(fault=Fault.HANG))
    async with asyncio.TaskGroup() as tasks:
        generations = [tasks.create_task(failed(engine, request(f"r-{i}"))) for i in range(2)]
        await server.held(1)
        await server.begun(2)
        await engine.aclose()
    assert [type(generation.result()[1]) for generation in generations] == [EngineUnavailable] * 2
    assert set(server.aborts) == {kind.named("r-0"), kind.named("r-1")}


# -- SGLang's own


async def sglang_turn(script: ReplyScript, *, adapter: EngineAdapter | None = None, **options: Any) -> SampledTurn:
    async with SGLangServer(**options) as server:
        engine = await connected(
            server, adapter or SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB, replay=ReplayKind.ALL))
        )
        server.plan(script)
        try:
            return await drawn(engine, request(num_top_logprobs=2))
        finally:
            await engine.aclose()


@pytest.mark.parametrize("incremental", [True, False])
async def test_sglang_tells_alternatives_versions_and_what_is_replayed(incremental: bool) -> None:
    plan = says(num_top=2, weight_version="step-3", routed_experts=bytes(8), indexer_topk=bytes(4), num_cached=1)
    turn = await sglang_turn(plan, incremental=incremental)
    assert turn.top_logprobs == ((TopLogprob(id=0, logprob=-0.125), TopLogprob(id=1, logprob=-0.25)),) * 3
    assert [(span.version, span.start, span.end) for span in turn.weights] == [("step-3", 0, 3)]
    assert turn.replay is not None
    assert turn.replay.routed_experts == PackedInts(bytes(2), 1)
    assert turn.replay.indexer_topk == PackedInts(bytes(1), 1)
    assert turn.num_cached_tokens == 1


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("has_spans", [True, False])
async def test_sglang_s_weights_may_change_within_a_turn(incremental: bool, has_spans: bool) -> None:
    async with SGLangServer(incremental=incremental, has_spans=has_spans) as server:
        engine = await connected(server, SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)))
        server.plan(says(paused=True, num_drawn=2))
        server.weight_version = "a"
        async with asyncio.TaskGroup() as tasks:
            generation = tasks.create_task(drawn(engine, request()))
            await server.held(1)
            server.weight_version = "b"
            server.release()
        await engine.aclose()
    weights = [(span.version, span.start, span.end) for span in generation.result().weights]
    assert weights == [("a", 0, 2), ("b", 2, 3)]


@pytest.mark.parametrize(
    ("told", "longest", "limit"), [(4096, None, 4095), (None, None, None), (4096, 4090, 4090), (None, 4090, 4090)]
)
@pytest.mark.parametrize("of", [SGLangGenerate, SGLangChat])
async def test_sglang_s_context_is_known_where_it_is_told(
    told: int | None, longest: int | None, limit: int | None, of: Any
) -> None:
    async with SGLangServer(max_model_len=told) as server:
        server.server_info = {"max_req_input_len": longest}
        engine = await connected(server, of(AdapterOptions(model="m", vocab_size=VOCAB)))
        assert engine.capabilities.max_context_tokens == limit
        await engine.aclose()


@pytest.mark.parametrize("of", [SGLangGenerate, SGLangChat])
async def test_a_request_too_long_for_sglang_is_told_so_whole_or_streamed(of: Any) -> None:
    message = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
    body = json.dumps({"error": {"message": message}}).encode()
    async with SGLangServer() as server:
        engine = await connected(server, of(AdapterOptions(model="m", vocab_size=VOCAB)))
        refused = says(status=400, body=body)
        server.plan(refused, refused, says(status=400, body=body, error_event=True))
        for rid, streams in (("a", False), ("b", True), ("c", True)):
            error = (await failed(engine, request(rid, streams=streams)))[1]
            assert isinstance(error, ContextLengthExceeded)
            assert error.max_context_tokens == 4096
        await engine.aclose()


@pytest.mark.parametrize("fields", [GENERATE_FIELDS, None], ids=["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ("Input length (5000) must be smaller than the model context length (4096).", 4096),
        ("The request exceeds the model context length.", None),
    ],
)
async def test_a_request_too_long_for_lmdeploy_is_told_so_whole_or_streamed(
    fields: Any, message: str, limit: int | None
) -> None:
    told = {"message": message, "type": "invalid_request_error", "code": 400, "param": None}
    async with LMDeployServer(generate_fields=fields) as server:
        engine = await connected(server, lmdeploy())
        refused = says(status=400, body=json.dumps({**told, "object": "error"}).encode())
        server.plan(refused, refused, says(status=400, body=json.dumps({"error": told}).encode(), error_event=True))
        for rid, streams in (("a", False), ("b", True), ("c", True)):
            asked = request(rid, streams=streams)
            error = (await failed(engine, asked))[1]
            assert isinstance(error, ContextLengthExceeded)
            assert error.max_context_tokens == (limit or asked.prompt.num_tokens)
        await engine.aclose()


def test_sglang_s_chats_are_not_streamed_and_all_else_may_be() -> None:
    adapter = SGLangChat(AdapterOptions(model="m", vocab_size=VOCAB))
    assert (adapter.capabilities.parses, adapter.capabilities.streams) == (True, False)
    call, _ = adapter.call(request())
    assert call.path == "/generate"
    assert call.streams


# -- LMDeploy's own


async def test_lmdeploy_s_generate_route_comes_first() -> None:
    async with LMDeployServer() as server:
        engine = await connected(server, lmdeploy())
        await drawn(engine, request())
        assert server.requests[0].path == "/generate"
        assert engine.health().detail == ""
        assert engine.capabilities.grammars == frozenset()
        await engine.aclose()


async def test_lmdeploy_s_chat_route_is_used_where_it_alone_takes_ids_and_that_is_said() -> None:
    old = tuple(field for field in GENERATE_FIELDS if field != "input_ids")
    async with LMDeployServer(generate_fields=old) as server:
        engine = await connected(server, lmdeploy())
        turn = await drawn(engine, request(seed=3, grammar=Grammar(kind=GrammarKind.REGEX, source="a+")))
        (asked,) = server.requests
        assert asked.path == "/v1/chat/completions"
        assert (asked.json["messages"], asked.json["model"], asked.json["seed"]) == ([], "stand-in", 3)
        assert asked.json["response_format"] == {"type": "regex_schema", "regex_schema": "a+"}
        assert "/v1/chat/completions" in engine.health().detail
        assert turn.finish == Finish(reason=FinishReason.STOP)  # "ok" of the stand-in: no stop token
        await engine.aclose()


@pytest.mark.parametrize(("fields", "path"), [(GENERATE_FIELDS, "/generate"), (None, "/v1/chat/completions")])
async def test_a_server_that_shows_no_fields_is_asked_which_route_it_has(fields: Any, path: str) -> None:
    async with LMDeployServer(generate_fields=fields, shows_fields=False) as server:
        engine = await connected(server, lmdeploy())
        await drawn(engine, request())
        assert server.requests[0].path == path
        await engine.aclose()


async def test_an_lmdeploy_that_takes_no_ids_is_down_and_says_why() -> None:
    async with LMDeployServer(generate_fields=("prompt",), chat_fields=("messages",)) as server:
        engine = HttpEngine(HttpEngineOptions(url=server.url), lmdeploy())
        await engine.start()
        assert engine.health().state is EngineState.DOWN
        assert "input_ids" in engine.health().detail
        with pytest.raises(EngineUnavailable):
            await drawn(engine, request())
        await engine.aclose()


async def test_an_lmdeploy_without_aborts_is_ended_by_hanging_up_and_keeps_what_came() -> None:
    async with LMDeployServer(aborts=False) as server:
        engine = await connected(server, lmdeploy())
        assert "--enable-abort-handling" in engine.health().detail
        server.plan(says(paused=True, num_drawn=2))
        async with asyncio.TaskGroup() as tasks:
            generation = tasks.create_task(drawn(engine, request("mine", streams=False)))
            await server.held(1)
            assert await engine.abort(RequestId("mine"))
            await server.left(1)
        turn = generation.result()
        assert turn.finish == Finish(reason=FinishReason.ABORT)
        assert list(turn.ids) == list(IDS)[: len(turn.ids)]
        assert server.hung_up == [session("mine")]
        assert server.requests[0].json["stream"] is True
        await engine.aclose()


async def test_lmdeploy_tells_alternatives_and_experts_as_numbers() -> None:
    num = len(PROMPT) + len(IDS) - 1
    payload = array("i", range(num * 6)).tobytes()
    async with LMDeployServer(moe_shape=(2, 3)) as server:
        engine = await connected(
            server,
            LMDeploy(
                AdapterOptions(model="m", vocab_size=VOCAB, eos_token_ids=(EOS,), replay=ReplayKind.ROUTED_EXPERTS)
            ),
        )
        server.plan(*[says(routed_experts=payload, num_top=2)] * 2, says(routed_experts=payload[:-24]))
        for rid, streams in (("a", True), ("b", False)):
            turn = await drawn(engine, request(rid, streams=streams, num_top_logprobs=2))
            assert turn.replay is not None
            assert turn.replay.routed_experts == PackedInts.of(np.frombuffer(payload, np.int32))
            assert turn.top_logprobs is not None
            assert [[top.id for top in row] for row in turn.top_logprobs] == [[0, 1]] * 3
        error = (await failed(engine, request("c")))[1]
        assert isinstance(error, UpstreamInvalid)
        assert error.law == "replay_shape"
        await engine.aclose()


@pytest.mark.parametrize("generate_fields", [GENERATE_FIELDS, None])
@pytest.mark.parametrize("streams", [True, False])
async def test_an_lmdeploy_that_failed_says_so_within_a_200(generate_fields: Any, streams: bool) -> None:
    async with LMDeployServer(generate_fields=generate_fields) as server:
        engine = await connected(server, lmdeploy())
        server.plan(says(ids=(), finish="error"))
        error = (await failed(engine, request(streams=streams)))[1]
        assert isinstance(error, UpstreamInvalid)
        assert error.law == "no_failure"
        assert "INTERNAL_ENGINE_ERROR" in error.message
        await engine.aclose()


@pytest.mark.parametrize("generate_fields", [GENERATE_FIELDS, None])
async def test_a_prompt_that_leaves_no_room_in_lmdeploy_is_the_request_s_fault(generate_fields: Any) -> None:
    async with LMDeployServer(generate_fields=generate_fields) as server:
        engine = await connected(server, lmdeploy())
        server.plan(says(ids=(), finish="length"))
        assert isinstance((await failed(engine, request()))[1], ContextLengthExceeded)
        await engine.aclose()
