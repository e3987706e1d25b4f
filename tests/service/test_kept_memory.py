"""What a turn keeps: nothing that the collector of cycles, which stops everything, looks through; and nothing twice."""

import enum
import gc
import weakref
from typing import Any

import pytest
from msgspec import Struct

from stenograph.trajectory.turn import Node, PromptContext

from .conftest import Live, user


def parts_of(one: object) -> list[object]:
    """All that an object refers to; the collector itself does not look into the structs that it does not track."""
    if isinstance(one, Struct):
        return [getattr(one, name) for name in one.__struct_fields__]
    return gc.get_referents(one)


def looked_through(node: Node) -> list[str]:
    """What of a line is tracked once the collector has met it: its types. The context is its session's, and counted
    with it."""
    gc.collect()  # it lets go of tuples by itself
    seen, found, left = {id(node)}, list[object](), list[object]([node])
    while left:
        one = left.pop()
        if gc.is_tracked(one):
            found.append(one)
        for part in parts_of(one):
            if id(part) not in seen and not isinstance(part, (type, enum.Enum, PromptContext)):
                seen.add(id(part))
                left.append(part)
    return [type(one).__name__ for one in found]


@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_a_turn_that_is_kept_is_nothing_to_look_through(live: Live, history: str) -> None:
    session_id = await live.open(history=history)
    messages: list[dict[str, Any]] = []
    for text in ("Hello", "More", "Bye"):
        live.says(f"{text}!")
        messages.append(user(text))
        answer = await live.chat(session_id, *messages, stop=["}"], logprobs=True, metadata={"a": "b"})
        assert answer.status == 200, answer.body
        messages.append(answer.json()["choices"][0]["message"])
    node = live.manager.sessions.get(session_id).latest
    assert node is not None
    assert node.depth == 3
    assert looked_through(node) == []


async def test_what_turns_have_alike_is_kept_once(live: Live) -> None:
    session_id = await live.open()
    messages: list[dict[str, Any]] = []
    for seed in (1, 1, 2):
        live.says("Yes.")
        messages.append(user("Well?"))
        answer = await live.chat(session_id, *messages, seed=seed, max_tokens=50)
        messages.append(answer.json()["choices"][0]["message"])
    first, second, third = (node.turn for node in live.manager.sessions.get(session_id).nodes)
    assert first.params is second.params
    assert first.tool_choice is second.tool_choice is third.tool_choice
    assert first.request_json is second.request_json
    assert [turn.params.seed for turn in (second, third)] == [1, 2]


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_that_is_deleted_is_given_back_without_the_collector(
    live: Live, history: str, stream: bool
) -> None:
    gc.collect()
    gc.disable()
    try:
        session_id = await live.open(history=history)
        messages: list[dict[str, Any]] = []
        for text in ("Hello", "More", "Bye"):
            live.says(f"{text}!")
            messages.append(user(text))
            answer = await live.chat(session_id, *messages, stream=stream)
            assert answer.status == 200, answer.body
            messages.append({"role": "assistant", "content": f"{text}!"})
        session = live.manager.sessions.get(session_id)
        nodes = list(session.nodes)
        assert [node.depth for node in nodes] == [1, 2, 3]
        kept = [weakref.ref(session), *(weakref.ref(node.turn.sampled.ids) for node in nodes)]
        live.engine.chunks.clear()
        live.engine.requests.clear()
        del session, nodes
        assert (await live.call("DELETE", f"/sessions/{session_id}")).status == 204
        assert (await live.call("GET", f"/sessions/{session_id}")).status == 404
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()
