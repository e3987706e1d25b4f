"""Chapters: a conversation that holds what another line generated goes on with its work."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import ParsedReply
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, token_ids
from stenograph.trajectory.chapters import LEAST_CHARS, earlier_line, has_frame_of
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus

LONG = "x" * LEAST_CHARS
TOOLS = (Tool(name="f", json='{"name":"f"}'),)


def said(text: str, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=text, tool_calls=calls)


def asked(text: str, role: Role = Role.USER) -> Message:
    return Message(role=role, content=text)


def line(*replies: Message, system: str = "s", tools: tuple[Tool, ...] = ()) -> list[Node]:
    """A line with these replies, each to a question of its own."""
    nodes: list[Node] = []
    for index, reply in enumerate(replies):
        before = (asked(system, Role.SYSTEM),) if index == 0 else ()
        turn = CommittedTurn(
            request_id=RequestId("r"),
            new_prompt_ids=token_ids([1]),
            sampled=SampledTurn(
                ids=token_ids(),
                logprobs=array("d"),
                sampling_logprobs=None,
                top_logprobs=None,
                weights=(),
                finish=Finish(reason=FinishReason.STOP),
                num_cached_tokens=0,
                times=None,
            ),
            status=TurnStatus.COMPLETED,
            messages=(*before, asked(str(index))),
            reply=ParsedReply(message=reply),
            context=PromptContext(tools=tools),
        )
        nodes.append(Node(id_=index, turn=turn, parent=nodes[-1] if nodes else None))
    return nodes


@pytest.mark.parametrize(
    ("replies", "found"),
    [
        ((said(LONG),), 0),
        ((said(f"  {LONG}\n"),), 0),
        ((said(LONG[:-1]),), None),
        ((said("", ToolCall(id="c1", name="g", arguments="{}")),), 1),
        ((said("", ToolCall(id="c2", name="f", arguments="{}")),), None),
        ((said("short"), said(LONG)), 0),
        ((), None),
    ],
)
def test_a_reply_is_known_by_its_calls_or_by_a_long_text(replies: tuple[Message, ...], found: int | None) -> None:
    call = ToolCall(id="c1", name="f", arguments="{}")
    lines = [line(said("short"), said(LONG)), line(said("another", call))]
    assert earlier_line([asked("q"), *replies, asked("more")], lines) == found


@given(st.lists(st.text(max_size=100), max_size=4), st.lists(st.lists(st.text(max_size=100), max_size=3), max_size=3))
def test_the_first_line_that_generated_a_long_text_is_found_and_no_other(
    texts: list[str], lines: list[list[str]]
) -> None:
    long = {text.strip() for text in texts if len(text.strip()) >= LEAST_CHARS}
    expected = next((i for i, own in enumerate(lines) if any(text.strip() in long for text in own)), None)
    made = [line(*map(said, own)) for own in lines]
    assert earlier_line([said(text) for text in texts], made) == expected


def test_a_users_text_is_nobodys_reply() -> None:
    assert earlier_line([asked(LONG)], [line(said(LONG))]) is None


def test_a_frame_is_the_system_text_and_the_rest_of_the_prompt() -> None:
    ended = line(said("a summary"), system="s", tools=TOOLS)
    new = [asked(" s ", Role.SYSTEM), asked("the summary, and go on")]
    assert has_frame_of(ended, new, PromptContext(tools=TOOLS))
    assert not has_frame_of(ended, new, PromptContext())
    assert not has_frame_of(ended, [asked("other", Role.SYSTEM)], PromptContext(tools=TOOLS))
    assert not has_frame_of([], new, PromptContext(tools=TOOLS))


def test_a_reply_is_known_by_the_request_that_its_client_names() -> None:
    lines = [line(said("a")), line(said("b"))]
    assert earlier_line([asked("q"), said("short")], lines, {"r"}) == 0
    assert earlier_line([asked("q"), said("short")], lines, {"another"}) is None


def test_the_frame_is_what_a_conversation_begins_with_not_what_its_turns_say() -> None:
    made = line(said("a"), system="s")
    late = [asked("s", Role.SYSTEM), asked("q"), asked("today is another day", Role.SYSTEM)]
    assert has_frame_of(made, late, PromptContext())
    assert not has_frame_of(made, [asked("t", Role.SYSTEM), asked("q")], PromptContext())
