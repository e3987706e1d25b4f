"""The stand-ins keep the laws of engines too, and `check_engine` names the law that a false engine breaks."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from standins.planned_server import AskedRequest
from standins.planned_server import ReplyScript as Reply
from standins.scripted_engine import Script, ScriptedEngine
from standins.sglang_server import SGLangServer
from standins.tiny.llama import CONTEXT, VOCAB, write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.conformance.laws import LAST_LAWS, LAWS
from stenograph.core.clock import SystemClock
from stenograph.core.errors import InvalidRequest
from stenograph.core.types import (
    RAW_LOGPROBS,
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobsKind,
    LogprobsReport,
    RequestId,
    SamplingParams,
)
from stenograph.embedded.wire import Failed
from stenograph.engine.base import GenerateRequest
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat

Make = Callable[[], AbstractAsyncContextManager[EngineUnderTest]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


SGLANG = LogprobsReport(kind=LogprobsKind.TEMPERED, after_constraints=True)


def script_of(model: TinyModel, request: GenerateRequest, report: LogprobsReport = RAW_LOGPROBS) -> Script:
    """What the model says to a request, as a script."""
    answer = model.answer(request.prompt.ids, request.params)
    if isinstance(answer, Failed):
        return Script(ids=(), error=InvalidRequest(answer.message, blame=answer.blame))
    ids = tuple(id_ for chunk in answer for id_ in chunk.ids)
    logprobs = model.logprobs(answer, request.params, report)
    return Script(ids=ids, logprobs=logprobs, finish=answer[-1].finish)


class ModelledEngine(ScriptedEngine):
    """A scripted engine whose replies a tiny model writes. `seen` is what it was asked, by request."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(vocab_size=VOCAB, max_context_tokens=CONTEXT, model=lambda request: script_of(model, request))
        self.tiny = model

    def seen_ids(self, request_id: RequestId) -> Sequence[int]:
        return next(request.prompt.ids for request in self.requests if request.request_id == request_id)


def modelled(engine: ModelledEngine) -> Make:
    """What can be done to such an engine."""
    model = engine.tiny

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        await engine.start()

        async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
            return model.score(ids, num_prompt)

        async def score_at(ids: Sequence[int], num_prompt: int, temperature: float) -> Sequence[float]:
            return model.score(ids, num_prompt, temperature)

        async def num_running() -> int:
            return engine.num_running

        async def pause() -> None:
            engine.pause()

        async def resume() -> None:
            engine.resume()

        async def kill() -> None:
            engine.resume()
            await engine.aclose()

        async def set_weight_version(version: str) -> None:
            engine.weight_version = version

        yield EngineUnderTest(
            engine=engine,
            prompt=model.tokenizer.encode("the user asks and").tolist(),
            decode=lambda ids: model.tokenizer.decode(ids, skip_special=True),
            eos_ids=model.eos_ids,
            num_tokens=8,
            num_long_tokens=40,
            tolerance_nats=1e-4,
            max_sequence_tokens=CONTEXT,
            seen_ids=engine.seen_ids,
            score=score,
            score_at=score_at,
            num_running=num_running,
            pause=pause,
            resume=resume,
            set_weight_version=set_weight_version,
            kill=kill,
            revive=engine.start,
        )
        await engine.aclose()

    return make


async def test_the_scripted_engine_keeps_the_laws(model: TinyModel) -> None:
    report = await check_engine(modelled(ModelledEngine(model)))
    missing = {"alternatives", "supports_of_tokens"}
    assert set(report.not_offered) == missing, str(report)
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - missing


async def test_a_law_without_a_hook_is_not_offered_and_never_shown(model: TinyModel) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        async with modelled(ModelledEngine(model))() as whole:
            yield EngineUnderTest(
                engine=whole.engine,
                prompt=whole.prompt,
                decode=whole.decode,
                eos_ids=whole.eos_ids,
                tolerance_nats=whole.tolerance_nats,
                not_offered={"seeds_repeat": "it is said so"},
            )

    report = await check_engine(make)
    assert set(report.not_offered) == {
        *("alternatives", "logprobs_of_the_model", "refuses_what_is_too_long", "leaving_stops", "pause_and_resume"),
        *("two_weight_versions", "dies_clearly_and_comes_back", "seeds_repeat", "supports_of_tokens"),
    }
    assert not set(report.shown) & set(report.not_offered)
    assert "seeds_repeat: not offered: it is said so" in str(report)
    assert "greedy_repeats: shown" in str(report)


# -- a server on a socket, and fleets


def sglang_script(model: TinyModel, asked: AskedRequest) -> Reply:
    """What the model says to a chat request, as SGLang would be asked for it."""
    body = asked.json
    params = SamplingParams(
        temperature=body["temperature"],
        top_p=body["top_p"],
        seed=body.get("seed"),
        max_tokens=body["max_tokens"],
        stop=tuple(body.get("stop", ())),
        stop_token_ids=tuple(body.get("stop_token_ids", ())),
        ignore_eos=body["ignore_eos"],
        logit_bias=tuple((int(id_), bias) for id_, bias in body.get("logit_bias", {}).items()),
        grammar=_grammar(body),
        num_top_logprobs=body.get("top_logprobs", 0),
        min_tokens=body.get("min_tokens", 0),
    )
    answer = model.answer(body["input_ids"], params)
    if isinstance(answer, Failed):
        return Reply(status=400)
    finish = answer[-1].finish
    assert finish is not None
    tops = tuple(row for chunk in answer for row in chunk.top_logprobs or ())
    return Reply(
        ids=tuple(id_ for chunk in answer for id_ in chunk.ids),
        logprobs=model.logprobs(answer, params, SGLANG),
        tops=tuple([(top.id, top.logprob) for top in row] for row in tops),
        finish=finish.reason,
        matched=finish.matched,
    )


def _grammar(body: dict[str, Any]) -> Grammar | None:
    match body:
        case {"response_format": {"type": "json_object"}}:
            return Grammar(kind=GrammarKind.JSON_OBJECT)
        case {"response_format": {"json_schema": {"schema": schema}}}:
            return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
        case {"regex": source}:
            return Grammar(kind=GrammarKind.REGEX, source=source)
        case {"ebnf": source}:
            return Grammar(kind=GrammarKind.EBNF, source=source)
        case _:
            return None


def served(model: TinyModel, num_servers: int) -> Make:
    """SGLang servers, and the engine before one or the fleet before several."""

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        async with AsyncExitStack() as stack:
            going = asyncio.Event()
            going.set()

            def answer(asked: AskedRequest) -> Reply:
                said = sglang_script(model, asked)
                return said if going.is_set() else replace(said, paused=True, num_drawn=len(said.ids) // 2)

            servers = [SGLangServer(answers=answer) for _ in range(num_servers)]
            engines = []
            for server in servers:
                await stack.enter_async_context(server)
                adapter = SGLangChat(AdapterOptions(model="tiny", vocab_size=VOCAB))
                engines.append(HttpEngine(HttpEngineOptions(url=server.url, probe_pause_s=0.02), adapter))
            members = [FleetMember(name=engine.name, engine=engine) for engine in engines]
            engine = engines[0] if num_servers == 1 else Fleet(members, clock=SystemClock())
            await engine.start()
            stack.push_async_callback(engine.aclose)

            def seen_ids(request_id: RequestId) -> Sequence[int]:
                asked = [asked for server in servers for asked in server.requests if asked.json["rid"] == request_id]
                return [int(id_) for id_ in asked[0].json["input_ids"]]

            async def num_running() -> int:
                return sum(server.num_running for server in servers)

            async def pause() -> None:
                going.clear()

            async def resume() -> None:
                going.set()
                for server in servers:
                    server.release()

            async def kill() -> None:
                for server in servers:
                    await server.aclose()
                going.set()

            async def revive() -> None:
                for server in servers:
                    await server.start()

            yield EngineUnderTest(
                engine=engine,
                prompt=model.tokenizer.encode("the user asks and").tolist(),
                decode=lambda ids: model.tokenizer.decode(ids, skip_special=True),
                eos_ids=model.eos_ids,
                num_tokens=8,
                num_long_tokens=40,
                tolerance_nats=1e-4,
                max_sequence_tokens=CONTEXT,
                stops_beside_ignore_eos=False,
                seen_ids=seen_ids,
                num_running=num_running,
                pause=pause,
                resume=resume,
                kill=kill,
                revive=revive,
            )

    return make


def scripted_fleet(model: TinyModel) -> Make:
    """A fleet of scripted engines, which stream."""

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        async with AsyncExitStack() as stack:
            parts = [await stack.enter_async_context(modelled(ModelledEngine(model))()) for _ in range(2)]
            members = [FleetMember(name=f"e{at}", engine=part.engine) for at, part in enumerate(parts)]
            fleet = Fleet(members, clock=SystemClock())
            await fleet.start()

            async def num_running() -> int:
                return fleet.num_running

            def every(name: str) -> Callable[..., Awaitable[None]]:
                async def act(*arguments: str) -> None:
                    for part in parts:
                        await getattr(part, name)(*arguments)

                return act

            hooks = {name: every(name) for name in ("pause", "resume", "kill", "revive", "set_weight_version")}
            yield replace(parts[0], engine=fleet, num_running=num_running, seen_ids=None, **hooks)
            await fleet.aclose()

    return make


@pytest.mark.parametrize("num_servers", [1, 3])
async def test_sglang_keeps_the_laws_alone_and_as_a_fleet(model: TinyModel, num_servers: int) -> None:
    report = await check_engine(served(model, num_servers))
    assert set(report.not_offered) == {
        *(
            "streams_tokens",
            "whole_equals_streamed",
            "two_weight_versions",
            "logprobs_of_the_model",
        ),
    }, str(report)


async def test_a_fleet_of_engines_that_stream_keeps_the_laws(model: TinyModel) -> None:
    report = await check_engine(scripted_fleet(model))
    assert set(report.not_offered) == {"alternatives", "supports_of_tokens"}, str(report)


# -- engines that break a law; each must be found, and by its name


class _Changed(ModelledEngine):
    """Draws from changed requests, or changes what is drawn."""

    def changed(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def changed_chunk(self, chunk: Chunk) -> Chunk:
        return chunk

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(self.changed(request)):
            yield self.changed_chunk(chunk)


class IgnoresStops(_Changed):
    def changed(self, request: GenerateRequest) -> GenerateRequest:
        return structs.replace(request, params=structs.replace(request.params, stop=()))


class IgnoresSeeds(_Changed):
    num_drawn = 0

    def changed(self, request: GenerateRequest) -> GenerateRequest:
        self.num_drawn += 1
        return structs.replace(request, params=structs.replace(request.params, seed=self.num_drawn))


class IgnoresGrammars(_Changed):
    def changed(self, request: GenerateRequest) -> GenerateRequest:
        return structs.replace(request, params=structs.replace(request.params, grammar=None))


class AddsToPrompts(_Changed):
    def changed(self, request: GenerateRequest) -> GenerateRequest:
        ids = request.prompt.ids[:0]
        ids.append(1)
        return structs.replace(request, prompt=structs.replace(request.prompt, ids=ids + request.prompt.ids))


class BendsLogprobs(_Changed):
    def changed_chunk(self, chunk: Chunk) -> Chunk:
        return structs.replace(chunk, logprobs=tuple(logprob / 2 for logprob in chunk.logprobs))


class DividesByTheTemperature(ModelledEngine):
    """Reports tempered logprobs, and declares raw ones: as SGLang was taken for."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(model)
        self._model = lambda request: script_of(model, request, SGLANG)


class SaysStopForLength(_Changed):
    def changed_chunk(self, chunk: Chunk) -> Chunk:
        is_cut = chunk.finish is not None and chunk.finish.reason is FinishReason.LENGTH
        return structs.replace(chunk, finish=Finish(reason=FinishReason.STOP)) if is_cut else chunk


class IsDeaf(ModelledEngine):
    async def abort(self, request_id: RequestId) -> bool:
        return request_id in self._running


@pytest.mark.parametrize(
    ("false_engine", "law"),
    [
        (IgnoresStops, "stops_at_string"),
        (IgnoresSeeds, "seeds_repeat"),
        (IgnoresGrammars, "grammar_regex"),
        (AddsToPrompts, "refuses_what_is_too_long"),
        (BendsLogprobs, "logprobs_of_the_model"),
        (DividesByTheTemperature, "logprobs_of_the_model"),
        (SaysStopForLength, "stops_at_length"),
        (IsDeaf, "abort_keeps_what_was_drawn"),
    ],
)
async def test_a_broken_law_is_named(model: TinyModel, false_engine: type[ModelledEngine], law: str) -> None:
    with pytest.raises(AssertionError, match=f"\n  {law}: "):
        await check_engine(modelled(false_engine(model)))
