"""A reply that its token limit cut off is closed as the template closes one, wherever that makes it whole."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stenograph.core.drift import DriftReport
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.conversations import WEATHER, ExampleExchange, call, result, said, user
from stenograph.text.drift import find_drift
from stenograph.text.reading import Inside
from stenograph.text.renderer import Renderer
from stenograph.verify.template_reply import may_answer, sampled_as

from .conftest import MODELS

LoadReal = Callable[..., Any]
LENGTH = Finish(reason=FinishReason.LENGTH)
ARGUMENTS: tuple[dict[str, object], ...] = ({}, {"enable_thinking": False}, {"thinking": True})
LIGHT = ("qwen3", "deepseek-v4")
CASES = [
    pytest.param(name, kwargs, marks=() if name in LIGHT else pytest.mark.families)
    for name in MODELS
    if name != "gemma3"  # its tokenizer is refused
    for kwargs in (ARGUMENTS if not name.startswith("deepseek") else ARGUMENTS[::2])
    if not (kwargs.get("thinking") and not name.startswith("deepseek"))
]
EVERY = pytest.mark.parametrize(("name", "kwargs"), CASES, ids=str)


def replies(
    renderer: Renderer, kwargs: dict[str, object]
) -> Iterator[tuple[ExampleExchange, "array[int]", "array[int]"]]:
    """Replies of every kind as a model would sample them, each with its prompt."""
    tools = (WEATHER,) if renderer.family.shows_tools else ()
    asked = call(1)
    for reply in (
        said("Two words."),
        said("Two words.", reasoning="Hm, so."),
        *((said("So:", asked), said("So:", asked, reasoning="Hm, so.")) if tools else ()),
    ):
        exchange = ExampleExchange(opening=(user("a"),), reply=reply, tools=tools)
        prompt = renderer.render(exchange.opening, tools, kwargs)
        if may_answer(renderer, prompt, reply):
            for sampled in sampled_as(renderer, exchange, kwargs):
                yield exchange, prompt, sampled


def closed(
    renderer: Renderer,
    exchange: ExampleExchange,
    prompt: "array[int]",
    sampled: "array[int]",
    kwargs: dict[str, object],
) -> DriftReport:
    """The drift of a line whose first reply was `sampled` up to a token limit and then went on."""
    parsed = renderer.parse(sampled, LENGTH, SamplingParams(), exchange.tools, prompt_end=renderer.prompt_end(prompt))
    reply, messages = parsed.message, list(exchange.opening)
    new = [result(one, "d") for one in reply.tool_calls] or [user("c")]
    bridge = renderer.bridge((prompt + sampled)[-64:], reply, new, exchange.tools, kwargs)
    kept = prompt + sampled
    if bridge.num_trimmed:
        del kept[-bridge.num_trimmed :]
    line = kept + bridge.ids
    assert line[: len(kept)] == kept
    messages += [reply, *new]
    return find_drift(
        renderer,
        ids=line,
        sampled_spans=[(len(prompt), len(kept))],
        messages=messages,
        tools=exchange.tools,
        kwargs=kwargs,
    )


@EVERY
def test_wherever_a_reply_was_cut_it_is_closed_without_forbidden_drift_or_said_to_be_open(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    renderer: Renderer = real(name).renderer
    num_closed = 0
    for exchange, prompt, sampled in replies(renderer, kwargs):
        for num in range(1, len(sampled)):
            cut = sampled[:num]
            parser = renderer.parser(SamplingParams(), exchange.tools, prompt_end=renderer.prompt_end(prompt))
            parser.feed(cut)
            inside = parser.ends_inside(LENGTH)
            text = renderer.tokenizer.decode(cut)
            if inside is None:
                report = closed(renderer, exchange, prompt, cut, kwargs)
                assert report.unrenderable is None, (text, report)
                assert not report.is_forbidden, (text, report)
                num_closed += 1
            elif inside is Inside.REASONING:
                assert exchange.reply.reasoning or "<think>" in text, text
            elif inside is Inside.CALL:
                assert exchange.reply.tool_calls, text
    assert num_closed >= 3
