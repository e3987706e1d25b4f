"""A long session as the server grows one, without an engine: every turn bridged after the ids of the one before.

Owns its script. Knows nothing of the checks.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.messages import Message, Tool
from stenograph.text.conversations import ODD_ARGUMENTS, ODD_TEXT, WEATHER, ExampleExchange, call, result, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.template_reply import TAIL_TOKENS, may_answer, sampled_as

NUM_TURNS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownSession:
    """The end of a session: the prompt of an unsampled turn. `ids` are the line's.

    `sampled_spans`, half-open over them, are the replies' own. `retried` is the first prompt to differ when its turn
    was asked for again, and the different one.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    ids: "array[int]"
    sampled_spans: tuple[tuple[int, int], ...]
    num_turns: int
    retried: tuple[Sequence[int], Sequence[int]] | None


def grow(renderer: Renderer, kwargs: Mapping[str, object]) -> GrownSession:
    """Grow one of NUM_TURNS turns; each turn after the first is asked for twice. Raises UnrenderableMessage.

    The template, or else the family, has to end a reply with a control token.
    """
    tools = (WEATHER,) if renderer.family.shows_tools else ()
    messages: tuple[Message, ...] = (user("First zq."),)
    ids = renderer.render(messages, tools, kwargs)
    spans: list[tuple[int, int]] = []
    retried: tuple[Sequence[int], Sequence[int]] | None = None
    for number in range(NUM_TURNS):
        reply = next(one for one in _replies(number, has_tools=bool(tools)) if may_answer(renderer, ids, one))
        exchange = ExampleExchange(opening=messages, reply=reply, tools=tools)
        node = ids + next(sampled_as(renderer, exchange, kwargs))
        new = _answers(reply, number)
        bridge, again = (renderer.bridge(node[-TAIL_TOKENS:], reply, new, tools, kwargs) for _ in range(2))
        spans.append((len(ids), len(node) - bridge.num_trimmed))
        ids = node[: len(node) - bridge.num_trimmed] + bridge.ids
        other = node[: len(node) - again.num_trimmed] + again.ids
        if other != ids:
            retried = retried or (ids, other)
        messages = (*messages, reply, *new)
    return GrownSession(
        messages=messages,
        tools=tools,
        ids=ids,
        sampled_spans=tuple(spans),
        num_turns=NUM_TURNS,
        retried=retried,
    )


def _replies(number: int, *, has_tools: bool) -> Iterator[Message]:
    """Possible replies of a model in this turn: with a thought and without, and now and then with calls."""
    calls = (call(2 * number), call(2 * number + 1, ODD_ARGUMENTS))[: number % 3] if has_tools else ()
    text = f"Reply {number} zq."
    thought = said(text, *calls, reasoning=f"Thought {number} zq.")
    plain = said(text, *calls)
    yield from (thought, plain) if number % 2 else (plain, thought)


def _answers(reply: Message, number: int) -> tuple[Message, ...]:
    """Messages after it: the results of its calls, or a user's message."""
    if reply.tool_calls:
        return tuple(result(one, f"Result {one.id}.") for one in reply.tool_calls)
    return (user(f"More {number} zq. {ODD_TEXT if number % 4 == 0 else ''}"),)
