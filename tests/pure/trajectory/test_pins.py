"""Pinned openings: what may differ, what stands in its place, and that nothing else is changed or invented."""

import re
from array import array
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stenograph.core.chat import ChatRequest, ParsedReply
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, token_ids
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.trajectory.canonical import PinPlace, PinRule
from stenograph.trajectory.pins import MAX_CHARS, PinnedOpenings
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus

DAY = PinRule(name="day", place=PinPlace.SYSTEM, pattern=re.compile(r"day \d+"))
CWD = PinRule(
    name="cwd", place=PinPlace.FIRST_USER, begins=re.compile("<env>"), pattern=re.compile(r"<cwd>[^<]*</cwd>")
)
TOOL_TEXT = PinRule(name="tools", place=PinPlace.TOOL_TEXT)
ALL = (DAY, CWD, TOOL_TEXT)


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, content=text)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def tool(description: str | None, *, name: str = "f", schema: dict[str, object] | None = None) -> Tool:
    function: dict[str, object] = {"name": name, "parameters": schema or {"type": "object"}}
    if description is not None:
        function["description"] = description
    return Tool(name=name, json=msgspec.json.encode({"type": "function", "function": function}).decode())


def request_of(*messages: Message, tools: Sequence[Tool] = ()) -> ChatRequest:
    return ChatRequest(messages=messages, tools=tuple(tools), spelling=OpenAISpelling())


def node_of(request: ChatRequest, id_: int = 0, parent: Node | None = None) -> Node:
    sampled = SampledTurn(
        ids=token_ids([1]),
        logprobs=array("d", [-1.0]),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=FinishReason.STOP),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )
    turn = CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids([1]),
        sampled=sampled,
        status=TurnStatus.COMPLETED,
        messages=request.messages,
        reply=ParsedReply(message=said("y")),
        context=PromptContext(tools=request.tools, template_kwargs=request.template_kwargs),
    )
    return Node(id_=id_, turn=turn, parent=parent)


def kept(*requests: ChatRequest, rules: Sequence[PinRule] = ALL) -> PinnedOpenings:
    openings = PinnedOpenings(rules, strips=True)
    for index, request in enumerate(requests):
        openings.keep(node_of(request, index), "")
    return openings


FIRST = request_of(
    system("Be brief. It is day 1."), user("<env><cwd>/a</cwd></env>"), user("<cwd>/a</cwd>"), tools=[tool("old")]
)
REPLAY = (said("y"), user("on"))


def test_the_stored_spelling_stands_and_each_difference_is_recorded() -> None:
    request = request_of(
        system("Be brief. It is day 22."),
        user("<env><cwd>/b</cwd></env>"),
        user("<cwd>/a</cwd>"),
        *REPLAY,
        tools=[tool("new")],
    )
    pinned = kept(FIRST).pinned(request, "")
    assert pinned.messages == (*FIRST.messages, *REPLAY)
    assert pinned.tools == FIRST.tools
    assert [(one.rule, one.where, one.before, one.after, one.message) for one in pinned.rewrites] == [
        ("day", "/messages/0/content", "day 22", "day 1", None),
        ("cwd", "/messages/1/content", "<cwd>/b</cwd>", "<cwd>/a</cwd>", None),
        ("tools", "/tools/0/function/description", "new", "old", None),
    ]
    assert pinned.text_print is None


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(request_of(system("Be quick. It is day 2."), *FIRST.messages[1:], tools=FIRST.tools), id="a word"),
        pytest.param(
            request_of(*FIRST.messages[:2], user("<cwd>/b</cwd>"), tools=FIRST.tools), id="the second user's message"
        ),
        pytest.param(
            request_of(FIRST.messages[0], user(" env<cwd>/b</cwd>"), *FIRST.messages[2:], tools=FIRST.tools),
            id="another beginning",
        ),
        pytest.param(request_of(*FIRST.messages, tools=[tool("old", name="g")]), id="a tool's name"),
        pytest.param(
            request_of(*FIRST.messages, tools=[tool("old", schema={"type": "object", "description": "x"})]),
            id="a description within a schema",
        ),
        pytest.param(
            request_of(system("Be brief. It is day 1. day 2"), *FIRST.messages[1:], tools=FIRST.tools),
            id="one match more",
        ),
        pytest.param(request_of(*FIRST.messages[:2], tools=FIRST.tools), id="a message less"),
        pytest.param(structs.replace(FIRST, template_kwargs={"k": 1}), id="template arguments"),
    ],
)
def test_an_opening_that_differs_in_more_is_left_as_it_is(request_: ChatRequest) -> None:
    assert kept(FIRST).pinned(request_, "") is request_


def test_a_first_turn_the_stored_spelling_and_another_agent_are_left_as_they_are() -> None:
    other = structs.replace(FIRST, messages=(system("Be brief. It is day 2."), *FIRST.messages[1:]))
    assert kept().pinned(FIRST, "") is FIRST
    assert kept(FIRST).pinned(FIRST, "") is FIRST
    assert kept(FIRST, other).pinned(other, "") is other
    assert kept(FIRST).pinned(other, "another") is other
    assert kept(FIRST).pinned(other, "") is not other


def test_the_opening_of_a_turn_that_is_gone_stands_for_nothing() -> None:
    other = structs.replace(FIRST, messages=(system("Be brief. It is day 2."), *FIRST.messages[1:]))
    openings, node = PinnedOpenings(ALL, strips=True), node_of(FIRST)
    openings.keep(node, "")
    openings.keep(node_of(other, 1, parent=node), "")
    assert openings.pinned(other, "").messages == FIRST.messages, "only the first turn of a line has an opening"
    openings.forget(node)
    assert openings.pinned(other, "") is other
    openings.forget(node)


def test_a_tool_without_a_description_may_get_one() -> None:
    bare, told = (structs.replace(FIRST, tools=(tool(text),)) for text in (None, "new"))
    (one,) = kept(bare).pinned(told, "").rewrites
    assert (one.before, one.after) == ("new", "")


def test_a_text_that_is_too_long_is_not_looked_into() -> None:
    long, other = (request_of(system(f"day {day}" + "x" * MAX_CHARS)) for day in (1, 2))
    assert kept(long).pinned(other, "") is other


TEXT = st.lists(st.sampled_from(["day 1", "day 2", "day", " ", "<env>", "<cwd>a</cwd>", "<cwd>b</cwd>", "é"])).map(
    "".join
)
OPENING = st.lists(
    st.builds(lambda make, text: make(text), st.sampled_from([system, user]), TEXT), min_size=1, max_size=4
)


@given(first=OPENING, second=OPENING, first_tool=st.sampled_from("ab"), second_tool=st.sampled_from("ab"))
def test_what_is_pinned_is_the_stored_opening_and_nothing_is_invented(
    first: list[Message], second: list[Message], first_tool: str, second_tool: str
) -> None:
    stored = request_of(*first, tools=[tool(first_tool)])
    request = request_of(*second, *REPLAY, tools=[tool(second_tool)])
    pinned = kept(stored).pinned(request, "")
    if pinned is request:
        return
    assert pinned.tools == stored.tools
    assert [(one.content or "").strip() for one in pinned.messages[: len(first)]] == [
        (one.content or "").strip() for one in stored.messages
    ]
    assert pinned.messages[len(first) :] == REPLAY
    undone = [one.content or "" for one in pinned.messages[: len(first)]]
    for one in pinned.rewrites:
        assert one.before != one.after
        text = "".join([*undone, *(tool.json for tool in pinned.tools)])
        assert one.after in text


@given(days=st.lists(st.integers(0, 99), min_size=2, max_size=6), swap=st.booleans())
def test_any_days_are_one_opening_and_the_first_one_stands(days: list[int], swap: bool) -> None:
    texts = [f"day {day}" + (f", day {99 - day}" if swap else "") for day in days]
    openings = kept(request_of(system(texts[0]), user("a")))
    for text in texts[1:]:
        pinned = openings.pinned(request_of(system(text), user("a")), "")
        assert pinned.messages == (system(texts[0]), user("a"))
        assert bool(pinned.rewrites) is (text != texts[0])
