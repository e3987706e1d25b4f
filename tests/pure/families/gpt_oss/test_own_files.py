"""gpt-oss with the model's own tokenizer and chat template, which `scripts/test-families` fetches."""

import datetime
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stenograph.core.day import STRFTIME_NOW, Day
from stenograph.core.messages import Message
from stenograph.families.load import load_renderer
from stenograph.text.append_proof import Law
from stenograph.text.conversations import ODD_TEXT, WEATHER, said, user
from stenograph.text.renderer import Renderer

LoadReal = Callable[..., Any]
pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]  # its tokenizer has two hundred thousand pieces


def test_the_family_is_recognized_and_the_template_is_not_used(real: LoadReal) -> None:
    model = real("gpt-oss")
    assert model.files.chat_template is not None
    assert model.renderer.family.name == "gpt-oss"
    assert model.renderer.prove().holds


def test_the_tokenizer_is_the_one_that_is_held_to_openai_harmony(real: LoadReal, real_renderer: Renderer) -> None:
    theirs, ours = real("gpt-oss").renderer.tokenizer, real_renderer.tokenizer
    assert theirs.added_tokens.items() >= ours.added_tokens.items()
    pieces = range(min(theirs.added_tokens.values()))
    assert all(theirs.bytes_of(token_id) == ours.bytes_of(token_id) for token_id in pieces)
    for text in (ODD_TEXT, WEATHER.json, "don't  STOP\r\n\r\n12345 ﬁ é𝄞 \u200b~~~//\n", "x" * 300):
        assert theirs.encode(text) == ours.encode(text)


def test_the_stock_template_is_refused_because_it_ends_the_last_reply_otherwise(real: LoadReal) -> None:
    files = real("gpt-oss").files
    stock = load_renderer(files, "template", strftime_now=lambda _: "2031-01-02").renderer
    rewrite = stock.prove().rewrites[0]
    assert rewrite.law is Law.HISTORY
    assert rewrite.expected.endswith("<|return|>")


PLAIN: list[Sequence[Message]] = [
    [user("a")],
    [user(ODD_TEXT), said("b"), user("c"), said(""), user("d")],
]


@pytest.mark.parametrize("messages", PLAIN)
def test_what_people_and_the_model_say_is_written_as_the_stock_template_writes_it(
    real: LoadReal, messages: Sequence[Message]
) -> None:
    model = real("gpt-oss")
    expected = model.oracle(messages, (), stock=True)
    found = re.search(r"Current date: (\S+)", expected)
    assert found is not None
    day = Day(date=datetime.date.fromisoformat(found[1]))
    ids = model.renderer.render(messages, (), {STRFTIME_NOW: day})
    assert model.renderer.tokenizer.decode(ids) == expected
