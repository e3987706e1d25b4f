"""Where a request attaches to a linear history (SPEC 4), and what a commit changes."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParsedReply
from stenograph.core.errors import HistoryMismatch, SessionInvariant, TruncatedGeneration
from stenograph.core.kinds import AfterLength
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, token_ids
from stenograph.trajectory.history import Attachment, LinearHistory
from stenograph.trajectory.matching import MATCHERS, MatcherName
from stenograph.trajectory.turn import STATUS_OF, CommittedTurn, PromptContext, TurnStatus, line_ids

CONTEXT = PromptContext()


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def _depth(at: Attachment) -> int:
    return 0 if at.parent is None else at.parent.depth


def commit(
    history: LinearHistory,
    messages: list[Message],
    reply: Message,
    *,
    reason: FinishReason = FinishReason.STOP,
    context: PromptContext = CONTEXT,
) -> Attachment:
    at = history.position(messages, context)
    sampled = SampledTurn(
        ids=token_ids([7, 8]),
        logprobs=array("d", [-1.0, -2.0]),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=reason),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )
    turn = CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids([len(at.new_messages)]),
        sampled=sampled,
        status=STATUS_OF[reason],
        messages=at.new_messages,
        reply=ParsedReply(message=reply),
        context=context,
    )
    history.commit(at, turn)
    return at


def history_of(*turns: tuple[str, str], matcher: MatcherName = MatcherName.HARNESS) -> LinearHistory:
    history = LinearHistory(MATCHERS[matcher])
    messages: list[Message] = []
    for question, answer in turns:
        messages.append(user(question))
        commit(history, messages, assistant(answer))
        messages.append(assistant(answer))
    return history


def test_a_continuation_adds_only_its_new_messages() -> None:
    history = history_of(("a", "A"), ("b", "B"))
    at = history.position([user("a"), assistant("A"), user("b"), assistant("B"), user("c")], CONTEXT)
    assert (_depth(at), at.new_messages) == (2, (user("c"),))


def test_a_retry_of_the_last_turn_replaces_it_and_a_failed_one_changes_nothing() -> None:
    history = history_of(("a", "A"), ("b", "B"))
    before = list(history.nodes)
    at = history.position([user("a"), assistant("A"), user("b")], CONTEXT)
    assert (_depth(at), at.new_messages) == (1, (user("b"),))
    assert list(history.nodes) == before  # positioning is not yet a rollback
    commit(history, [user("a"), assistant("A"), user("other")], assistant("O"))
    assert [node.turn.reply.message.content for node in history.nodes] == ["A", "O"]


def test_the_first_turn_can_be_replaced_too() -> None:
    history = history_of(("a", "A"))
    commit(history, [user("z")], assistant("Z"))
    assert [node.turn.reply.message.content for node in history.nodes] == ["Z"]


def test_discarding_two_turns_is_refused_and_says_where_it_differs() -> None:
    history = history_of(("a", "A"), ("b", "B"))
    with pytest.raises(HistoryMismatch) as caught:
        history.position([user("x"), assistant("A"), user("b"), assistant("B"), user("c")], CONTEXT)
    assert caught.value.blame == Blame(RequestPart.MESSAGES, 0)
    with pytest.raises(HistoryMismatch, match="ends before message 1"):
        history.position([user("a")], CONTEXT)


def test_a_request_that_adds_nothing_attaches_after_the_reply_that_it_ends_with() -> None:
    history = history_of(("a", "A"), ("b", "B"))
    messages = [user("a"), assistant("A"), user("b"), assistant("B")]
    assert history.position(messages, CONTEXT).adds_nothing
    at = history.position(messages[:2], CONTEXT)
    assert (at.parent, at.new_messages, at.adds_nothing) == (history.nodes[0], (), True)
    assert not history.position(messages[:3], CONTEXT).adds_nothing


def test_a_request_that_adds_nothing_to_a_cut_reply_is_no_extension_of_it() -> None:
    history = LinearHistory(MATCHERS[MatcherName.HARNESS], after_length=AfterLength.REFUSE)
    commit(history, [user("a")], assistant("A"), reason=FinishReason.LENGTH)
    assert history.position([user("a"), assistant("A")], CONTEXT).adds_nothing
    with pytest.raises(TruncatedGeneration):
        history.position([user("a"), assistant("A"), user("b")], CONTEXT)


def test_a_turn_that_its_token_limit_cut_off_is_extended() -> None:
    history = LinearHistory(MATCHERS[MatcherName.HARNESS])
    commit(history, [user("a")], assistant("A"), reason=FinishReason.LENGTH)
    assert commit(history, [user("a"), assistant("A"), user("b")], assistant("B")).new_messages == (user("b"),)
    assert [node.turn.status for node in history.nodes] == [TurnStatus.TRUNCATED, TurnStatus.COMPLETED]


@pytest.mark.parametrize(
    ("reason", "after_length"),
    [(FinishReason.LENGTH, AfterLength.REFUSE), *((FinishReason.ABORT, kind) for kind in AfterLength)],
)
def test_an_aborted_turn_or_a_cut_one_where_refused_can_be_regenerated_but_not_extended(
    reason: FinishReason, after_length: AfterLength
) -> None:
    history = LinearHistory(MATCHERS[MatcherName.HARNESS], after_length=after_length)
    commit(history, [user("a")], assistant("A"), reason=reason)
    with pytest.raises(TruncatedGeneration):
        history.position([user("a"), assistant("A"), user("b")], CONTEXT)
    assert history.position([user("a")], CONTEXT).parent is None


def test_a_turn_with_other_tools_or_template_arguments_does_not_match() -> None:
    history = history_of(("a", "A"), ("b", "B"))
    messages = [user("a"), assistant("A"), user("b"), assistant("B"), user("c")]
    for context in (PromptContext(tools=(Tool(name="t", json="{}"),)), PromptContext(template_kwargs={"k": 1})):
        with pytest.raises(HistoryMismatch, match="tools or chat_template_kwargs"):
            history.position(messages, context)


def test_a_commit_after_the_history_moved_is_refused_and_changes_nothing() -> None:
    history = history_of(("a", "A"))
    messages = [user("a"), assistant("A"), user("b")]
    stale = history.position(messages, CONTEXT)
    commit(history, messages, assistant("B"))
    with pytest.raises(SessionInvariant):
        history.commit(stale, history.nodes[0].turn)
    assert len(history.nodes) == 2


CALL = ToolCall(id="c1", name="f", arguments='{"a": 1, "b": [true, "x"]}')
STORED = Message(role=Role.ASSISTANT, content="Text", reasoning="why", tool_calls=(CALL,))


@pytest.mark.parametrize(
    ("given_message", "matches"),
    [
        (STORED, "harness strict loose_tool_call role_content"),
        (Message(role=Role.ASSISTANT, content="\nText ", reasoning="why", tool_calls=(CALL,)), "harness"),
        (Message(role=Role.ASSISTANT, content="Text", tool_calls=(CALL,)), "harness role_content"),
        (Message(role=Role.ASSISTANT, content="Text", reasoning="other", tool_calls=(CALL,)), "role_content"),
        (
            Message(
                role=Role.ASSISTANT,
                content="Text",
                reasoning="why",
                tool_calls=(ToolCall(id="c1", name="f", arguments='{"b":[true,"x"],"a":1.0}'),),
            ),
            "harness loose_tool_call role_content",
        ),
        (
            Message(
                role=Role.ASSISTANT,
                content="Text",
                reasoning="why",
                tool_calls=(ToolCall(id="c1", name="f", arguments='{"a": true, "b": [1, "x"]}'),),
            ),
            "role_content",
        ),
        (Message(role=Role.ASSISTANT, content="Text", reasoning="why"), "role_content"),
        (Message(role=Role.USER, content="Text"), ""),
    ],
)
def test_each_matcher_takes_what_it_says_for_the_same_message(given_message: Message, matches: str) -> None:
    taken = [name for name, matcher in MATCHERS.items() if matcher.matches(STORED, given_message)]
    assert sorted(taken) == sorted(matches.split())


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=6), st.text(max_size=5))
def test_the_ids_of_every_turn_start_with_the_ids_of_the_turn_before(turns: list[tuple[str, str]], last: str) -> None:
    history = history_of(*turns, matcher=MatcherName.STRICT)
    ids = line_ids(history.latest)
    for node in history.nodes:
        shorter = line_ids(node)
        assert ids[: len(shorter)] == shorter
        assert len(shorter) == node.num_tokens
