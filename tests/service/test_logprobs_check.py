"""`--engine-logprobs` is held to what the engine says of one prompt's alternatives at two temperatures."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from standins.planned_server import AskedRequest, PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.core.errors import StartupError, UpstreamTimeout
from stenograph.core.types import LogprobsKind
from stenograph.engine.base import EngineState
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.http.logprobs_check import NUM_TOP, check_logprobs
from stenograph.engine.http.transport import EngineTransport, Headers, HttpReply
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM

RAW, TEMPERED, SAMPLING, _ = LogprobsKind
LOGITS = [-number / 3 for number in range(40)]
Answers = Callable[[AskedRequest], ReplyScript]


def log_softmax(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def answering(kind: LogprobsKind) -> Answers:
    """A model of 40 tokens whose engine reports log-probabilities of this kind."""

    def answer(asked: AskedRequest) -> ReplyScript:
        sampling = asked.json.get("sampling_params", asked.json)
        temperature, top_k = float(sampling["temperature"]), int(sampling["top_k"])
        told = log_softmax(LOGITS if kind is RAW else [logit / temperature for logit in LOGITS])
        if kind is SAMPLING and top_k > 0:
            told = [*log_softmax([logit / temperature for logit in LOGITS[:top_k]]), *[-9999.0] * (len(LOGITS) - top_k)]
        tops = tuple((40 + number, logprob) for number, logprob in enumerate(told[:NUM_TOP]))
        return ReplyScript(ids=(40,), logprobs=(told[0],), tops=(tops,), finish="length")

    return answer


def sglang(answers: Answers) -> tuple[PlannedServer, EngineAdapter]:
    return SGLangServer(answers=answers), SGLangChat(AdapterOptions(model="m", vocab_size=320))


def sglang_generate(answers: Answers) -> tuple[PlannedServer, EngineAdapter]:
    return SGLangServer(answers=answers), SGLangGenerate(AdapterOptions(model="m", vocab_size=320))


def vllm(answers: Answers) -> tuple[PlannedServer, EngineAdapter]:
    return VLLMServer(answers=answers), VLLM(AdapterOptions(model="stand-in", vocab_size=320, max_context_tokens=None))


def streaming_vllm(answers: Answers) -> tuple[PlannedServer, EngineAdapter]:
    """One without an abort route, which is always asked for events."""
    server, adapter = vllm(answers)
    assert isinstance(server, VLLMServer)
    server.scale_out = None
    return server, adapter


MAKE = (sglang, sglang_generate, vllm, streaming_vllm)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("found", [RAW, TEMPERED, SAMPLING])
@pytest.mark.parametrize("said", [RAW, TEMPERED, SAMPLING])
async def test_an_engine_that_reports_others_than_the_settings_say_stops_the_start(
    make: Callable[[Answers], tuple[PlannedServer, EngineAdapter]], said: LogprobsKind, found: LogprobsKind
) -> None:
    server, adapter = make(answering(found))
    async with server:
        engine = HttpEngine(HttpEngineOptions(url=server.url, check=partial(check_logprobs, said=said)), adapter)
        try:
            if said is found:
                await engine.start()
                assert engine.health().state is EngineState.READY
            else:
                with pytest.raises(StartupError, match=f"--engine-logprobs is {said}, but the engine reports {found}"):
                    await engine.start()
        finally:
            await engine.aclose()
        assert len(server.requests) == 2


async def test_an_engine_that_comes_up_later_is_checked_then_and_gets_no_turns_while_it_is_wrong() -> None:
    kinds = [RAW]

    def answer(asked: AskedRequest) -> ReplyScript:
        return answering(kinds[-1])(asked)

    server, adapter = sglang_generate(answer)
    await server.start()
    await server.aclose()
    engine = HttpEngine(
        HttpEngineOptions(url=server.url, check=partial(check_logprobs, said=TEMPERED), probe_pause_s=0.01), adapter
    )
    await engine.start()
    try:
        assert engine.health().state is EngineState.DOWN
        await server.start()
        await server.begun(2)
        while "--engine-logprobs is tempered" not in engine.health().detail:  # noqa: ASYNC110 - a probe finds out
            await asyncio.sleep(0)
        assert engine.health().state is EngineState.DOWN
        kinds.append(TEMPERED)
        while engine.health().state is not EngineState.READY:  # noqa: ASYNC110 - a probe finds out
            await asyncio.sleep(0)
    finally:
        await engine.aclose()
        await server.aclose()


@pytest.mark.parametrize("make", MAKE)
async def test_nothing_is_asked_where_the_settings_say_nothing(
    make: Callable[[Answers], tuple[PlannedServer, EngineAdapter]],
) -> None:
    server, adapter = make(answering(RAW))
    async with server:
        engine = HttpEngine(HttpEngineOptions(url=server.url), adapter)
        await engine.start()
        await engine.aclose()
    assert not server.requests


@pytest.mark.parametrize(
    "script",
    [
        ReplyScript(status=400),
        ReplyScript(ids=(40,), finish="length"),
        ReplyScript(ids=(40,), finish="length", logprobs=(-1.0,), tops=(((40, -1.0), (41, -1.0)),)),
    ],
    ids=["refused", "without alternatives", "a tie"],
)
async def test_where_the_alternatives_do_not_tell_the_settings_are_believed_and_the_log_says_so(
    script: ReplyScript, caplog: pytest.LogCaptureFixture
) -> None:
    server, adapter = sglang_generate(lambda _: script)
    async with server:
        engine = HttpEngine(HttpEngineOptions(url=server.url, check=partial(check_logprobs, said=RAW)), adapter)
        with caplog.at_level(logging.WARNING):
            await engine.start()
        assert engine.health().state is EngineState.READY
        await engine.aclose()
    assert "--engine-logprobs raw could not be checked" in caplog.text


async def test_an_engine_that_samples_nothing_is_asked_again_with_the_next_probe() -> None:
    server, adapter = sglang_generate(answering(RAW))
    async with server:
        transport = EngineTransport(server.url, connect_timeout_s=5.0)
        transport.open()
        server.pause()

        async def ask(method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
            return await transport.forward(method, target, headers, body)

        with pytest.raises(UpstreamTimeout, match="by which --engine-logprobs is checked"):
            await check_logprobs(adapter, ask, said=RAW, deadline_s=0)
        await transport.aclose()
