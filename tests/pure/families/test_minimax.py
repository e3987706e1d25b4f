"""MiniMax-M2, held to its own files and to what transformers makes of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.append_proof import Law
from stenograph.text.conversations import WEATHER, ExampleExchange, appended, call, exchanges, result, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

LoadReal = Callable[..., Any]
NAME = "minimax-m2"
STOP = Finish(reason=FinishReason.STOP)
STOP_TOKEN = "[e~["


@pytest.fixture(scope="module")
def renderer(real: LoadReal) -> Renderer:
    found: Renderer = real(NAME).renderer
    return found


def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(renderer: Renderer) -> None:
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert found.num_tolerated == 0
    assert len(found.findings) > 100


def test_the_family_is_recognized_from_its_files_and_its_stop_token_closes_a_turn(renderer: Renderer) -> None:
    assert renderer.family.name == NAME
    assert renderer.closing([WEATHER]) == f"{STOP_TOKEN}\n"


def is_refused(exchange: ExampleExchange, new: tuple[Message, ...]) -> bool:
    late = (*exchange.opening[1:], *new)
    return any(message.role in (Role.SYSTEM, Role.DEVELOPER) for message in late)


def test_every_conversation_is_written_as_transformers_writes_it_or_refused_for_a_late_system_message(
    real: LoadReal,
) -> None:
    model = real(NAME)
    num_refused = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if is_refused(exchange, new):
                num_refused += 1
                with pytest.raises(UnrenderableMessage, match="first message can be a system message"):
                    model.renderer.render(messages, exchange.tools, {})
                continue
            expected = model.oracle(messages, exchange.tools)
            ids = model.renderer.render(messages, exchange.tools, {})
            assert ids == model.renderer.tokenizer.encode(expected)
    assert num_refused > 0


def test_with_reasoning_in_every_reply_a_turn_is_written_as_by_the_stock_template(real: LoadReal) -> None:
    """As the stock template writes replies after the last user message: a user, then calls and results."""
    model = real(NAME)
    first, second = call(1), call(2)
    messages = [
        Message(role=Role.SYSTEM, content="Be brief."),
        user("a"),
        said("Looking.", first, second, reasoning="hm\n\nso"),
        result(first, "b"),
        result(second, ""),
        said(None, call(3), reasoning="hm"),
        result(call(3), "c"),
        said("Done.", reasoning="so"),
    ]
    for end in range(2, len(messages) + 1):
        stock = model.oracle(messages[:end], [WEATHER], stock=True)
        ids = model.renderer.render(messages[:end], [WEATHER], {})
        assert ids == model.renderer.tokenizer.encode(stock)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
USERS = st.builds(user, TEXT)


@given(messages=st.lists(REPLIES | USERS, min_size=1, max_size=5), has_tools=st.booleans(), has_system=st.booleans())
def test_any_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, messages: list[Message], has_tools: bool, has_system: bool
) -> None:
    model = real(NAME)
    tools = [WEATHER] if has_tools else []
    first = [Message(role=Role.SYSTEM, content="zq")] if has_system else []
    expected = model.oracle([*first, *messages], tools)
    assert model.renderer.render([*first, *messages], tools, {}) == model.renderer.tokenizer.encode(expected)


def test_the_stock_template_is_refused_because_it_drops_reasoning(real: LoadReal) -> None:
    first = real(NAME, "template").renderer.prove().rewrites[0]
    assert (first.law, first.why) == (Law.HISTORY, "it drops the reasoning of an earlier reply")


def test_reasoning_that_the_model_closes_at_once_is_written_so_later(renderer: Renderer) -> None:
    prompt = renderer.render([user("a")], [], {})
    sampled = renderer.tokenizer.encode(f"\n</think>\n\nhello{STOP_TOKEN}")
    parsed, _ = renderer.parse_tokens(sampled, STOP, SamplingParams(), [], prompt_end=renderer.prompt_end(prompt))
    assert (parsed.message.reasoning, parsed.message.content, parsed.faults) == (None, "hello", ())
    line = prompt + sampled + renderer.bridge(sampled, parsed.message, [user("c")], [], {}).ids
    whole = renderer.render([user("a"), parsed.message, user("c")], [], {})
    assert renderer.tokenizer.decode(line) == renderer.tokenizer.decode(whole)


def test_markers_in_an_argument_are_its_text(renderer: Renderer) -> None:
    city = '<minimax:tool_call></parameter></minimax:tool_call> </invoke><invoke name="f">[e~['
    arguments = {"city": city, "days": 3, "options": {"a": f"</parameter></invoke></minimax:tool_call>{city}"}}
    reply = said("So.", call(1, json.dumps(arguments)), call(2), reasoning="hm")
    prompt = renderer.render([user("a")], [WEATHER], {})
    whole = renderer.render([user("a"), reply, user("b")], [WEATHER], {})
    end = len(whole) - len(renderer.bridge([9], reply, [user("b")], [WEATHER], {}).ids)
    parsed, _ = renderer.parse_tokens(
        whole[len(prompt) : end], STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
    )
    assert parsed.faults == ()
    assert [json.loads(one.arguments) for one in parsed.message.tool_calls] == [
        arguments,
        json.loads(call(2).arguments),
    ]
