"""Where a prompt attaches that was given as ids, against a reference that looks at every line."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import Asked, ParsedReply
from stenograph.core.errors import HistoryMismatch, StenographError, TruncatedGeneration
from stenograph.core.kinds import AfterLength
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, token_ids
from stenograph.trajectory.history import Attachment, History, LinearHistory, num_common
from stenograph.trajectory.matching import HarnessMatcher
from stenograph.trajectory.tree import TreeHistory
from stenograph.trajectory.turn import STATUS_OF, CommittedTurn, Node, PromptContext, TurnStatus, line_ids

USER = Message(role=Role.USER, content="u")


def a_turn(
    new: Sequence[int],
    drawn: Sequence[int],
    *,
    reason: FinishReason = FinishReason.STOP,
    num_trimmed: int = 0,
    asked: Asked = Asked.COMPLETION,
    messages: tuple[Message, ...] = (),
    reply: str = "r",
) -> CommittedTurn:
    sampled = SampledTurn(
        ids=token_ids(drawn),
        logprobs=array("d", [-1.0] * len(drawn)),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=reason),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )
    return CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids(new),
        num_trimmed=num_trimmed,
        sampled=sampled,
        status=STATUS_OF[reason],
        messages=messages,
        reply=ParsedReply(message=Message(role=Role.ASSISTANT, content=reply)),
        context=PromptContext(),
        asked=asked,
    )


def complete(
    history: History, ids: Sequence[int], drawn: Sequence[int], reason: FinishReason = FinishReason.STOP
) -> Node:
    """A turn as the route makes one."""
    at = history.position_ids(token_ids(ids))
    num_kept = 0 if at.parent is None else at.parent.num_tokens
    return history.commit(at, a_turn(ids[num_kept:], drawn, reason=reason))


FEW = st.lists(st.integers(1, 2), max_size=3)
NEW = st.lists(st.integers(1, 2), min_size=1, max_size=2)
REASONS = st.sampled_from([FinishReason.STOP] * 4 + [FinishReason.LENGTH, FinishReason.ABORT])


@given(st.data())
def test_the_tree_finds_what_a_look_at_every_line_finds(data: st.DataObject) -> None:
    tree = TreeHistory(HarnessMatcher())
    nodes: list[Node | None] = [None]
    for _ in range(data.draw(st.integers(0, 8), label="turns")):
        parent = data.draw(st.sampled_from(nodes), label="parent")
        reason = data.draw(REASONS, label="reason")
        drawn = data.draw(FEW if reason is FinishReason.ABORT else NEW, label="drawn")
        num_drawn = 0 if parent is None else len(parent.turn.sampled.ids)
        turn = a_turn(
            data.draw(NEW, label="new"),
            drawn,
            reason=reason,
            num_trimmed=data.draw(st.integers(0, min(1, num_drawn)), label="trimmed"),
        )
        nodes.append(tree.commit(Attachment(parent=parent, new_messages=(), revision=len(tree.nodes)), turn))
    lines = [line_ids(node).tolist() for node in nodes]
    ids = data.draw(st.sampled_from(lines), label="line") + data.draw(FEW, label="more")
    ids = ids or [1]
    fitting = [node for node in nodes[1:] if node and node.turn.sampled.ids]
    fitting = [node for node in fitting if line_ids(node).tolist() == ids[: node.num_tokens]]
    expected = max(fitting, key=lambda node: (node.num_tokens, node.id), default=None)
    error: type[StenographError] | None = None
    if expected is not None and expected.num_tokens == len(ids):
        error = HistoryMismatch
    elif expected is not None and expected.turn.status is TurnStatus.ABORTED:
        error = TruncatedGeneration
    if error is not None:
        with pytest.raises(error) as caught:
            tree.position_ids(token_ids(ids))
        assert caught.value.blame == Blame(RequestPart.PROMPT)
    else:
        at = tree.position_ids(token_ids(ids))
        assert at.parent is expected
        assert tree.num_tokens_before(at) == tree.num_tokens


@given(st.lists(st.tuples(st.integers(0, 3), NEW, NEW), max_size=5), FEW)
def test_a_line_is_continued_or_loses_its_last_turn_and_no_more(
    turns: list[tuple[int, list[int], list[int]]], more: list[int]
) -> None:
    history = LinearHistory(HarnessMatcher())
    lines: list[list[int]] = [[]]
    for back, new, drawn in turns:
        prompt = lines[max(0, len(lines) - 1 - back)] + new
        fits = [line for line in lines if prompt[: len(line)] == line]
        longest = max(fits, key=len)
        if len(longest) == len(prompt) or lines.index(longest) < len(lines) - 2:
            with pytest.raises(HistoryMismatch):
                history.position_ids(token_ids(prompt))
            continue
        at = history.position_ids(token_ids(prompt))
        assert history.num_tokens_before(at) == len(longest)
        node = complete(history, prompt, drawn)
        del lines[lines.index(longest) + 1 :]
        lines.append(line_ids(node).tolist())
        assert lines[-1] == prompt + drawn
        assert [line_ids(node).tolist() for node in history.nodes] == lines[1:]


def test_what_its_token_limit_cut_off_is_continued() -> None:
    for history in (LinearHistory(HarnessMatcher()), TreeHistory(HarnessMatcher())):
        cut = complete(history, [1], [2], FinishReason.LENGTH)
        assert history.position_ids(token_ids([1, 2, 3])).parent is cut


def test_what_was_aborted_or_cut_off_where_refused_cannot_be_continued_but_asked_for_again() -> None:
    refuse = AfterLength.REFUSE
    for history in (
        LinearHistory(HarnessMatcher(), after_length=refuse),
        TreeHistory(HarnessMatcher(), after_length=refuse),
    ):
        first = complete(history, [1], [2])
        for reason in (FinishReason.LENGTH, FinishReason.ABORT):
            complete(history, [1, 2, 3], [4], reason)
            with pytest.raises(TruncatedGeneration):
                history.position_ids(token_ids([1, 2, 3, 4, 5]))
            assert history.position_ids(token_ids([1, 2, 3])).parent is first


def test_a_turn_that_drew_nothing_is_no_place_to_continue_from() -> None:
    for history in (LinearHistory(HarnessMatcher()), TreeHistory(HarnessMatcher())):
        complete(history, [1, 2], [], FinishReason.ABORT)
        for ids in ([1, 2], [1, 2, 3]):
            assert history.position_ids(token_ids(ids)).parent is None


def test_a_completion_continues_a_chat_but_no_chat_a_completion() -> None:
    asked = (USER, Message(role=Role.ASSISTANT, content="r"), USER)
    for history in (LinearHistory(HarnessMatcher()), TreeHistory(HarnessMatcher())):
        at = history.position([USER], PromptContext())
        chat = history.commit(at, a_turn([1], [2], asked=Asked.CHAT, messages=(USER,)))
        completion = complete(history, [1, 2, 3], [4])
        assert completion.parent is chat
        assert history.position(asked, PromptContext()).parent is chat


def test_a_completions_text_is_no_message_that_a_chat_could_go_on_after() -> None:
    tree = TreeHistory(HarnessMatcher())
    completion = complete(tree, [1], [2])
    assert tree.position([completion.turn.reply.message, USER], PromptContext()).parent is None


def test_on_a_line_with_two_completions_a_chat_is_told_what_is_in_its_way() -> None:
    history = LinearHistory(HarnessMatcher())
    complete(history, [1], [2])
    complete(history, [1, 2, 3], [4])
    with pytest.raises(HistoryMismatch, match="completion"):
        history.position([USER], PromptContext())


def test_a_prompt_that_differs_is_told_where() -> None:
    history = LinearHistory(HarnessMatcher())
    complete(history, [1, 5], [2])
    complete(history, [1, 5, 2, 3], [4])
    for ids, what in (([1, 6, 2], "token 1 differs"), ([1], "ends before token 1"), ([1, 5, 3], "token 2 differs")):
        with pytest.raises(HistoryMismatch, match=what):
            history.position_ids(token_ids(ids))


@given(st.lists(st.integers(1, 2), max_size=6), st.integers(0, 6), st.lists(st.integers(1, 2), max_size=6))
def test_common_ids_are_counted_up_to_the_first_that_differs(ids: list[int], start: int, segment: list[int]) -> None:
    naive = 0
    while naive < len(segment) and start + naive < len(ids) and ids[start + naive] == segment[naive]:
        naive += 1
    assert num_common(token_ids(ids), start, token_ids(segment)) == naive
