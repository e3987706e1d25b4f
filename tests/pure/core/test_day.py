"""A template that asks for the date gets the one that its turn gives it, whichever engine renders."""

import datetime

import pytest
import tokenizers

from stenograph.core.day import STRFTIME_NOW, Day
from stenograph.families import TEMPLATE
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.conversations import said, user
from stenograph.text.renderer import Renderer
from stenograph.text.template.choice import JinjaTemplate
from stenograph.text.template.template import ChatTemplate

SOURCE = (
    "{{ strftime_now('%d %b %Y') }}{% if tone %}{{ tone }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, LATER = Day(date=datetime.date(2026, 1, 31)), Day(date=datetime.date(2026, 2, 1))


@pytest.fixture(params=[ChatTemplate, JinjaTemplate], ids=["minijinja", "jinja2"])
def renderer(request: pytest.FixtureRequest, reference: tokenizers.Tokenizer) -> Renderer:
    template: ChatTemplate | JinjaTemplate = request.param(SOURCE, None, None, strftime_now=START)
    return Renderer(Tokenizer(reference.to_str()), template, TEMPLATE)


def test_a_turn_s_date_stands_before_the_start_s(renderer: Renderer) -> None:
    texts = [
        renderer.tokenizer.decode(renderer.render([user("a")], [], kwargs)) for kwargs in ({}, {STRFTIME_NOW: LATER})
    ]
    assert [text.partition("<|")[0] for text in texts] == ["31 Jan 2026", "01 Feb 2026"]
    assert renderer.writer.reads_date


def test_a_bridge_is_the_same_on_any_day(renderer: Renderer) -> None:
    ids = [renderer.bridge([1], said("b"), [user("c")], [], {STRFTIME_NOW: day}).ids for day in (START, LATER)]
    assert ids[0] == ids[1]


def test_a_new_day_needs_no_new_proof(renderer: Renderer) -> None:
    assert renderer.is_known({STRFTIME_NOW: LATER})
    assert not renderer.is_known({STRFTIME_NOW: LATER, "tone": "a"})
    renderer.render([user("a")], [], {STRFTIME_NOW: START, "tone": "a"})
    assert renderer.is_known({STRFTIME_NOW: LATER, "tone": "a"})


def test_a_day_has_no_time_of_day() -> None:
    assert LATER("%H:%M") == "00:00"
    noon = datetime.datetime(2026, 2, 1, 12).astimezone()
    assert Day.of(noon.timestamp()) == Day.of(noon.timestamp() + 3600) == LATER
