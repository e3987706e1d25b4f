"""Where a request attaches to a tree, against a reference that tries every node."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParsedReply
from stenograph.core.errors import TruncatedGeneration
from stenograph.core.kinds import AfterLength
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, token_ids
from stenograph.trajectory.history import Attachment
from stenograph.trajectory.matching import MATCHERS, MatcherName
from stenograph.trajectory.tree import TreeHistory
from stenograph.trajectory.turn import (
    STATUS_OF,
    CommittedTurn,
    Node,
    PromptContext,
    TurnStatus,
    line_ids,
    line_messages,
)

PLAIN = PromptContext()
CONTEXTS = (PLAIN, PromptContext(template_kwargs={"k": 1}), PromptContext(tools=(Tool(name="t", json="{}"),)))


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def a_turn(
    at: Attachment, reply: str, ids: Sequence[int], context: PromptContext, reason: FinishReason
) -> CommittedTurn:
    sampled = SampledTurn(
        ids=token_ids(ids),
        logprobs=array("d", [-1.0] * len(ids)),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=reason),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )
    return CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids([1] * len(at.new_messages)),
        sampled=sampled,
        status=STATUS_OF[reason],
        messages=at.new_messages,
        reply=ParsedReply(message=assistant(reply)),
        context=context,
    )


def grow(
    tree: TreeHistory,
    messages: list[Message],
    reply: str,
    *,
    context: PromptContext = PLAIN,
    reason: FinishReason = FinishReason.STOP,
) -> Node:
    at = tree.position(messages, context)
    return tree.commit(at, a_turn(at, reply, [7, len(tree.nodes)], context, reason))


def new_tree(matcher: MatcherName = MatcherName.HARNESS) -> TreeHistory:
    return TreeHistory(MATCHERS[matcher])


def naive_parent(tree: TreeHistory, messages: list[Message], context: PromptContext) -> Node | None:
    """The node with the longest line that the request begins with, of equal ones the latest, by trying them all."""
    best: Node | None = None
    for node in tree.nodes:
        line = line_messages(node)
        same_context = all(step.turn.context.is_same(context) for step in node.line())
        if same_context and messages[: len(line)] == line and (best is None or len(line) >= len(line_messages(best))):
            best = node
    return best


TEXTS = st.sampled_from("ab")
MESSAGES = st.one_of(TEXTS.map(user), TEXTS.map(assistant))
"""Assistant messages among them: some that the client wrote itself, some that are just what a turn replied."""


@st.composite
def requests(draw: st.DrawFn, tree: TreeHistory) -> list[Message]:
    """Messages that have something to do with the tree: a cut of one of its lines, and what comes after."""
    nodes = list(tree.nodes)
    line = line_messages(draw(st.sampled_from(nodes))) if nodes and draw(st.booleans()) else []
    line = line[: draw(st.integers(0, len(line)))]
    return [*line, *draw(st.lists(MESSAGES, min_size=0 if line else 1, max_size=3))]


@given(st.data())
def test_a_request_attaches_to_the_deepest_node_whose_line_it_begins_with(data: st.DataObject) -> None:
    tree = new_tree(MatcherName.STRICT)
    for _ in range(data.draw(st.integers(1, 10), label="turns")):
        messages = data.draw(requests(tree), label="messages")
        context = data.draw(st.sampled_from(CONTEXTS), label="context")
        reason = data.draw(st.sampled_from((FinishReason.STOP, *FinishReason)), label="finish")
        wanted = naive_parent(tree, messages, context)
        before = [(node, tree.children_of(node)) for node in tree.nodes]
        if wanted is not None and len(line_messages(wanted)) == len(messages):
            at = tree.position(messages, context)
            assert (at.parent, at.new_messages, at.adds_nothing) == (wanted, (), True)
            assert [(node, tree.children_of(node)) for node in tree.nodes] == before
        elif wanted is not None and wanted.turn.status is TurnStatus.ABORTED:
            with pytest.raises(TruncatedGeneration):
                tree.position(messages, context)
        else:
            at = tree.position(messages, context)
            assert at.parent is wanted
            assert not at.adds_nothing
            assert [*line_messages(wanted), *at.new_messages] == messages
            assert [(node, tree.children_of(node)) for node in tree.nodes] == before  # positioning changes nothing
            node = tree.commit(at, a_turn(at, data.draw(TEXTS), [9, len(before)], context, reason))
            assert tree.latest is node
            assert node.parent is wanted
        check(tree)


def check(tree: TreeHistory) -> None:
    """What holds of every tree: ids count the commits, and each line's ids begin with its parent's."""
    assert [node.id for node in tree.nodes] == list(range(len(tree.nodes)))
    for node in tree.nodes:
        ids, before = line_ids(node), line_ids(node.parent)
        assert ids[: len(before)] == before
        assert ids[len(before) :] == node.turn.new_prompt_ids + node.turn.sampled.ids
        assert (node.num_tokens, node.num_messages, node.depth) == (
            len(ids),
            len(line_messages(node)),
            len(node.line()),
        )
        if node.parent is not None:
            assert tree.children_of(node.parent).count(node) == 1
            assert node.parent.id < node.id


def test_two_turns_that_were_positioned_before_either_was_kept_become_siblings() -> None:
    tree = new_tree()
    root = grow(tree, [user("a")], "A")
    messages = [user("a"), assistant("A"), user("b")]
    first, second = tree.position(messages, PLAIN), tree.position(messages, PLAIN)
    nodes = [
        tree.commit(at, a_turn(at, text, [1], PLAIN, FinishReason.STOP)) for at, text in ((second, "x"), (first, "y"))
    ]
    assert tree.children_of(root) == nodes
    assert [node.id for node in nodes] == [1, 2]


def test_of_equal_lines_the_latest_is_continued() -> None:
    tree = new_tree()
    for _ in range(3):
        grow(tree, [user("a")], "A")
    at = tree.position([user("a"), assistant("A"), user("b")], PLAIN)
    assert at.parent is tree.nodes[2]


def test_an_assistant_message_that_the_client_wrote_is_prompt_until_a_turn_has_replied_just_that() -> None:
    tree = new_tree()
    messages = [user("a"), assistant("carried"), user("b")]
    carried = grow(tree, messages, "B")
    assert (carried.parent, carried.turn.messages) == (None, tuple(messages))
    generated = grow(tree, [user("a")], "carried")
    assert tree.position([*messages[:2], user("c")], PLAIN).parent is generated
    # The line that is longer still wins, though its first assistant message was never generated.
    assert tree.position([*messages, assistant("B"), user("c")], PLAIN).parent is carried


def test_other_tools_or_template_arguments_begin_a_line_of_their_own_and_are_continued_there() -> None:
    tree = new_tree()
    roots = [grow(tree, [user("a")], "A", context=context) for context in CONTEXTS]
    assert [root.parent for root in roots] == [None, None, None]
    for root, context in zip(roots, CONTEXTS, strict=True):
        assert tree.position([user("a"), assistant("A"), user("b")], context).parent is root


def test_a_request_with_nothing_in_common_begins_another_root() -> None:
    tree = new_tree()
    grow(tree, [user("a")], "A")
    at = tree.position([user("z")], PLAIN)
    assert (at.parent, at.new_messages) == (None, (user("z"),))


def test_a_node_that_its_token_limit_cut_off_is_continued() -> None:
    tree = new_tree()
    cut = grow(tree, [user("a")], "A", reason=FinishReason.LENGTH)
    assert tree.position([user("a"), assistant("A"), user("b")], PLAIN).parent is cut


@pytest.mark.parametrize(
    ("reason", "after_length"),
    [(FinishReason.LENGTH, AfterLength.REFUSE), *((FinishReason.ABORT, kind) for kind in AfterLength)],
)
def test_an_aborted_node_or_a_cut_one_where_refused_is_not_continued_but_generated_again_beside_it(
    reason: FinishReason, after_length: AfterLength
) -> None:
    tree = TreeHistory(MATCHERS[MatcherName.HARNESS], after_length=after_length)
    cut = grow(tree, [user("a")], "A", reason=reason)
    with pytest.raises(TruncatedGeneration) as caught:
        tree.position([user("a"), assistant("A"), user("b")], PLAIN)
    assert caught.value.blame == Blame(RequestPart.MESSAGES, 1)
    again = grow(tree, [user("a")], "whole")
    assert (again.parent, tree.children_of(cut)) == (None, [])
    assert tree.position([user("a"), assistant("whole"), user("b")], PLAIN).parent is again
