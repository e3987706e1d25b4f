"""Replies that no model is asked for, but models give: none of them makes drift that only a bug may make."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.conversations import user
from stenograph.text.drift import find_drift
from stenograph.text.renderer import Renderer

from .conftest import MODELS

LoadReal = Callable[..., Any]
STOP = Finish(reason=FinishReason.STOP)
ABORT = Finish(reason=FinishReason.ABORT)
ARGUMENTS: tuple[dict[str, object], ...] = ({}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False})
LIGHT = ("qwen3", "deepseek-v4")
CASES = [
    pytest.param(name, kwargs, marks=() if name in LIGHT else pytest.mark.families)
    for name in MODELS
    if name != "gemma3"  # its tokenizer is refused
    for kwargs in ARGUMENTS
    if name.startswith("deepseek") or "thinking" not in kwargs
]


def stops_of(renderer: Renderer) -> Iterator[int]:
    """The tokens that may end a reply."""
    tokenizer, family = renderer.tokenizer, renderer.family
    closing = renderer.closing(())
    written = [closing[start:end] for start, end in tokenizer.find_added(closing)][:1]
    for token in dict.fromkeys((*(written or family.opening_stops), *family.opening_stops, *family.reply_stops)):
        yield tokenizer.added_tokens[token]


def odd_replies(renderer: Renderer) -> Iterator[tuple["array[int]", Finish]]:
    """Ids that were sampled, and how that ended."""
    marks = renderer.family.syntax.reasoning
    yield array("i"), ABORT
    yield renderer.tokenizer.encode_plain("Hel"), ABORT
    texts = ["", " ", "\n\n"]
    if marks is not None:
        texts += [
            f"{marks.open}{marks.close}",
            f"{marks.open}Hm.{marks.close}Hello",
            f"{marks.open}\nHm.\n{marks.close}\n\nHello",
            f"Hm.{marks.close}Hello",
            f"Hm.{marks.close}",
            marks.close,
            f"{marks.close}\n\n",
            marks.open,
            f"{marks.open}Hm.",
            f"Hello {marks.open}Hm.{marks.close} again",
            f"{marks.open}a{marks.close}{marks.open}b{marks.close}c",
        ]
    for text in texts:
        for stop in stops_of(renderer):
            yield renderer.tokenizer.encode(text) + array("i", [stop]), STOP


class Grown:
    """A line as sessions grow it."""

    def __init__(self, renderer: Renderer, kwargs: dict[str, object]) -> None:
        self.renderer = renderer
        self.kwargs = kwargs
        self.messages: list[Message] = [user("a")]
        self.ids = renderer.render(self.messages, (), kwargs)
        self.spans: list[tuple[int, int]] = []

    def answer(self, sampled: "array[int]", finish: Finish) -> None:
        end = self.renderer.prompt_end(self.ids)
        parsed = self.renderer.parse(sampled, finish, SamplingParams(), (), prompt_end=end)
        self.spans.append((len(self.ids), len(self.ids) + len(sampled)))
        self.ids = self.ids + sampled
        self.messages.append(parsed.message)

    def ask(self) -> None:
        new = [user("b")]
        bridge = self.renderer.bridge(self.ids[-64:], self.messages[-1], new, (), self.kwargs)
        kept = self.ids[: len(self.ids) - bridge.num_trimmed]
        self.spans[-1] = (self.spans[-1][0], len(kept))
        self.ids = kept + bridge.ids
        self.messages += new

    def check(self) -> None:
        report = find_drift(
            self.renderer,
            ids=self.ids,
            sampled_spans=self.spans,
            messages=self.messages,
            tools=(),
            kwargs=self.kwargs,
        )
        assert not report.is_forbidden, (self.messages, report)


@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=str)
def test_a_reply_that_is_empty_or_thinks_where_it_should_not_is_no_forbidden_drift(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    renderer: Renderer = real(name).renderer
    plain = renderer.tokenizer.encode_plain("x")
    num_refused = 0
    for sampled, finish in odd_replies(renderer):
        grown = Grown(renderer, kwargs)
        grown.answer(sampled, finish)
        grown.check()
        if finish is ABORT:
            continue
        try:
            grown.ask()
        except UnrenderableMessage:
            num_refused += 1
            continue
        grown.answer(plain + sampled[-1:], STOP)
        grown.check()
    assert num_refused == 0


@pytest.mark.families
def test_a_reply_of_gpt_oss_that_is_not_closed_is_forbidden_drift_all_the_same(real: LoadReal) -> None:
    renderer: Renderer = real("gpt-oss").renderer
    end = renderer.tokenizer.added_tokens["<|end|>"]
    grown = Grown(renderer, {})
    grown.answer(renderer.tokenizer.encode("<|channel|>final<|message|>Hel"), Finish(reason=FinishReason.LENGTH))
    grown.ask()
    grown.check()
    at = grown.spans[0][1]
    assert grown.ids.pop(at) == end
    with pytest.raises(AssertionError, match="control tokens where"):
        grown.check()
