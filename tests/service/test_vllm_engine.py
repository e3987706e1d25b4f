"""The vLLM engine against a stand-in of vLLM on a real socket: routes, streams, faults, aborts, scores."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.faults import Fault
from standins.planned_server import AskedRequest, ReplyScript
from standins.tiny.llama import CONTEXT, write_tiny_folder
from standins.tiny.llama import VOCAB as TINY_VOCAB
from standins.tiny.model import TinyModel
from standins.vllm_server import (
    ABORT_PATH,
    COMPLETIONS_PATH,
    GENERATE_PATH,
    GUARDED_ABORT_PATH,
    VLLMServer,
)
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.conformance.laws import LAST_LAWS, LAWS
from stenograph.core.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnreachable,
)
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
    WeightSpan,
    token_ids,
)
from stenograph.embedded.wire import Failed
from stenograph.engine.base import EngineState, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.http.transport import Headers, HttpReply
from stenograph.engine.settings import ReplayKind
from stenograph.engine.validate import TurnCollector
from stenograph.engine.vllm.adapter import VLLM

VOCAB, EOS = 1000, 7
IDS, PROMPT = (104, 105, EOS), (1, 2, 3)
STOPPED = Finish(reason=FinishReason.STOP, matched=EOS)
GENERATE, COMPLETIONS = "generate", "completions"
REGEX = Grammar(kind=GrammarKind.REGEX, source="a+")

RECORDINGS = Path(__file__).parent / "recordings" / "vllm"
RECORDED_REFUSALS: dict[str, dict[str, Any]] = {
    f"{file} {recording['name']}": recording
    for file in ("engine-0.32", "dialect-generate", "dialect-completions")
    for recording in json.loads((RECORDINGS / f"{file}.json").read_text(encoding="utf-8"))
    if recording["status"] != 200 and not recording["name"].startswith("discover")
}
Connect = Callable[..., AbstractAsyncContextManager[HttpEngine]]


@pytest.fixture(params=[GENERATE, COMPLETIONS])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[VLLMServer]:
    """A server of each kind: with the generate route, and with the completions route alone."""
    async with VLLMServer(scale_out=request.param == GENERATE, dev_mode=request.param == COMPLETIONS) as running:
        yield running


@pytest.fixture
def connect() -> Connect:
    """Engines of a server: `async with connect(server) as engine`; leaves no task behind."""

    @asynccontextmanager
    async def connected(to: VLLMServer, *, ready: bool = True, **options: Any) -> AsyncIterator[HttpEngine]:
        before = asyncio.all_tasks()
        adapter = VLLM(
            AdapterOptions(model="m", vocab_size=VOCAB, max_context_tokens=99, eos_token_ids=(EOS,), **options)
        )
        engine = HttpEngine(HttpEngineOptions(url=to.url, probe_pause_s=0.01), adapter)
        await engine.start()
        assert not ready or engine.health().state is EngineState.READY, engine.health().detail
        try:
            yield engine
        finally:
            await engine.aclose()
        assert not {task for task in asyncio.all_tasks() - before if task.get_name().startswith("vllm")}

    return connected


@pytest.fixture
async def engine(server: VLLMServer, connect: Connect) -> AsyncIterator[HttpEngine]:
    async with connect(server) as running:
        yield running


def request(rid: str = "r-0", *, streams: bool = True, key: str | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(rid),
        prompt=Prompt(new_ids=token_ids(PROMPT)),
        params=SamplingParams(**params),
        affinity_key=key,
        streams=streams,
    )


def says(**changes: Any) -> ReplyScript:
    return ReplyScript(**{"ids": IDS, **changes})


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


async def num_streamed_bytes(server: VLLMServer, script: ReplyScript) -> int:
    """How long the events are that a script is told in."""
    path = GENERATE_PATH if server.scale_out else COMPLETIONS_PATH
    given = {"token_ids": PROMPT, "sampling_params": {}} if server.scale_out else {"prompt": PROMPT}
    asking = {**given, "request_id": "mine", "stream": True, "stream_options": {"include_usage": True}}
    server.plan(script)
    async with aiohttp.ClientSession() as client, client.post(server.url + path, json=asking) as response:
        return len(await response.read())


def known_as(server: VLLMServer, rid: str) -> str:
    """What the server calls a request."""
    return f"generate-tokens-{rid}" if server.scale_out else f"cmpl-{rid}-0"


def told_to(server: VLLMServer) -> set[str]:
    """The server's own ids among those that aborts were for."""
    return {rid for rid in server.aborts if rid.startswith("generate") or rid.endswith("-0")}


# -- which routes there are


async def test_the_generate_route_is_used_where_it_is_on(connect: Connect) -> None:
    async with VLLMServer(max_model_len=64) as server, connect(server) as engine:
        assert (engine.health().detail, engine.capabilities.max_context_tokens) == ("", 64)
        await drawn(engine, request())
    assert [asked.path for asked in server.requests] == [GENERATE_PATH]


@pytest.mark.parametrize("scale_out", [False, None])
async def test_the_completions_route_is_used_where_it_is_off_and_that_is_said(
    connect: Connect, caplog: pytest.LogCaptureFixture, scale_out: bool | None
) -> None:
    caplog.set_level(logging.INFO)
    status = 404 if scale_out is None else 403
    async with VLLMServer(scale_out=scale_out, dev_mode=True) as server, connect(server) as engine:
        told = f"{GENERATE_PATH} answers {status}; start it with --enable-scale-out"
        assert told in engine.health().detail
        assert engine.health().state is EngineState.READY
        assert any(told in record.message for record in caplog.records)
        await drawn(engine, request())
    assert [asked.path for asked in server.requests] == [COMPLETIONS_PATH]


@pytest.mark.parametrize(("route", "path"), [("generate", GENERATE_PATH), ("completions", COMPLETIONS_PATH)])
async def test_what_a_real_vllm_answered_tells_its_routes_and_its_context(route: str, path: str) -> None:
    recorded = json.loads((RECORDINGS / f"dialect-{route}.json").read_text(encoding="utf-8"))
    answers = {recording["name"]: recording for recording in recorded}

    async def ask(method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
        answer = answers[f"discover {method} {target}"]
        return HttpReply(
            status=answer["status"], content_type="application/json", headers=headers, body=answer["body"].encode()
        )

    adapter = VLLM(AdapterOptions(model="m", vocab_size=VOCAB, max_context_tokens=99, eos_token_ids=(EOS,)))
    await adapter.discover(ask)
    (call, _), abort = adapter.call(request()), adapter.abort_call(RequestId("r-0"))
    assert (call.path, json.loads(call.body)["model"]) == (path, "smollm2")
    assert abort is not None
    assert f"discover GET {abort.path}" in answers
    assert adapter.capabilities.max_context_tokens == 4096
    assert ("--enable-scale-out" in adapter.capabilities.note) == (route == "completions")


async def test_finding_out_begins_nothing_and_aborts_nothing(server: VLLMServer, engine: HttpEngine) -> None:
    assert engine.num_running == 0
    assert not server.requests
    assert not [asked for asked in server.asked if asked.method == "POST" and "abort" in asked.path]


async def test_routes_are_found_out_again_when_the_server_comes_back(connect: Connect) -> None:
    async with VLLMServer() as server, connect(server) as engine:
        await server.aclose()
        taken, error = await failed(engine, request())
        assert (taken, type(error)) == ([], UpstreamUnreachable)
        server.scale_out, server.dev_mode = False, True
        await server.start()
        while engine.health().state is not EngineState.READY:  # noqa: ASYNC110 - a probe tells nobody
            await asyncio.sleep(0)
        assert COMPLETIONS_PATH in engine.health().detail
        await drawn(engine, request("r-1"))
        assert server.requests[-1].path == COMPLETIONS_PATH


async def test_a_turn_for_a_server_that_was_never_reached_finds_no_engine(connect: Connect) -> None:
    server = VLLMServer()
    await server.start()
    await server.aclose()
    async with connect(server, ready=False) as engine:
        assert engine.health().state is EngineState.DOWN
        taken, error = await failed(engine, request())
        assert (taken, type(error)) == ([], EngineUnavailable)


@pytest.mark.parametrize(
    "edit", [{"models": ()}, {"health": 500}], ids=["a server without a model", "a server that is not healthy"]
)
async def test_a_server_that_does_not_tell_is_down(connect: Connect, edit: dict[str, Any]) -> None:
    async with VLLMServer(models=edit.get("models", ("m",))) as server:
        server.health_status = edit.get("health", 200)
        async with connect(server, ready=False) as engine:
            assert engine.health().state is EngineState.DOWN
            assert engine.health().detail


async def test_the_context_is_the_model_s_where_the_server_does_not_tell(connect: Connect) -> None:
    async with VLLMServer(max_model_len=None) as server, connect(server) as engine:
        assert engine.capabilities.max_context_tokens == 99


async def test_the_model_is_asked_for_by_its_name_there(connect: Connect) -> None:
    async with VLLMServer(models=("other", "m")) as server, connect(server) as engine:
        await drawn(engine, request())
    async with VLLMServer(models=("other", "another")) as second, connect(second) as engine:
        await drawn(engine, request())
    assert [asked.json["model"] for asked in (*server.requests, *second.requests)] == ["m", "other"]
    assert engine.capabilities.model == "m"


# -- ids in, ids out


@pytest.mark.parametrize("per_event", [1, 2, 3])
async def test_a_streamed_turn_is_the_turn_that_comes_at_once(
    server: VLLMServer, engine: HttpEngine, per_event: int
) -> None:
    plan = says(num_cached=2, per_event=per_event)
    server.plan(plan, plan)
    streamed, whole = await drawn(engine, request("a")), await drawn(engine, request("b", streams=False))
    assert (list(whole.ids), list(whole.logprobs), whole.finish) == (list(IDS), [-0.125, -0.25, -0.375], STOPPED)
    assert whole.num_cached_tokens == 2
    assert whole.weights == ((WeightSpan(version="default", start=0, end=3),) if server.scale_out else ())
    assert streamed == whole
    assert [asked.json.get("stream") for asked in server.requests] == [True, None]
    assert not server.aborts


async def test_tokens_come_as_they_are_drawn(server: VLLMServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=2))
    async with aclosing(engine.generate(request())) as chunks:
        early = [await anext(chunks), await anext(chunks)]
        await server.held(1)
        server.release()
        late = [chunk async for chunk in chunks]
    assert [list(chunk.ids) for chunk in (*early, *late)] == [[104], [105], [EOS]]
    assert late[-1].finish == STOPPED


async def test_a_turn_over_two_weight_versions_has_both(connect: Connect) -> None:
    async with VLLMServer() as server, connect(server) as engine:
        server.plan(says(paused=True, num_drawn=2))
        server.weight_version = "1"
        async with aclosing(engine.generate(request())) as chunks:
            taken = [await anext(chunks), await anext(chunks)]
            server.weight_version = "2"
            server.release()
            taken += [chunk async for chunk in chunks]
    assert taken[-1].weights == (WeightSpan(version="1", start=0, end=2), WeightSpan(version="2", start=2, end=3))


async def test_alternatives_are_told(server: VLLMServer, engine: HttpEngine) -> None:
    tops = (((8, -0.01), (9, -5.0)),) * 3
    plan = says(tops=tops)
    server.plan(plan, plan)
    for streams in (True, False):
        turn = await drawn(engine, request(f"r-{streams}", streams=streams, num_top_logprobs=2))
        assert turn.top_logprobs is not None
        assert turn.top_logprobs[0] == (TopLogprob(id=8, logprob=-0.01), TopLogprob(id=104, logprob=-0.125))


async def test_the_request_carries_its_id_and_the_session_s_key(server: VLLMServer, engine: HttpEngine) -> None:
    prompt = Prompt(new_ids=token_ids(PROMPT), json_fragments=(b"1,2", b" 3"))
    asking = GenerateRequest(
        request_id=RequestId("mine"), prompt=prompt, params=SamplingParams(), affinity_key="session-1"
    )
    await drawn(engine, asking)
    (asked,) = server.requests
    assert (asked.header("x-smg-routing-key"), asked.header("x-request-id")) == ("session-1", "mine")
    assert asked.json["request_id"] == "mine"
    assert b"[1,2, 3]" in asked.body, "ids go out as they were written"
    assert asked.header("accept-encoding") == "identity"


async def test_routed_experts_come_with_the_turn_also_where_streams_do_not_tell_them(
    server: VLLMServer, connect: Connect
) -> None:
    values, file = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2), io.BytesIO()
    np.save(file, values)
    async with connect(server, replay=ReplayKind.ROUTED_EXPERTS) as engine:
        server.plan(says(routed_experts=file.getvalue()), says())
        replay = (await drawn(engine, request())).replay
        assert replay is not None
        assert replay.routed_experts is not None
        told = replay.routed_experts.values
        assert (told.reshape(values.shape) == values).all()
        _, error = await failed(engine, request("r-1"))
        assert isinstance(error, UpstreamInvalid)
        assert error.law == "has_routed_experts"


# -- grammars


async def test_what_a_grammar_forced_is_scored_by_the_model(server: VLLMServer, engine: HttpEngine) -> None:
    server.plan(says(), says())
    for streams in (True, False):
        turn = await drawn(engine, request(f"r-{streams}", streams=streams, grammar=REGEX, num_top_logprobs=1))
        assert list(turn.ids) == list(IDS)
        assert list(turn.logprobs) == [-at / 16 for at in (3, 4, 5)], "the prompt has three ids"
        assert turn.top_logprobs is not None
        assert [row[0].id for row in turn.top_logprobs] == list(IDS)
    asked = [asked.json for asked in server.asked if asked.path in (GENERATE_PATH, COMPLETIONS_PATH)]
    assert [one.get("token_ids", one.get("prompt")) for one in asked[-2:]] == [[*PROMPT], [*PROMPT, *IDS]]


async def test_a_guided_turn_leaves_room_to_be_scored(connect: Connect) -> None:
    async with VLLMServer(max_model_len=10) as server, connect(server) as engine:
        server.plan(says(), says(), says())
        for index, max_tokens in enumerate((5, 7)):
            await drawn(engine, request(f"r-{index}", grammar=REGEX, max_tokens=max_tokens))
        await drawn(engine, request("free", max_tokens=7))
    assert [asked.json["sampling_params"]["max_tokens"] for asked in server.requests] == [5, 6, 7]


async def test_a_guided_turn_that_could_not_be_scored_is_refused_before_it_is_drawn(connect: Connect) -> None:
    for room, max_tokens in ((1, 1), (1, 4), (1, None), (0, 1)):
        async with VLLMServer(max_model_len=len(PROMPT) + room) as server, connect(server) as engine:
            taken, error = await failed(engine, request(grammar=REGEX, max_tokens=max_tokens))
            assert isinstance(error, ContextLengthExceeded)
            assert (taken, len(server.requests)) == ([], 0)
            assert error.max_context_tokens == len(PROMPT) + room - 1, "one is for scoring"
            assert engine.num_running == 0


@pytest.mark.parametrize("max_tokens", [1, 4, None])
async def test_a_guided_turn_of_the_last_token_that_can_be_scored_is_drawn_and_scored(
    connect: Connect, max_tokens: int | None
) -> None:
    async with VLLMServer(max_model_len=len(PROMPT) + 2) as server, connect(server) as engine:
        server.plan(says(ids=(97,), finish="length"))
        turn = await drawn(engine, request(grammar=REGEX, max_tokens=max_tokens))
        scoring = server.asked[-1].json
    assert list(turn.ids) == [97]
    assert server.requests[0].json["sampling_params"]["max_tokens"] == 1
    assert len(scoring["token_ids"]) + scoring["sampling_params"]["max_tokens"] == len(PROMPT) + 2


async def test_the_request_that_scores_carries_the_session_s_key_too(server: VLLMServer, engine: HttpEngine) -> None:
    await drawn(engine, request("keyed", grammar=REGEX, key="session-1"))
    await drawn(engine, request("keyless", grammar=REGEX))
    scoring = [asked for asked in server.asked if b"prompt_logprobs" in asked.body]
    assert [asked.header("x-smg-routing-key") for asked in scoring] == ["session-1", None]


async def test_a_guided_turn_whose_weights_changed_is_not_recorded(connect: Connect) -> None:
    async with VLLMServer() as server, connect(server) as engine:
        server.plan(says(), says(edit=lambda reply: reply["choices"][0]["weight_versions"][0].update(version="0")))
        assert (await drawn(engine, request(grammar=REGEX))).finish == STOPPED
        taken, error = await failed(engine, request("r-1", grammar=REGEX))
    assert isinstance(error, UpstreamInvalid)
    assert (taken, error.law) == ([], "one_version")


async def test_a_guided_turn_that_drew_nothing_has_nothing_to_score(server: VLLMServer, engine: HttpEngine) -> None:
    server.plan(says(ids=(), finish="abort"))
    turn = await drawn(engine, request(grammar=REGEX))
    assert (len(turn.ids), turn.finish) == (0, Finish(reason=FinishReason.ABORT))
    assert not [asked for asked in server.asked if b"prompt_logprobs" in asked.body]


async def test_a_grammar_that_vllm_would_misread_is_refused_before_it_is_asked(
    server: VLLMServer, engine: HttpEngine
) -> None:
    lark = Grammar(kind=GrammarKind.LARK, source='start: "::="')
    taken, error = await failed(engine, request(grammar=lark))
    assert (taken, type(error), server.requests) == ([], InvalidRequest, [])


# -- what goes wrong


EARLY = (Fault.CLOSED, Fault.RESET, Fault.GARBAGE)


@pytest.mark.parametrize(
    ("fault", "streams"),
    [
        *((fault, False) for fault in (*EARLY, Fault.CUT_BODY, Fault.CUT_CHUNK)),
        *((fault, True) for fault in (*EARLY, Fault.RESET_IN_BODY)),
    ],
)
async def test_a_reply_that_is_not_whole_is_unreachable_and_aborted(
    server: VLLMServer, engine: HttpEngine, fault: Fault, streams: bool
) -> None:
    server.plan(says(fault=fault, released=True))
    taken, error = await failed(engine, request("mine", streams=streams))
    assert type(error) is UpstreamUnreachable
    assert all(chunk.finish is None for chunk in taken)
    await server.aborted(1)
    assert told_to(server) == {known_as(server, "mine")}
    assert list((await drawn(engine, request("r-1"))).ids)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_reply_that_is_cut_at_any_byte_is_an_error_or_whole(connect: Connect, streams: bool) -> None:
    async with VLLMServer() as server, connect(server) as engine:
        await drawn(engine, request("whole", streams=streams))
        cut_at, is_whole = 0, False
        while not is_whole:
            server.plan(says(ids=(111,), cut_at=cut_at, finish="length"))
            taken, error = await failed(engine, request(f"r-{cut_at}", streams=streams))
            assert error is None or isinstance(error, UpstreamUnreachable | UpstreamInvalid)
            is_whole = error is None
            assert [list(chunk.ids) for chunk in taken if chunk.finish is not None] == [[111]] * is_whole
            cut_at += 1
    assert cut_at > 400


@pytest.mark.parametrize("cut_from_end", [1, 2, len(b"data: [DONE]\n\n")])
async def test_a_stream_that_is_cut_after_the_usage_is_the_whole_turn_and_nothing_is_aborted(
    server: VLLMServer, engine: HttpEngine, cut_from_end: int
) -> None:
    num_bytes = await num_streamed_bytes(server, says())
    server.plan(says(cut_at=num_bytes - cut_from_end), says())
    turn = await drawn(engine, request("mine"))
    assert (list(turn.ids), turn.finish) == (list(IDS), STOPPED)
    assert engine.health().state is EngineState.READY
    assert list((await drawn(engine, request("next"))).ids) == list(IDS)
    assert not server.aborts


@pytest.mark.parametrize("streams", [True, False])
async def test_a_refusal_passes_through(server: VLLMServer, engine: HttpEngine, streams: bool) -> None:
    server.plan(says(status=400))
    taken, error = await failed(engine, request(streams=streams))
    assert isinstance(error, UpstreamRefused)
    assert (taken, error.engine_status) == ([], 400)
    assert json.loads(error.body)["error"]["message"] == "as planned"
    assert not server.aborts
    assert engine.health().state is EngineState.READY


@pytest.mark.parametrize("name", RECORDED_REFUSALS)
async def test_what_a_real_vllm_refused_with_goes_out_byte_for_byte_unless_it_is_too_long(
    connect: Connect, name: str
) -> None:
    recording = RECORDED_REFUSALS[name]
    body = recording["body"].encode()
    async with VLLMServer(scale_out=recording["path"] == GENERATE_PATH) as server, connect(server) as engine:
        server.plan(says(status=recording["status"], body=body))
        taken, error = await failed(engine, request())
    assert taken == []
    if recording["num_prompt"] > 4096:
        assert isinstance(error, ContextLengthExceeded)
        assert (error.num_prompt_tokens, error.max_context_tokens) == (recording["num_prompt"], 4096)
        return
    assert isinstance(error, UpstreamRefused)
    assert (error.engine_status, error.body) == (recording["status"], body)


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_in_a_stream_is_the_refusal_that_it_is_at_once(
    server: VLLMServer, engine: HttpEngine, status: int
) -> None:
    server.plan(says(status=status, error_event=True))
    taken, error = await failed(engine, request())
    assert isinstance(error, UpstreamRefused)
    assert (taken, error.engine_status) == ([], status)


async def test_a_lie_in_a_stream_ends_it_and_the_generation(server: VLLMServer, engine: HttpEngine) -> None:
    def lie(part: dict[str, Any]) -> None:
        if part["choices"] and part["choices"][0]["token_ids"] == [105]:
            part["choices"][0]["token_ids"] = [106]

    server.plan(says(edit=lie))
    taken, error = await failed(engine, request("mine"))
    assert isinstance(error, UpstreamInvalid)
    assert ([list(chunk.ids) for chunk in taken], error.law) == ([[104]], "ids_agree")
    await server.aborted(1)
    assert told_to(server) == {known_as(server, "mine")}


async def test_a_reply_to_another_request_is_refused(server: VLLMServer, engine: HttpEngine) -> None:
    def mix_up(part: dict[str, Any]) -> None:
        part["request_id" if server.scale_out else "id"] = "generate-tokens-of-another"

    server.plan(says(edit=mix_up), says(edit=mix_up))
    for streams in (True, False):
        taken, error = await failed(engine, request(f"r-{streams}", streams=streams))
        assert isinstance(error, UpstreamInvalid)
        assert (taken, error.law) == ([], "request_agrees")


# -- aborts


@pytest.mark.parametrize("streams", [True, False])
async def test_an_aborted_turn_has_what_it_drew(server: VLLMServer, engine: HttpEngine, streams: bool) -> None:
    server.plan(says(paused=True, num_drawn=2, ignored_aborts=1))
    task = asyncio.create_task(drawn(engine, request("mine", streams=streams)))
    await server.held(1)
    assert await engine.abort(RequestId("mine"))
    turn = await task
    assert (list(turn.ids), turn.finish) == ([104, 105], Finish(reason=FinishReason.ABORT))
    assert told_to(server) == {known_as(server, "mine")}


@pytest.mark.parametrize("streams", [True, False])
async def test_a_turn_that_is_aborted_before_its_first_token_is_empty(
    server: VLLMServer, engine: HttpEngine, streams: bool
) -> None:
    server.plan(says(paused=True, num_drawn=0))
    task = asyncio.create_task(drawn(engine, request("mine", streams=streams)))
    await server.held(1)
    assert await engine.abort(RequestId("mine"))
    turn = await task
    assert (len(turn.ids), turn.finish) == (0, Finish(reason=FinishReason.ABORT))


async def test_who_leaves_a_turn_ends_it_at_the_engine(server: VLLMServer, engine: HttpEngine) -> None:
    server.plan(says(paused=True, num_drawn=1))
    async with aclosing(engine.generate(request("mine"))) as chunks:
        await anext(chunks)
    await server.left(1)
    await server.aborted(1)
    assert server.hung_up == [known_as(server, "mine")]
    assert told_to(server) == {known_as(server, "mine")}


async def test_aborts_go_to_the_route_that_is_there(connect: Connect) -> None:
    for options, path in (
        ({"dev_mode": True}, GUARDED_ABORT_PATH),
        ({}, GUARDED_ABORT_PATH),
        ({"scale_out": False, "dev_mode": True}, ABORT_PATH),
    ):
        async with VLLMServer(**options) as server, connect(server) as engine:
            server.plan(says(paused=True, num_drawn=1))
            task = asyncio.create_task(drawn(engine, request()))
            await server.held(1)
            await engine.abort(RequestId("r-0"))
            await task
            assert {asked.path for asked in server.asked if asked.method == "POST" and "abort" in asked.path} == {path}


@pytest.mark.parametrize("streams", [True, False])
async def test_without_an_abort_route_hanging_up_keeps_what_was_drawn(connect: Connect, streams: bool) -> None:
    async with VLLMServer(scale_out=False) as server, connect(server) as engine:
        assert "no abort route" in engine.health().detail
        server.plan(says(paused=True, num_drawn=2))
        collector = TurnCollector(vocab_size=VOCAB, max_tokens=None)
        async with aclosing(engine.generate(request("mine", streams=streams))) as chunks:
            collector.add(await anext(chunks))
            collector.add(await anext(chunks))
            assert await engine.abort(RequestId("mine"))
            async for chunk in chunks:
                collector.add(chunk)
        turn = collector.result()
        assert (list(turn.ids), turn.finish) == ([104, 105], Finish(reason=FinishReason.ABORT))
        await server.left(1)


async def test_without_an_abort_route_a_guided_turn_that_is_aborted_is_empty_and_that_is_said(
    connect: Connect,
) -> None:
    async with VLLMServer(scale_out=False) as server, connect(server) as engine:
        assert "which then keeps nothing under a grammar" in engine.health().detail
        server.plan(says(paused=True, num_drawn=2))
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(drawn(engine, request("mine", grammar=REGEX)))
            await server.held(1)
            assert await engine.abort(RequestId("mine"))
            await server.left(1)
        assert (len(turn.result().ids), turn.result().finish) == (0, Finish(reason=FinishReason.ABORT))


# -- the laws of engines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


def asked_params(asked: AskedRequest) -> SamplingParams:
    """What vLLM takes a request to mean."""
    told = asked.json.get("sampling_params", asked.json)
    named = {
        name: tuple(told[name]) if name.startswith("stop") else told[name]
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
            *("stop", "stop_token_ids", "ignore_eos"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        )
        if name in told
    }
    guided = told.get("structured_outputs")
    return SamplingParams(
        **named,
        logit_bias=tuple((int(id_), bias) for id_, bias in told.get("logit_bias", {}).items()),
        num_top_logprobs=told["logprobs"],
        grammar=None if guided is None else asked_grammar(guided),
    )


def asked_grammar(told: dict[str, Any]) -> Grammar:
    ((name, value),) = told.items()
    match name:
        case "json_object":
            return Grammar(kind=GrammarKind.JSON_OBJECT)
        case "json":
            return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(value))
        case "choice":
            return Grammar(kind=GrammarKind.CHOICE, source=json.dumps(value))
        case "grammar":
            kind = GrammarKind.EBNF if "::=" in value else GrammarKind.LARK
            return Grammar(kind=kind, source=value)
        case _:
            return Grammar(kind=GrammarKind(name), source=value)


def script_of(model: TinyModel, asked: AskedRequest) -> ReplyScript:
    """What the tiny model says to a request, in vLLM's words."""
    prompt = asked.json.get("token_ids") or asked.json["prompt"]
    params = asked_params(asked)
    answer = model.answer(prompt, params)
    if isinstance(answer, Failed):
        return ReplyScript(status=400)
    finish = answer[-1].finish
    assert finish is not None
    return ReplyScript(
        ids=tuple(id_ for chunk in answer for id_ in chunk.ids),
        logprobs=tuple(logprob for chunk in answer for logprob in chunk.logprobs),
        tops=tuple(tuple((top.id, top.logprob) for top in row) for chunk in answer for row in chunk.top_logprobs or ()),
        finish=finish.reason,
        matched=None if finish.matched in model.eos_ids else finish.matched,
    )


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
async def test_vllm_keeps_the_laws_of_engines_as_far_as_its_wire_goes(model: TinyModel, route: str) -> None:
    def scores(ids: Sequence[int]) -> Sequence[float]:
        return model.score(ids, 1)

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        server = VLLMServer(
            scale_out=route == GENERATE,
            dev_mode=route == COMPLETIONS,
            max_model_len=CONTEXT,
            tells_supports=True,
            scores=scores,
            answers=lambda asked: script_of(model, asked),
        )
        adapter = VLLM(
            AdapterOptions(model="tiny", vocab_size=TINY_VOCAB, max_context_tokens=CONTEXT, eos_token_ids=model.eos_ids)
        )
        await server.start()
        engine = HttpEngine(HttpEngineOptions(url=server.url, probe_pause_s=0.01), adapter)
        await engine.start()

        def seen_ids(rid: RequestId) -> Sequence[int]:
            asked = next(asked for asked in server.requests if asked.json["request_id"] == rid)
            ids: Sequence[int] = asked.json.get("token_ids") or asked.json["prompt"]
            return ids

        async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
            return model.score(ids, num_prompt)

        async def num_running() -> int:
            return server.num_running

        async def pause() -> None:
            server.pause()

        async def resume() -> None:
            server.resume()

        async def set_weight_version(version: str) -> None:
            server.weight_version = version

        async def kill() -> None:
            server.resume()
            await server.aclose()

        yield EngineUnderTest(
            engine=engine,
            prompt=model.tokenizer.encode("the user asks and").tolist(),
            decode=lambda ids: model.tokenizer.decode(ids, skip_special=True),
            eos_ids=model.eos_ids,
            num_tokens=8,
            num_long_tokens=40,
            tolerance_nats=1e-4,
            max_sequence_tokens=CONTEXT,
            seen_ids=seen_ids,
            score=score,
            num_running=num_running,
            pause=pause,
            resume=resume,
            set_weight_version=set_weight_version if route == GENERATE else None,
            kill=kill,
            revive=server.start,
        )
        await engine.aclose()
        await server.aclose()

    report = await check_engine(make)
    missing = set[str]() if route == GENERATE else {"two_weight_versions", "supports_of_tokens"}
    assert set(report.not_offered) == missing, str(report)
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - missing
