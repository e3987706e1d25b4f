"""A conversation of a given length whose last message is new, and what opening its next turn takes.

Owns the conversation and what is timed of it: the bridge that the server appends, the parse of the reply before it,
and, beside them, a render of the whole conversation, which who keeps no ids has to do each turn. Checks that bridge and
render come to the same ids before anything is timed. Knows nothing of clocks.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.kit.conversation import Messages
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.renderer import Renderer

TAIL_TOKENS = 64
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
_TOOL = Tool(
    name="edit_file",
    json=json.dumps({"type": "function", "function": {"name": "edit_file", "parameters": _SCHEMA}}),
    parameters_json=json.dumps(_SCHEMA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWork:
    """The calls to time, by figure, and the tokens that they are about."""

    timed: Mapping[str, Callable[[], object]]
    num_prompt: int
    num_bridged: int
    num_reply: int


def conversation(
    renderer: Renderer, num_messages: int, message_bytes: int
) -> tuple[tuple[Message, ...], Sequence[Tool]]:
    """A user's task, then replies that call a tool and its results, the last of which is new; without tools, users.

    `num_messages` is even: a system message is the first, where the template has a frame for one.
    """
    shows_tools = bool(renderer.family.shows_tools)
    texts = list(Messages(num_bytes=message_bytes, num_messages=512).texts(num_messages))
    messages = [Message(role=Role.SYSTEM, content=texts[0]), Message(role=Role.USER, content=texts[1])]
    if Role.SYSTEM not in (renderer.family.roles or ()):
        del messages[0]
    for number in range(2, num_messages, 2):
        said, heard = texts[number][: message_bytes // 4].strip(), texts[number + 1]
        reasoning = f"Step {number}." if renderer.family.syntax.reasoning else None
        if shows_tools:
            call = ToolCall(
                id=f"call{number:05d}", name=_TOOL.name, arguments=json.dumps({"path": "a.py", "text": said})
            )
            messages.append(Message(role=Role.ASSISTANT, content=said, reasoning=reasoning, tool_calls=(call,)))
            messages.append(Message(role=Role.TOOL, content=heard, tool_call_id=call.id, name=_TOOL.name))
        else:
            messages.append(Message(role=Role.ASSISTANT, content=said, reasoning=reasoning))
            messages.append(Message(role=Role.USER, content=heard))
    return tuple(messages), (_TOOL,) if shows_tools else ()


def turn_work(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Tool]) -> TurnWork:
    """The work of the turn that the last message asks for. Raises ValueError: bridge and render differ."""
    *before, reply, new = messages
    prompt = renderer.render(before, tools, {})
    whole = renderer.render(messages, tools, {})
    unbroken = renderer.bridge((), reply, [new], tools, {}).ids
    sampled = whole[len(prompt) : len(whole) - len(unbroken) + 1]  # up to the token that ends it
    tail = (prompt + sampled)[-TAIL_TOKENS:]
    if whole[: len(prompt)] != prompt or _line(prompt + sampled, renderer, tail, reply, new, tools) != whole:
        raise ValueError("a bridged line has other ids than a render of the whole conversation")
    finish = Finish(reason=FinishReason.STOP, matched=sampled[-1])
    prompt_end = prompt[-TAIL_TOKENS:]

    def bridge() -> object:
        return renderer.bridge(tail, reply, [new], tools, {})

    def parse() -> object:
        return renderer.parse(sampled, finish, SamplingParams(), tools, prompt_end=renderer.prompt_end(prompt_end))

    return TurnWork(
        timed={"bridge_ms": bridge, "parse_ms": parse, "rerender_ms": lambda: renderer.render(messages, tools, {})},
        num_prompt=len(whole),
        num_bridged=len(whole) - len(prompt) - len(sampled),
        num_reply=len(sampled),
    )


def _line(
    ids: "array[int]", renderer: Renderer, tail: "array[int]", reply: Message, new: Message, tools: Sequence[Tool]
) -> "array[int]":
    bridge = renderer.bridge(tail, reply, [new], tools, {})
    return ids[: len(ids) - bridge.num_trimmed] + bridge.ids
