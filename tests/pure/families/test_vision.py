"""Images by the models' own templates: one placeholder each, in a bridge as in a whole line, and collapsible."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stenograph.core.media import effective_ids, new_expansions, ranges
from stenograph.core.messages import Expansion, Message, PlacedMedia
from stenograph.core.types import EffectivePrompt, Prompt, PromptMedia, token_ids
from stenograph.text.conversations import WEATHER, call, result, said, user
from tests.store_laws import medium

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

LoadReal = Callable[..., Any]
FAMILY_OF = {
    "qwen2-vl": "qwen2.5-vl",
    "qwen2.5-vl": "qwen2.5-vl",
    "qwen3-vl": "qwen3-vl",
    "glm-4.5v": "glm-4.5v",
    "glm-4.6v": "glm-4.5v",
    "glm-4.6v-flash": "glm-4.5v",
}
NAMES = tuple(FAMILY_OF)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [
        "\n\n",
        "<|image_pad|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|video_pad|>",
        "<|im_end|>",
        "<|image|>",
        "<|user|>",
    ]
)
ITEM = medium(b"picture")


@st.composite
def seen(draw: st.DrawFn) -> Message:
    """A user's message with images between its texts."""
    text = draw(TEXT)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return replace(user(text), media=tuple(PlacedMedia(at=at, ref=ITEM.ref) for at in places))


@pytest.mark.parametrize("name", NAMES)
@given(messages=st.lists(seen(), min_size=1, max_size=3), lengths=st.lists(st.integers(1, 9), min_size=9, max_size=9))
def test_an_image_is_one_placeholder_that_collapses_to_itself(
    real: LoadReal, name: str, messages: Sequence[Message], lengths: Sequence[int]
) -> None:
    model = real(name)
    renderer = model.renderer
    assert renderer.family.name == FAMILY_OF[name]
    pad = renderer.tokenizer.added_tokens[renderer.family.image_placeholder]
    conversation = [part for message in messages for part in (message, said("so"))][:-1]
    ids = renderer.render(conversation, [], {})
    places = [at for at, id_ in enumerate(ids) if id_ == pad]
    assert len(places) == sum(len(message.media) for message in messages)
    expansions = [
        Expansion(position=at, ref=ITEM.ref, ids=token_ids([pad] * num))
        for at, num in zip(places, lengths, strict=False)
    ]
    media = tuple(PromptMedia(position=at, item=ITEM, recorded=None) for at in places)
    report = EffectivePrompt(ids=effective_ids(token_ids(ids), expansions), ranges=ranges(expansions))
    assert new_expansions(Prompt(new_ids=token_ids(ids), media=media), report) == tuple(expansions)


@pytest.mark.parametrize("name", NAMES)
@given(messages=st.lists(seen(), min_size=2, max_size=3))
def test_a_bridge_writes_the_images_that_the_whole_conversation_has(
    real: LoadReal, name: str, messages: Sequence[Message]
) -> None:
    renderer = real(name).renderer
    opening, reply, *new = [part for message in messages for part in (message, said("so"))][:-1]
    whole = renderer.render([opening, reply, *new], [], {})
    bridged = renderer.bridge([9], reply, new, [], {}).ids
    assert whole[len(whole) - len(bridged) :] == bridged


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_with_images_is_written_as_transformers_writes_it(real: LoadReal, name: str) -> None:
    model = real(name)
    shown = replace(user("look here"), media=(PlacedMedia(at=5, ref=ITEM.ref), PlacedMedia(at=9, ref=ITEM.ref)))
    messages = [shown, said("a cat"), shown]
    expected = model.oracle(messages, [], stock=True)
    assert expected.count(model.renderer.family.image_placeholder) == 4
    assert model.renderer.render(messages, [], {}) == model.renderer.tokenizer.encode(expected)


@pytest.mark.parametrize(
    ("name", "num_written"), [("qwen3-vl", 1), ("glm-4.5v", 0), ("glm-4.6v", 1), ("glm-4.6v-flash", 1)]
)
def test_a_screenshot_in_a_tool_s_result_is_written_where_the_template_shows_it(
    real: LoadReal, name: str, num_written: int
) -> None:
    """GLM-4.5V's shows a tool's text alone; the server refuses a place that is not written."""
    model = real(name)
    shown = replace(result(call(0), "seen"), media=(PlacedMedia(at=4, ref=ITEM.ref),))
    messages = [user("look"), said(None, call(0)), shown]
    ids = model.renderer.render(messages, [WEATHER], {})
    assert ids.count(model.renderer.tokenizer.added_tokens[model.renderer.family.image_placeholder]) == num_written
    if num_written:
        assert ids == model.renderer.tokenizer.encode(model.oracle(messages, [WEATHER]))
