"""MiniMax-M3, held to its own files and to what transformers makes of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.conversations import ODD_ARGUMENTS, WEATHER, appended, call, exchanges, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

LoadReal = Callable[..., Any]
NAME = "minimax-m3"
STOP = Finish(reason=FinishReason.STOP)
STOP_TOKEN = "[e~["
MODES: list[dict[str, object]] = [{}, *({"thinking_mode": mode} for mode in ("enabled", "disabled", "adaptive"))]
LATE = (Role.SYSTEM, Role.DEVELOPER)


@pytest.fixture(scope="module")
def renderer(real: LoadReal) -> Renderer:
    found: Renderer = real(NAME).renderer
    return found


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(
    renderer: Renderer, mode: dict[str, object]
) -> None:
    found = verify(renderer, mode)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert found.num_tolerated == 0
    assert len(found.findings) > 100


def test_the_family_is_recognized_from_its_files_and_its_stop_token_closes_a_turn(real: LoadReal) -> None:
    renderer = real(NAME).renderer
    assert renderer.family.name == NAME
    assert renderer.closing([WEATHER]) == f"{STOP_TOKEN}\n"
    assert real("minimax-m2").renderer.family.name == "minimax-m2"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_conversation_is_written_as_transformers_writes_it_or_refused_for_a_late_system_message(
    real: LoadReal, mode: dict[str, object]
) -> None:
    model = real(NAME)
    num_refused = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if any(message.role in LATE for message in messages[1:]):
                num_refused += 1
                with pytest.raises(UnrenderableMessage, match="first message can be a system message"):
                    model.renderer.render(messages, exchange.tools, mode)
                continue
            expected = model.oracle(messages, exchange.tools, **mode)
            assert model.renderer.render(messages, exchange.tools, mode) == model.renderer.tokenizer.encode(expected)
    assert num_refused > 0


def test_what_has_no_null_in_its_calls_and_no_late_system_message_is_written_as_by_the_stock_template(
    real: LoadReal,
) -> None:
    model = real(NAME)
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            has_null = any("null" in one.arguments for message in messages for one in message.tool_calls)
            if has_null or any(message.role in LATE for message in messages[1:]):
                continue
            stock = model.oracle(messages, exchange.tools, stock=True)
            assert model.renderer.render(messages, exchange.tools, {}) == model.renderer.tokenizer.encode(stock)
            num_compared += 1
    assert num_compared > 50


@pytest.mark.parametrize(
    ("mode", "sampled", "reasoning"),
    [
        ({}, "<mm:think>hm</mm:think>hello", "hm"),
        ({}, "</mm:think>hello", None),
        ({"thinking_mode": "enabled"}, "hm</mm:think>hello", "hm"),
        ({"thinking_mode": "enabled"}, "</mm:think>hello", None),
        ({"thinking_mode": "disabled"}, "hello", None),
    ],
)
def test_what_is_sampled_after_each_prompt_is_read_and_written_so_later(
    renderer: Renderer, mode: dict[str, object], sampled: str, reasoning: str | None
) -> None:
    prompt = renderer.render([user("a")], [], mode)
    ids = renderer.tokenizer.encode(sampled + STOP_TOKEN)
    parsed, parts = renderer.parse_tokens(ids, STOP, SamplingParams(), [], prompt_end=renderer.prompt_end(prompt))
    assert (parsed.message.reasoning, parsed.message.content, parsed.faults) == (reasoning, "hello", ())
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    line = prompt + ids + renderer.bridge(ids, parsed.message, [user("c")], [], mode).ids
    assert line == renderer.render([user("a"), parsed.message, user("c")], [], mode)


def test_a_call_with_nested_and_null_arguments_is_read_as_it_is_written(renderer: Renderer) -> None:
    city = "</city></invoke> <tool_call><item>[e~[<mm:think>"
    arguments = {"city": city, "days": 3, "options": {"a": [], "b": [[1, None], {"c": "x\n"}], "d": {"item": True}}}
    reply = said("So.", call(1, json.dumps(arguments)), call(2, ODD_ARGUMENTS), reasoning="hm")
    prompt = renderer.render([user("a")], [WEATHER], {})
    whole = renderer.render([user("a"), reply, user("b")], [WEATHER], {})
    end = len(whole) - len(renderer.bridge([9], reply, [user("b")], [WEATHER], {}).ids)
    parsed, _ = renderer.parse_tokens(
        whole[len(prompt) : end], STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
    )
    assert parsed.faults == ()
    read = [json.loads(one.arguments) for one in parsed.message.tool_calls]
    # Without a schema an empty list is an empty text, and an object of one key `item` is a list.
    assert read[0].pop("options") == {"a": "", "b": [[1, None], {"c": "x\n"}], "d": [True]}
    assert read == [{"city": city, "days": 3}, json.loads(ODD_ARGUMENTS)]


def test_a_first_message_of_a_developer_is_shown_and_a_system_message_is_shown_as_one(renderer: Renderer) -> None:
    for role in LATE:
        ids = renderer.render([Message(role=role, content="zq"), user("a")], [], {})
        assert "]~b]developer\nzq[e~[" in renderer.tokenizer.decode(ids)
