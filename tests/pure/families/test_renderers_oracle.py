"""Families that the package `renderers` knows too: the same bridges and renders, or a difference that is named here.

Run by `scripts/test-renderers`, in an environment of its own; elsewhere, without the package, these tests are skipped.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import tokenizers
import transformers

from stenograph.core.messages import Message, Role
from stenograph.text.conversations import ExampleExchange, appended, exchanges
from stenograph.verify.template_reply import may_answer, sampled_as

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

LoadReal = Callable[..., Any]
Conversation = tuple[Message, ...]


def is_any(_: Conversation) -> bool:
    return True


def has_no_developer(messages: Conversation) -> bool:
    return all(message.role is not Role.DEVELOPER for message in messages)


def has_no_late_system(messages: Conversation) -> bool:
    return all(message.role is not Role.SYSTEM for message in messages[1:])


def has_one_call_a_reply(messages: Conversation) -> bool:
    return all(len(one.tool_calls) <= 1 for one in messages)


def has_no_reasoning_and_a_user_last(messages: Conversation) -> bool:
    return messages[-1].role is Role.USER and not any(message.reasoning for message in messages)


def has_its_replies_after_the_last_user(messages: Conversation) -> bool:
    roles = [message.role for message in messages]
    return Role.ASSISTANT not in roles[: len(roles) - roles[::-1].index(Role.USER)]


def reasons_in_each_reply(messages: Conversation) -> bool:
    return all(message.reasoning for message in messages if message.role is Role.ASSISTANT)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model, and how the other package has to be set to keep reasoning, as we do.

    `same_renders`: which conversations it writes alike; the others it writes as the stock template, which rewrites
    history, or in words of its own. `keeps_stops`: stop tokens that it leaves where we put what the template writes.
    `no_bridge`: conversations that it does not bridge. `num_renders`, `num_bridges`: at least so many are alike.
    """

    config: str
    arguments: dict[str, object] = field(default_factory=dict)
    same_renders: tuple[Callable[[Conversation], bool], ...] = (is_any,)
    with_tools: bool = True
    keeps_stops: bool = False
    no_bridge: Callable[[Conversation], bool] = lambda _: False
    same_bridges: Callable[[Conversation], bool] = is_any
    num_renders: int
    num_bridges: int


ALL = {"thinking_retention": "all"}
KEEP = {"clear_thinking": False}

PAIRS = {
    "llama3.2": Pair(
        config="Llama3RendererConfig",
        same_renders=(has_one_call_a_reply,),
        keeps_stops=True,
        num_renders=185,
        num_bridges=192,
    ),
    "qwen3": Pair(
        config="Qwen3RendererConfig",
        arguments=ALL,
        same_renders=(has_no_reasoning_and_a_user_last,),
        num_renders=52,
        num_bridges=144,
    ),
    "qwen3.5": Pair(
        config="Qwen35RendererConfig",
        arguments={**ALL, "enable_thinking": True},
        same_renders=(has_its_replies_after_the_last_user,),
        num_renders=42,
        num_bridges=38,
    ),
    "glm-5": Pair(
        config="GLM5RendererConfig",
        arguments=KEEP,
        same_renders=(reasons_in_each_reply,),
        keeps_stops=True,
        num_renders=51,
        num_bridges=144,
    ),
    "glm-5.1": Pair(
        config="GLM51RendererConfig",
        arguments=KEEP,
        same_renders=(reasons_in_each_reply,),
        keeps_stops=True,
        num_renders=51,
        num_bridges=144,
    ),
    # Its default system message is of another release, so only conversations that bring one are compared.
    "minimax-m2": Pair(
        config="MiniMaxM2RendererConfig",
        arguments=ALL,
        same_renders=(
            reasons_in_each_reply,
            has_its_replies_after_the_last_user,
            lambda messages: messages[0].role is Role.SYSTEM,
        ),
        num_renders=4,
        num_bridges=38,
    ),
    # It writes no tool list, puts no line break between results, and closes them before a user's message.
    "deepseek-v3": Pair(
        config="DeepSeekV3RendererConfig",
        same_renders=(has_no_late_system,),
        with_tools=False,
        same_bridges=lambda new: Role.TOOL not in [message.role for message in new] or len(new) == 1,
        num_renders=48,
        num_bridges=58,
    ),
    # Its tool list is in the words of the model's own encoder, ours in our own.
    "deepseek-v4": Pair(
        config="DeepSeekV4RendererConfig",
        arguments={"drop_thinking": False},
        with_tools=False,
        no_bridge=lambda new: [message.role for message in new].count(Role.TOOL) > 1,
        num_renders=48,
        num_bridges=64,
    ),
}


def theirs(model: Any, name: str) -> Any:
    """Their renderer with the same tokenizer."""
    package = pytest.importorskip("renderers", reason="scripts/test-renderers installs the package renderers")
    configs = importlib.import_module("renderers.configs")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(model.files.tokenizer_json),
        bos_token=model.files.bos_token,
        eos_token=model.files.eos_token,
        chat_template=model.files.chat_template,
    )
    return package.create_renderer(made, getattr(configs, PAIRS[name].config)(**PAIRS[name].arguments))


def wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as an OpenAI client sends them, arguments decoded."""
    return [
        {
            "role": message.role.value,
            "content": message.content or "",
            **({"reasoning_content": message.reasoning} if message.reasoning else {}),
            **({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}),
            **({"name": message.name} if message.name else {}),
            **({"tool_calls": [wire_call(one) for one in message.tool_calls]} if message.tool_calls else {}),
        }
        for message in messages
    ]


def wire_call(one: Any) -> dict[str, Any]:
    return {
        "id": one.id,
        "type": "function",
        "function": {"name": one.name, "arguments": json.loads(one.arguments)},
    }


def cases(model: Any) -> Iterator[tuple[ExampleExchange, Conversation]]:
    """What may follow each reply; no developer, for whom nobody but us has a frame, and none whom we refuse late."""
    family = model.renderer.family
    shows_late = Role.SYSTEM not in family.early_roles and family.name not in ("qwen3.5", "minimax-m2")
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            if has_no_developer(new) and (shows_late or has_no_late_system((exchange.reply, *new))):
                yield exchange, new


def tools_of(exchange: ExampleExchange) -> list[Any] | None:
    return [json.loads(tool.json) for tool in exchange.tools] or None


@pytest.mark.parametrize("name", PAIRS)
def test_conversations_are_rendered_alike_but_for_what_is_named(real: LoadReal, name: str) -> None:
    model, pair = real(name), PAIRS[name]
    other = theirs(model, name)
    num_same = 0
    for exchange, new in cases(model):
        messages = (*exchange.opening, exchange.reply, *new)
        if (exchange.tools and not pair.with_tools) or not all(alike(messages) for alike in pair.same_renders):
            continue
        expected = other.render_ids(wire(messages), tools=tools_of(exchange), add_generation_prompt=True)
        assert list(model.renderer.render(messages, exchange.tools, {})) == list(expected), messages
        num_same += 1
    assert num_same >= pair.num_renders


@pytest.mark.parametrize("name", PAIRS)
def test_turns_are_bridged_alike_but_for_what_is_named(real: LoadReal, name: str) -> None:
    model, pair = real(name), PAIRS[name]
    renderer, other = model.renderer, theirs(model, name)
    num_same = 0
    for exchange, new in cases(model):
        if not new or any(message.role is Role.ASSISTANT for message in new) or not pair.same_bridges(new):
            continue
        prompt = renderer.render(exchange.opening, exchange.tools, {})
        if not may_answer(renderer, prompt, exchange.reply):
            continue
        for sampled in sampled_as(renderer, exchange):
            line = prompt + sampled
            bridge = renderer.bridge(line[-64:], exchange.reply, new, exchange.tools, {})
            found = other.bridge_to_next_turn(list(prompt), list(sampled), wire(new), tools=tools_of(exchange))
            if pair.no_bridge(new):
                assert found is None
                continue
            assert found is not None, (exchange, new)
            ids = list(found.token_ids)
            ours = list(line[: len(line) - bridge.num_trimmed] + bridge.ids)
            if pair.keeps_stops and ids != ours:
                at = len(line) - 1
                assert ids[at] == sampled[-1]
                closing = len(renderer.tokenizer.encode(renderer.closing(exchange.tools))) if bridge.num_trimmed else 0
                assert ids[:at] + ids[at + 1 :] == ours[:at] + ours[at + closing :]
            else:
                assert ids == ours, (exchange, new)
            num_same += 1
    assert num_same >= pair.num_bridges
