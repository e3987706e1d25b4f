"""SGLang, on both of its routes, and LMDeploy keep the laws of engines, as far as their stand-ins can show it.

The stand-ins say what a tiny model says, so that what is asked for comes back only if it was asked for rightly.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from standins.lmdeploy_server import CHAT_FIELDS, GENERATE_FIELDS, LMDeployServer
from standins.planned_server import AskedRequest, PlannedServer, ReplyScript
from standins.sglang_server import SERVER_INFO, SGLangServer
from standins.tiny.llama import CONTEXT, VOCAB, write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.core.types import (
    RAW_LOGPROBS,
    Grammar,
    GrammarKind,
    LogprobsKind,
    LogprobsReport,
    RequestId,
    SamplingParams,
)
from stenograph.embedded.wire import Failed
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.lmdeploy.request import session_of
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"))


NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "num_top_logprobs",
}
SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "presence_penalty")
TAKEN = (*SAME, "frequency_penalty", "max_tokens", "min_tokens", "seed", "num_top_logprobs")


def params_of(body: dict[str, Any]) -> SamplingParams:
    """The parameters of a request of any of the routes, as its server understands them."""
    said = {NAMES.get(name, name): value for name, value in {**body, **body.get("sampling_params", {})}.items()}
    taken = {name: said[name] for name in TAKEN if said.get(name) is not None}
    if "top_logprobs" in said:
        taken["num_top_logprobs"] = said["top_logprobs"]
    return SamplingParams(
        **{**taken, "top_k": max(0, said["top_k"])},
        stop=tuple(said.get("stop", ())),
        stop_token_ids=tuple(said.get("stop_token_ids", ())),
        logit_bias=tuple((int(id_), bias) for id_, bias in said.get("logit_bias", {}).items()),
        grammar=grammar_of(said),
    )


def grammar_of(said: dict[str, Any]) -> Grammar | None:
    form = said.get("response_format", {})
    match form.get("type"):
        case "json_object":
            return Grammar(kind=GrammarKind.JSON_OBJECT)
        case "json_schema":
            return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(form["json_schema"]["schema"]))
        case "regex_schema":
            return Grammar(kind=GrammarKind.REGEX, source=form["regex_schema"])
        case _:
            kinds = {name: kind for name, kind in GRAMMARS.items() if name in said}
            return next((Grammar(kind=kind, source=said[name]) for name, kind in kinds.items()), None)


SGLANG = LogprobsReport(kind=LogprobsKind.TEMPERED, after_constraints=True)

GRAMMARS = {"json_schema": GrammarKind.JSON_SCHEMA, "regex": GrammarKind.REGEX, "ebnf": GrammarKind.EBNF}


def answers_of(model: TinyModel, report: LogprobsReport = RAW_LOGPROBS) -> Callable[[AskedRequest], ReplyScript]:
    def answers(asked: AskedRequest) -> ReplyScript:
        """What the model says to a request, as a script."""
        params = params_of(asked.json)
        answer = model.answer(asked.json["input_ids"], params)
        if isinstance(answer, Failed):
            error = {"error": {"message": answer.message, "code": 400}}
            return ReplyScript(status=400, body=json.dumps(error).encode(), error_event=asked.path == "/generate")
        finish = answer[-1].finish
        assert finish is not None
        rows = [row for chunk in answer for row in chunk.top_logprobs or ()]
        return ReplyScript(
            ids=tuple(id_ for chunk in answer for id_ in chunk.ids),
            logprobs=model.logprobs(answer, params, report),
            tops=tuple([(top.id, top.logprob) for top in row] for row in rows),
            finish=finish.reason.value,
            matched=finish.matched,
        )

    return answers


def check_of(
    model: TinyModel, server: PlannedServer, adapter: EngineAdapter, named: Callable[[str], str], **facts: Any
) -> Any:
    """A way to start the engine, with every hook that a stand-in allows."""

    @asynccontextmanager
    async def make() -> AsyncIterator[EngineUnderTest]:
        await server.start()
        engine = HttpEngine(HttpEngineOptions(url=server.url, probe_pause_s=0.01), adapter)
        await engine.start()

        async def num_running() -> int:
            return server.num_running

        async def pause() -> None:
            server.pause()

        async def resume() -> None:
            server.resume()

        async def set_weight_version(version: str) -> None:
            server.weight_version = version

        async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
            return model.score(ids, num_prompt)

        async def score_at(ids: Sequence[int], num_prompt: int, temperature: float) -> Sequence[float]:
            return model.score(ids, num_prompt, temperature)

        async def revive() -> None:
            server.resume()
            await server.start()

        def seen_ids(request_id: RequestId) -> Sequence[int]:
            of = (asked for asked in server.requests if server.id_of(asked) == named(request_id))
            return next(of).json["input_ids"]

        tells_versions = isinstance(server, SGLangServer)
        try:
            yield EngineUnderTest(
                engine=engine,
                prompt=model.tokenizer.encode("the quick brown fox").tolist(),
                decode=lambda ids: model.tokenizer.decode(ids, skip_special=True),
                eos_ids=model.eos_ids,
                tolerance_nats=1e-4,
                num_long_tokens=60,
                seen_ids=seen_ids,
                score=score,
                score_at=score_at,
                num_running=num_running,
                pause=pause,
                resume=resume,
                set_weight_version=set_weight_version if tells_versions else None,
                kill=server.aclose,
                revive=revive,
                max_sequence_tokens=CONTEXT,
                stops_beside_ignore_eos=not isinstance(server, SGLangServer),
                **facts,
            )
        finally:
            server.resume()
            await engine.aclose()
            await server.aclose()

    return make


def not_offered(report: Any) -> set[str]:
    return set(report.not_offered)


@pytest.mark.parametrize(("incremental", "has_spans"), [(True, True), (False, False)])
async def test_sglang_s_own_route_keeps_the_laws(model: TinyModel, incremental: bool, has_spans: bool) -> None:
    server = SGLangServer(answers=answers_of(model, SGLANG), incremental=incremental, has_spans=has_spans)
    report = await check_engine(
        check_of(model, server, SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)), str)
    )
    assert not_offered(report) == set(), report


async def test_sglang_s_chat_route_keeps_the_laws(model: TinyModel) -> None:
    server = SGLangServer(answers=answers_of(model, SGLANG), decode=lambda ids: model.tokenizer.decode(list(ids)))
    report = await check_engine(check_of(model, server, SGLangChat(AdapterOptions(model="m", vocab_size=VOCAB)), str))
    assert not_offered(report) == {"streams_tokens", "whole_equals_streamed", "two_weight_versions"}, report


async def test_sglang_s_chat_route_keeps_the_laws_where_it_streams(model: TinyModel) -> None:
    server = SGLangServer(answers=answers_of(model, SGLANG), decode=lambda ids: model.tokenizer.decode(list(ids)))
    server.server_info = SERVER_INFO
    adapter = SGLangChat(AdapterOptions(model="m", vocab_size=VOCAB))
    report = await check_engine(check_of(model, server, adapter, str))
    assert not_offered(report) == {"two_weight_versions"}, report
    assert "come whole" in adapter.capabilities.note  # since the law that changes its weights within a turn


LMDEPLOY_REFUSES = {
    "stops_at_string": "it ignores strings of several tokens; they are refused",
    "stops_at_token_id": "it ignores stop tokens with ignore_eos; both together are refused",
    "whole_equals_streamed": "the same; test_native_engines.py shows it",
}


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions"])
async def test_lmdeploy_keeps_the_laws(model: TinyModel, route: str) -> None:
    is_chat = route == "/v1/chat/completions"
    fields = None if is_chat else (*GENERATE_FIELDS, "seed", "response_format")
    server = LMDeployServer(answers=answers_of(model), generate_fields=fields)
    if is_chat:  # its fields, and one that newer versions have
        server = LMDeployServer(
            answers=answers_of(model), generate_fields=None, chat_fields=(*CHAT_FIELDS, "stop_token_ids")
        )
    adapter = LMDeploy(AdapterOptions(model="m", vocab_size=VOCAB, eos_token_ids=tuple(model.eos_ids)))
    make = check_of(model, server, adapter, lambda rid: str(session_of(RequestId(rid))), not_offered=LMDEPLOY_REFUSES)
    report = await check_engine(make)
    # It takes no logit bias, by which the model's end would be brought about, and no least number of tokens, and does
    # not tell of its weights.
    expected = {*LMDEPLOY_REFUSES, "stops_at_eos", "stops_after_the_least_number", "two_weight_versions"}
    expected.add("supports_of_tokens")
    assert not_offered(report) == expected | ({"alternatives"} if is_chat else set()), report
