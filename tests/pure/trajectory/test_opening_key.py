"""The key of an opening: the same for the same opening, another for any other."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stenograph.core.messages import Message, Role, Tool
from stenograph.trajectory.opening_key import opening_key
from stenograph.trajectory.turn import PromptContext

SMALL = st.text(alphabet="a1:,\0 é", max_size=3)
"""Texts that are alike often, with the characters that lengths are written with."""


def message_of(role: Role, content: str | None, call_id: str) -> Message:
    return Message(role=role, content=content, tool_call_id=call_id if role is Role.TOOL else None)


BEFORE_REPLY = st.builds(
    message_of, st.sampled_from([Role.SYSTEM, Role.DEVELOPER, Role.USER, Role.TOOL]), st.none() | SMALL, SMALL
)
MESSAGES = st.lists(BEFORE_REPLY | st.just(Message(role=Role.ASSISTANT, content="a")), max_size=4)
TOOLS = st.lists(SMALL.map(lambda name: Tool(name=name, json=f'{{"n":"{name}"}}', parameters_json="{}")), max_size=2)
CONTEXTS = st.builds(
    PromptContext,
    tools=TOOLS.map(tuple),
    template_kwargs=st.dictionaries(SMALL, st.sampled_from([1, True, "1", None]), max_size=2),
)
OPENINGS = st.tuples(MESSAGES, CONTEXTS, SMALL)
Opening = tuple[list[Message], PromptContext, str]


def key(opening: Opening, *, strips: bool) -> bytes:
    messages, context, agent_id = opening
    return opening_key(messages, context, agent_id, strips=strips)


def plain(opening: Opening, *, strips: bool) -> object:
    """The same as a value, which Python compares."""
    messages, context, agent_id = opening
    texts: list[object] = []
    for message in takewhile(lambda message: message.role is not Role.ASSISTANT, messages):
        content = message.content or ""
        texts.append((message.role, message.tool_call_id or "", content.strip() if strips else content))
    return texts, [tool.json for tool in context.tools], context.kwargs_json, agent_id


@given(OPENINGS, OPENINGS, st.booleans())
def test_two_have_one_key_if_and_only_if_they_are_the_same_opening(one: Opening, other: Opening, strips: bool) -> None:
    is_same = plain(one, strips=strips) == plain(other, strips=strips)
    assert (key(one, strips=strips) == key(other, strips=strips)) is is_same


@given(OPENINGS, st.data(), st.booleans())
def test_a_change_of_one_part_changes_the_key(opening: Opening, data: st.DataObject, strips: bool) -> None:
    messages, context, agent_id = opening
    other = data.draw(
        st.one_of(
            SMALL.map(lambda agent: (messages, context, agent)),
            TOOLS.map(lambda tools: (messages, replace_tools(context, tools), agent_id)),
            st.tuples(st.integers(0, len(messages)), BEFORE_REPLY).map(
                lambda new: ([*messages[: new[0]], new[1], *messages[new[0] :]], context, agent_id)
            ),
            st.integers(0, len(messages)).map(lambda end: (messages[:end], context, agent_id)),
        )
    )
    is_same = plain(opening, strips=strips) == plain(other, strips=strips)
    assert (key(opening, strips=strips) == key(other, strips=strips)) is is_same


def replace_tools(context: PromptContext, tools: list[Tool]) -> PromptContext:
    return PromptContext(tools=tuple(tools), template_kwargs=context.template_kwargs)


@given(SMALL, SMALL, st.integers(0, 6))
def test_no_text_ends_in_the_next_one(one: str, other: str, at: int) -> None:
    """The same characters in a row, cut into two messages at two places, are two openings."""
    whole = one + other
    cut = [message_of(Role.USER, text, "") for text in (one, other)]
    moved = [message_of(Role.USER, text, "") for text in (whole[:at], whole[at:])]
    keys = [opening_key(messages, PromptContext(), "", strips=False) for messages in (cut, moved)]
    assert (keys[0] == keys[1]) is (cut == moved)
    as_agent = opening_key(cut[1:], PromptContext(), one, strips=False)
    moved_agent = opening_key(moved[1:], PromptContext(), whole[:at], strips=False)
    assert (as_agent == moved_agent) is (cut == moved)


@given(OPENINGS, MESSAGES, st.booleans())
def test_what_comes_after_the_first_reply_is_no_part_of_it(
    opening: Opening, later: list[Message], strips: bool
) -> None:
    messages, context, agent_id = opening
    reply = Message(role=Role.ASSISTANT, content="b")
    longer = [*messages, reply, *later]
    assert key((longer, context, agent_id), strips=strips) == key(opening, strips=strips)


@given(SMALL, st.sampled_from([" ", "\n", "\t "]), st.booleans())
def test_white_space_around_a_text_counts_unless_it_is_stripped(text: str, space: str, strips: bool) -> None:
    keys = {
        opening_key([message_of(Role.USER, content, "")], PromptContext(), "", strips=strips)
        for content in (text.strip(), space + text.strip(), text.strip() + space)
    }
    assert len(keys) == (1 if strips else 3 if text.strip() else 2)


def test_no_text_is_an_empty_one_and_half_a_character_is_a_text() -> None:
    def of(content: str | None) -> bytes:
        return opening_key([message_of(Role.USER, content, "")], PromptContext(), "", strips=False)

    assert of(None) == of("")
    assert len({of("\ud800"), of("\ud801"), of("?")}) == 3


def test_a_name_of_an_author_makes_no_difference_as_it_makes_none_to_a_matcher() -> None:
    message = message_of(Role.USER, "hi", "")
    named = replace(message, name="bob")
    assert opening_key([named], PromptContext(), "", strips=True) == opening_key(
        [message], PromptContext(), "", strips=True
    )
