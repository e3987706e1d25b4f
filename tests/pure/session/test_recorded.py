"""A request is held against a record in time that grows with both, and not with their product."""

import re
from collections.abc import Sequence
from typing import Any, cast

import pytest

from stenograph.core.chat import ChatRequest
from stenograph.core.messages import Message
from stenograph.session.recorded import SEARCHED_CHARS, RecordedSession
from stenograph.trajectory.commits import PlacedTurn, SessionCommit
from stenograph.trajectory.matching import MatcherName
from stenograph.trajectory.turn import Node, PromptContext
from tests.pure.trajectory.test_strand import assistant, turn_of, user


class CountedMessages(tuple[Message, ...]):
    """Messages, and how many of them were taken out in slices."""

    num_taken = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            self.num_taken += len(found)
        return found


class UncountedText(str):
    """A text that is never looked at as a whole, character by character."""

    __slots__ = ()

    def __iter__(self) -> Any:
        raise AssertionError("a long text is looked at character by character")


class MeasuredPattern:
    """A pattern of digits, and how many characters it has searched."""

    num_searched = 0

    def sub(self, new: str, text: str) -> str:
        self.num_searched += len(text)
        return re.sub(r"\d+", new, text)


def recorded(*told: tuple[Message, str], ignored: Sequence[re.Pattern[str]] = ()) -> tuple[RecordedSession, list[Node]]:
    """A line of turns, each a message and its reply."""
    nodes = list[Node]()
    for number, (message, reply) in enumerate(told):
        turn = turn_of((message,), [1], [2], reply, PromptContext())
        nodes.append(Node(id_=number, turn=turn, parent=nodes[-1] if nodes else None))
    commits = [(SessionCommit(turns=(PlacedTurn(turn=one.turn),)), [(None, one)]) for one in nodes]
    return RecordedSession(commits, MatcherName.STRICT, ignored), nodes


def test_each_message_of_a_request_is_looked_at_once() -> None:
    num = 300
    record, nodes = recorded(*((user(f"question {number}"), f"answer {number}") for number in range(num)))
    pairs = ((user(f"question {number}"), assistant(f"answer {number}")) for number in range(num))
    messages = CountedMessages(message for pair in pairs for message in pair)
    assert record.num_alike(messages)[nodes[-1].id] == 2 * num
    assert messages.num_taken == 2 * num


def test_the_difference_of_long_texts_is_found_in_blocks() -> None:
    text, at = "a" * 100_000, 70_001
    record, _ = recorded((user(UncountedText(text)), "answer"))
    for sent, shown in ((text[:at] + "b" + text[at + 1 :], "'" + 20 * "a" + "b"), (text[:at], "'" + 20 * "a" + "'")):
        said = record.difference(ChatRequest(messages=(user(UncountedText(sent)),)))
        assert f"content, character {at}: recorded 'aaa" in said
        assert f", sent {shown}" in said


@pytest.mark.parametrize(("num", "are_alike"), [(3, True), (5, False)])
def test_no_more_than_so_much_of_a_request_is_searched(num: int, are_alike: bool) -> None:
    """In one hold of the event loop."""
    pattern, size = MeasuredPattern(), SEARCHED_CHARS // 8
    turns = [(f"{'a' * size} {number} ", f"answer {number}") for number in range(num)]
    told = ((user(text + "1"), reply) for text, reply in turns)
    record, nodes = recorded(*told, ignored=(cast("re.Pattern[str]", pattern),))
    pairs = ((user(text + "2"), assistant(reply)) for text, reply in turns)
    request = ChatRequest(messages=tuple(message for pair in pairs for message in pair))
    for _ in range(2):
        pattern.num_searched = 0
        record.find(request, None)
        assert (record.num_alike(request.messages)[nodes[-1].id] == 2 * num) == are_alike
        assert ("message 6 " in record.difference(request)) != are_alike
        assert num * size < pattern.num_searched <= SEARCHED_CHARS


def test_a_longer_text_is_not_searched() -> None:
    pattern = MeasuredPattern()
    record, nodes = recorded((user("1"), "answer"), ignored=(cast("re.Pattern[str]", pattern),))
    sent = user("2" * SEARCHED_CHARS)
    assert record.num_alike((sent,))[nodes[0].id] == 0
    assert pattern.num_searched == 0
