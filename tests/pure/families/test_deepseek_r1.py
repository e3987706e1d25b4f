"""DeepSeek R1 and its distills: the templates held to their own files and to transformers."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.messages import Message, Role
from stenograph.text.conversations import ODD_TEXT, WEATHER, appended, call, exchanges, said, user
from stenograph.verify.verify import verify

pytestmark = pytest.mark.families

LoadReal = Callable[..., Any]
OPENED = ["deepseek-r1", "deepseek-r1-distill-llama", "deepseek-r1-distill-qwen"]
NAMES = [*OPENED, "deepseek-r1-0528", "deepseek-r1-0528-distill-qwen3"]
WITH_CALLS = ["deepseek-r1", "deepseek-r1-0528"]


@pytest.mark.parametrize("name", NAMES)
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(real: LoadReal, name: str) -> None:
    renderer = real(name).renderer
    assert name.removesuffix("-qwen3").removesuffix("-qwen").removesuffix("-llama") == renderer.family.name
    assert renderer.family.shows_tools is (name in WITH_CALLS)
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > (150 if name in WITH_CALLS else 25)


@pytest.mark.parametrize("name", OPENED)
def test_the_stock_template_is_refused_because_it_drops_reasoning(real: LoadReal, name: str) -> None:
    assert not real(name, "template").renderer.prove().holds


@pytest.mark.parametrize("name", NAMES)
def test_a_first_prompt_is_that_of_the_stock_template(real: LoadReal, name: str) -> None:
    model = real(name)
    for messages in (
        [user("a")],
        [Message(role=Role.SYSTEM, content="Be brief."), user(ODD_TEXT), user("b")],
    ):
        stock = model.oracle(messages, (), stock=True)
        assert stock.endswith("<think>\n") is (name in OPENED)
        assert model.renderer.render(messages, (), {}) == model.renderer.tokenizer.encode(stock)


@pytest.mark.parametrize("name", NAMES)
def test_every_conversation_is_written_as_transformers_writes_it(real: LoadReal, name: str) -> None:
    model = real(name)
    for exchange in exchanges(has_tools=model.renderer.family.shows_tools):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            expected = model.oracle(messages, exchange.tools)
            assert model.renderer.render(messages, exchange.tools, {}) == model.renderer.tokenizer.encode(expected)


TEXT = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
).filter(lambda text: "｜" not in text and "think>" not in text)
"""Without what is a control token: that is text in a client's message, and to transformers a control token."""
REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
OTHERS = st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.TOOL]), content=TEXT)


@pytest.mark.parametrize("name", WITH_CALLS)
@given(messages=st.lists(REPLIES | OTHERS, min_size=1, max_size=5), has_tools=st.booleans())
def test_any_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, name: str, messages: list[Message], has_tools: bool
) -> None:
    model = real(name)
    tools = [WEATHER] if has_tools else []
    expected = model.oracle(messages, tools)
    assert model.renderer.render(messages, tools, {}) == model.renderer.tokenizer.encode(expected)
