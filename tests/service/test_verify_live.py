"""`stenograph verify`'s session with an engine: held to what the engine was really sent, through the real adapters."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import PlannedServer
from standins.planned_server import ReplyScript as ServerScript
from standins.scripted_engine import Script, ScriptedEngine
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.core.clock import SystemClock
from stenograph.core.messages import Message, Tool
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.families.chatml import SMOLLM2
from stenograph.text.renderer import Bridge, Renderer
from stenograph.text.template.template import ChatTemplate
from stenograph.verify.live_session import MAX_ATTEMPTS, LiveSession, play
from stenograph.verify.report import live_lines

from .conftest import END

VOCAB = 320
CALL = '<tool_call>\n{"name": "look_up_zq", "arguments": {"city": "a"}}\n</tool_call>'
TURNS = ["first", "second", "second, retried", "tool result", "last"]

KINDS: dict[str, tuple[Callable[[], PlannedServer], Callable[[], EngineAdapter]]] = {
    "sglang": (SGLangServer, lambda: SGLangChat(AdapterOptions(model="tiny", vocab_size=VOCAB))),
    "sglang-generate": (SGLangServer, lambda: SGLangGenerate(AdapterOptions(model="tiny", vocab_size=VOCAB))),
    "lmdeploy": (
        LMDeployServer,
        lambda: LMDeploy(AdapterOptions(model="tiny", vocab_size=VOCAB, eos_token_ids=(END,))),
    ),
    "vllm": (
        lambda: VLLMServer(models=["tiny"]),
        lambda: VLLM(AdapterOptions(model="tiny", vocab_size=VOCAB, max_context_tokens=4096, eos_token_ids=(END,))),
    ),
}


async def played(renderer: Renderer, engine: Engine) -> LiveSession:
    return await play(
        renderer,
        engine,
        where="in a test",
        clock=SystemClock(),
        timeout_s=60.0,
        kwargs={},
        told=lambda done, total: None,
    )


def said(renderer: Renderer, text: str) -> tuple[int, ...]:
    return (*renderer.tokenizer.encode(text), END)


def scripted(renderer: Renderer, *texts: str) -> ScriptedEngine:
    engine = ScriptedEngine(vocab_size=VOCAB, max_context_tokens=4096)
    for text in texts:
        engine.plan(Script(ids=said(renderer, text), finish=Finish(reason=FinishReason.STOP, matched=END)))
    return engine


@pytest.mark.parametrize("kind", KINDS)
async def test_every_prompt_begins_with_the_ids_before_it_through_each_adapter(renderer: Renderer, kind: str) -> None:
    make_server, make_adapter = KINDS[kind]
    async with make_server() as server:
        texts = ["one", "two", "two again", "found", "bye"]
        server.plan(*(ServerScript(ids=said(renderer, text), text=text, matched=END) for text in texts))
        engine = HttpEngine(HttpEngineOptions(url=server.url), make_adapter())
        await engine.start()
        try:
            live = await played(renderer, engine)
        finally:
            await engine.aclose()
    assert live.holds, list(live_lines(live))
    assert [turn.name for turn in live.turns] == TURNS
    assert [turn.num_sampled for turn in live.turns] == [len(said(renderer, text)) for text in texts]
    sent = [request.json for request in server.requests]
    asked: list[list[int]] = [body["input_ids"] if "input_ids" in body else body["token_ids"] for body in sent]
    assert asked[1] == asked[2]
    before = [asked[0] + list(said(renderer, "one")), asked[2] + list(said(renderer, "two again"))]
    before.append(asked[3] + list(said(renderer, "found")))
    for line, prompt in zip(before, [asked[1], asked[3], asked[4]], strict=True):
        assert prompt[: len(line)] == line


async def test_a_model_that_calls_is_given_results(renderer: Renderer) -> None:
    texts = [CALL, "It is sunny.", "two", "two again", CALL, "found", "bye"]
    live = await played(renderer, scripted(renderer, *texts))
    assert live.holds, list(live_lines(live))
    result = "result of its call"
    assert [turn.name for turn in live.turns] == ["first", result, *TURNS[1:4], result, "last"]


async def test_a_reply_that_is_cut_is_asked_for_again_with_stop_strings(renderer: Renderer) -> None:
    def model(request: GenerateRequest) -> Script:
        if not request.params.stop:
            return Script(ids=said(renderer, "on and on")[:-1], finish=Finish(reason=FinishReason.LENGTH))
        return Script(ids=said(renderer, "the")[:-1], finish=Finish(reason=FinishReason.STOP, matched="e"))

    live = await played(renderer, ScriptedEngine(vocab_size=VOCAB, max_context_tokens=4096, model=model))
    assert live.holds, list(live_lines(live))
    assert [turn.ended_by for turn in live.turns] == ["length", "'e'"] * len(TURNS)


async def test_a_model_that_ends_no_reply_is_told_as_such(renderer: Renderer) -> None:
    script = Script(ids=(5, 6), finish=Finish(reason=FinishReason.LENGTH))
    engine = ScriptedEngine(vocab_size=VOCAB, max_context_tokens=4096, model=lambda _: script)
    live = await played(renderer, engine)
    assert not live.holds
    assert len(live.turns) == MAX_ATTEMPTS
    assert f"in {MAX_ATTEMPTS} attempts" in list(live_lines(live))[-1]


async def test_a_logprob_that_is_not_finite_breaks_the_session(renderer: Renderer) -> None:
    engine = ScriptedEngine(vocab_size=VOCAB, max_context_tokens=4096)
    engine.plan(Script(ids=(5, END), finish=Finish(reason=FinishReason.STOP, matched=END), logprobs=(-1.0, math.nan)))
    live = await played(renderer, engine)
    assert not live.holds
    assert live.broke.startswith("upstream_invalid: ")


class Forgetful(Renderer):
    """A renderer whose third bridge lacks its second id."""

    def __init__(self, whole: Renderer) -> None:
        super().__init__(whole.tokenizer, ChatTemplate(SMOLLM2.template or "", None, None), whole.family)
        self._num_bridges = 0

    def bridge(
        self,
        tail_ids: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> Bridge:
        self._num_bridges += 1
        bridge = super().bridge(tail_ids, reply, new, tools, kwargs)
        return Bridge(ids=bridge.ids[:1] + bridge.ids[2:]) if self._num_bridges == 2 else bridge


async def test_a_retry_with_another_prompt_is_told_with_its_ids(renderer: Renderer) -> None:
    live = await played(Forgetful(renderer), scripted(renderer, "one", "two", "two again", "found", "bye"))
    assert not live.holds
    (broken,) = [turn for turn in live.turns if turn.name == "second, retried"]
    assert broken.finding is not None
    assert "another prompt" in broken.finding.problem
    assert broken.finding.difference is not None
    lines = list(live_lines(live))
    assert any(line.startswith("->") for line in lines)
