"""GLM-4.5 to GLM-5.2, held to their own files and to what transformers makes of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families.load import load_renderer
from stenograph.text.append_proof import Law
from stenograph.text.conversations import WEATHER, appended, call, exchanges, result, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

LoadReal = Callable[..., Any]
FAMILY_OF = {
    "glm-4.5": "glm-4.5",
    "glm-4.5v": "glm-4.5v",
    "glm-4.6v": "glm-4.5v",
    "glm-4.6v-flash": "glm-4.5v",
    "glm-4.7-flash": "glm-4.7",
    "glm-5": "glm-4.7",
    "glm-5.1": "glm-5.1",
    "glm-5.2": "glm-5.2",
}
ALL = pytest.mark.parametrize("name", FAMILY_OF)
STOP = Finish(reason=FinishReason.STOP)
NOT_THINKING = {"enable_thinking": False}
STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")


@ALL
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=str)
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    found = verify(real(name).renderer, kwargs)
    assert found.holds, found.proof.why_not or found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > 200


@ALL
def test_the_family_is_recognized_from_its_files(real: LoadReal, name: str) -> None:
    assert real(name).renderer.family.name == FAMILY_OF[name]


def test_files_that_do_not_end_a_turn_at_the_next_messages_opener_are_told_in_the_log(real: LoadReal) -> None:
    model = real("glm-4.7-flash")
    tokenizer = model.renderer.tokenizer
    stops = tuple(tokenizer.added_tokens[token] for token in STOPS)
    for num_unsaid, told in ((2, ["<|user|> or <|observation|>"]), (1, ["<|user|>"]), (0, [])):
        files = replace(model.files, eos_token_ids=stops[num_unsaid:])
        notes = load_renderer(files, tokenizer=tokenizer).notes
        ends = [note.partition(" ends a turn") for note in notes]
        assert [before.rpartition("do not say that ")[2] for before, found, _ in ends if found] == told


@ALL
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING, {"reasoning_effort": "high"}], ids=str)
def test_every_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    model = real(name)
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            expected = model.oracle(messages, exchange.tools, **kwargs)
            ids = model.renderer.render(messages, exchange.tools, kwargs)
            assert ids == model.renderer.tokenizer.encode(expected)


@ALL
def test_without_reasoning_in_it_a_conversation_is_written_as_by_the_stock_template(real: LoadReal, name: str) -> None:
    model = real(name)
    num_compared = 0
    for kwargs in ({}, NOT_THINKING) if FAMILY_OF[name] in ("glm-4.5", "glm-4.5v", "glm-5.2") else (NOT_THINKING,):
        for exchange in exchanges(has_tools=True):
            for new in appended(exchange.reply):
                messages = (*exchange.opening, exchange.reply, *new)
                is_empty = not exchange.reply.content and not exchange.reply.tool_calls
                if is_empty or any(message.reasoning for message in messages):
                    continue
                stock = model.oracle(messages, exchange.tools, stock=True, **kwargs)
                ids = model.renderer.render(messages, exchange.tools, kwargs)
                assert ids == model.renderer.tokenizer.encode(stock)
                num_compared += 1
    assert num_compared > 30


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
OTHERS = st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.TOOL]), content=TEXT)


@pytest.mark.parametrize("name", ["glm-4.5", "glm-4.5v", "glm-4.7-flash", "glm-5.1"])
@given(messages=st.lists(REPLIES | OTHERS, min_size=1, max_size=5), has_tools=st.booleans(), thinks=st.booleans())
def test_any_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, name: str, messages: list[Message], has_tools: bool, thinks: bool
) -> None:
    model = real(name)
    tools, kwargs = [WEATHER] if has_tools else [], {} if thinks else NOT_THINKING
    expected = model.oracle(messages, tools, **kwargs)
    assert model.renderer.render(messages, tools, kwargs) == model.renderer.tokenizer.encode(expected)


@ALL
def test_the_stock_template_is_refused_because_it_drops_reasoning(real: LoadReal, name: str) -> None:
    first = real(name, "template").renderer.prove().rewrites[0]
    assert (first.law, first.why) == (Law.HISTORY, "it drops the reasoning of an earlier reply")


@pytest.mark.parametrize("name", ["glm-4.7-flash", "glm-5", "glm-5.1", "glm-5.2"])
def test_a_request_may_not_have_earlier_reasoning_dropped(real: LoadReal, name: str) -> None:
    renderer: Renderer = real(name).renderer
    renderer.render([user("a")], [], {"clear_thinking": False})
    with pytest.raises(UnrenderableMessage, match="clear_thinking"):
        renderer.render([user("a")], [], {"clear_thinking": True})


@ALL
@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_token_is_the_next_messages_opener_or_is_left_out_for_it(real: LoadReal, name: str, stop: str) -> None:
    renderer: Renderer = real(name).renderer
    stop_id = renderer.tokenizer.added_tokens[stop]
    asked = call(1)
    late = Message(role=Role.SYSTEM, content="late")
    for reply, new, opener in (
        (said("b"), [user("c")], "<|user|>"),
        (said("b", asked), [result(asked, "d"), user("e")], "<|observation|>"),
        (said("b"), [late], "<|system|>"),
        (said("b"), [], "<|assistant|>"),
    ):
        bridge = renderer.bridge([9, stop_id], reply, new, [WEATHER], {})
        plain = renderer.bridge([9], reply, new, [WEATHER], {})
        assert plain.num_trimmed == 0
        assert plain.ids[0] == renderer.tokenizer.added_tokens[opener]
        expected = (plain.ids[1:], 0) if stop == opener else (plain.ids, 1)
        assert (bridge.ids, bridge.num_trimmed) == expected


@pytest.mark.parametrize("name", ["glm-4.7-flash", "glm-5.1", "glm-5.2"])
def test_reasoning_that_the_model_closes_at_once_is_written_so_later(real: LoadReal, name: str) -> None:
    renderer: Renderer = real(name).renderer
    prompt = renderer.render([user("a")], [], {})
    sampled = renderer.tokenizer.encode("</think>hello<|user|>")
    parsed, _ = renderer.parse_tokens(sampled, STOP, SamplingParams(), [], prompt_end=renderer.prompt_end(prompt))
    assert (parsed.message.reasoning, parsed.message.content, parsed.faults) == (None, "hello", ())
    line = prompt + sampled + renderer.bridge(sampled, parsed.message, [user("c")], [], {}).ids
    assert line == renderer.render([user("a"), parsed.message, user("c")], [], {})


def test_a_prompt_of_the_text_models_without_a_line_break_is_append_only_too(real: LoadReal) -> None:
    """GLM-4.5V's template with the prompt of GLM-4.5, whose own files no package has."""
    files = real("glm-4.5v").files
    prompt = "<|assistant|>\n{{'<think></think>\\n' if (enable_thinking is defined and not enable_thinking) else ''}}"
    assert files.chat_template.count(prompt) == 1
    text = "<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}"
    files = replace(files, chat_template=files.chat_template.replace(prompt, text))
    renderer = load_renderer(files, tokenizer=real("glm-4.5v").renderer.tokenizer).renderer
    assert renderer.family.name == "glm-4.5v"
    for kwargs in ({}, NOT_THINKING):
        found = verify(renderer, kwargs)
        assert found.holds, found.proof.why_not or found.failures[0]


@pytest.mark.parametrize("name", ["glm-4.5v", "glm-4.7-flash"])
def test_markers_in_an_argument_are_its_text(real: LoadReal, name: str) -> None:
    renderer: Renderer = real(name).renderer
    city = "<tool_call>f<arg_key>a</arg_key></arg_value>\n<arg_value> </tool_call><|user|>"
    arguments = {"city": city, "days": 3, "options": {"a": f"</arg_value><arg_key>{city}"}}
    reply = said("So.", call(1, json.dumps(arguments)), reasoning="hm")
    opening = [user("a")]
    prompt = renderer.render(opening, [WEATHER], {})
    whole = renderer.render([*opening, reply, user("b")], [WEATHER], {})
    end = len(whole) - len(renderer.bridge([9], reply, [user("b")], [WEATHER], {}).ids)
    parsed, _ = renderer.parse_tokens(
        whole[len(prompt) : end], STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
    )
    assert parsed.faults == ()
    assert [json.loads(one.arguments) for one in parsed.message.tool_calls] == [arguments]
