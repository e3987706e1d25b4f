"""Which leaves are kept, what is accounted for, and the table of a session's tree."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import SamplesInconsistent
from stenograph.core.types import FinishReason
from stenograph.export.lines import tree_metadata, whole_line
from stenograph.trajectory.strand_facts import kept_leaves, leaves

NewSession = Callable[[], Any]


def kept_ids(session: Any) -> list[int]:
    return [leaf.id for leaf in kept_leaves(session.nodes)]


def test_a_childless_turn_with_a_later_sibling_is_a_superseded_retry(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)])
    session.add(root, [2], [(11, -1.0)])  # superseded by 2, and 2 by 4
    session.add(root, [2], [(12, -1.0)], reason=FinishReason.LENGTH)
    branch = session.add(root, [3], [(13, -1.0)])  # has a child: a branch, not a retry
    session.add(root, [2], [(14, -1.0)])
    session.add(branch, [4], [(15, -1.0)])
    assert [leaf.id for leaf in leaves(session.nodes)] == [1, 2, 4, 5]
    assert kept_ids(session) == [4, 5]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_an_unfinished_leaf_is_kept_until_a_retry_supersedes_it(new_session: NewSession, reason: FinishReason) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)])
    session.add(root, [2], [(11, -1.0)], reason=reason)
    assert kept_ids(session) == [1]
    session.add(root, [2], [(12, -1.0)])
    assert kept_ids(session) == [2]


def test_roots_supersede_each_other_only_with_equal_prompts(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [1, 2], [(10, -1.0)])  # sampled again as 3
    session.add(None, [7], [(11, -1.0)])  # a title request
    main = session.add(None, [1, 2, 3], [(12, -1.0)])
    session.add(None, [1, 2], [(13, -1.0)])
    session.add(main, [4], [(14, -1.0)])
    session.add(None, [1, 2, 3], [(15, -1.0)])  # the main strand's prompt again; the main strand went on
    assert kept_ids(session) == [1, 3, 4, 5]


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_kept_leaves_are_those_that_the_definition_names(new_session: NewSession, seed: int, size: int) -> None:
    draw = random.Random(seed)
    session = new_session()
    for _ in range(size):
        session.add(draw.choice([None, *session.nodes]), [draw.randrange(3)], [(9, -1.0)])
    expected = []
    for node in session.nodes:
        has_child = any(other.parent is node for other in session.nodes)
        later = [other for other in session.nodes if other.parent is node.parent and other.id > node.id]
        if node.parent is None:
            later = [other for other in later if other.turn.new_prompt_ids == node.turn.new_prompt_ids]
        if not has_child and not later:
            expected.append(node.id)
    assert kept_ids(session) == expected
    assert session.nodes[-1].id in expected  # the last commit is always trained on


def test_a_snapshot_does_not_see_children_committed_after_it(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1], [(10, -1.0)])
    snapshot = tuple(session.nodes)
    session.add(root, [2], [(11, -1.0)])
    assert [leaf.id for leaf in kept_leaves(snapshot)] == [0]


@pytest.mark.parametrize(
    ("num_drawn", "trimmed", "max_trim", "message"),
    [
        (2, 2, 1, r"Turn 1 of its line \(node 1\): it trims 2 tokens .*max_trim_tokens is 1"),
        (1, 2, 9, r"Turn 1 of its line \(node 1\): it trims 2 tokens, but the turn before it sampled 1"),
        (1, -1, 9, r"it trims -1 tokens"),
    ],
)
def test_a_turn_that_trims_too_much_is_refused_with_the_numbers(
    new_session: NewSession, num_drawn: int, trimmed: int, max_trim: int, message: str
) -> None:
    session = new_session()
    root = session.add(None, [1, 2, 3], [(10, -1.0)] * num_drawn)
    leaf = session.add(root, [4], [(11, -1.0)], trimmed=trimmed)
    with pytest.raises(SamplesInconsistent, match=message):
        whole_line(leaf, max_trim_tokens=max_trim)


def test_a_first_turn_has_nothing_to_trim(new_session: NewSession) -> None:
    leaf = new_session().add(None, [1], [(10, -1.0)], trimmed=1)
    with pytest.raises(SamplesInconsistent, match=r"Turn 0 .*trims 1 tokens, but the turn before it sampled 0"):
        whole_line(leaf, max_trim_tokens=1)


def test_a_line_whose_turns_do_not_add_up_is_refused_with_the_sums(new_session: NewSession) -> None:
    leaf = new_session().add(None, [1, 2], [(10, -1.0)])
    leaf.num_tokens += 1
    with pytest.raises(SamplesInconsistent, match="have 3 tokens, the line 3, and 4 are counted"):
        whole_line(leaf, max_trim_tokens=0)


def test_the_tree_table_of_a_small_session(new_session: NewSession) -> None:
    session = new_session()
    root = session.add(None, [1, 2], [(10, -1.0), (90, -1.0)], reply_id="chatcmpl-0")
    session.add(root, [91], [(11, -1.0)], trimmed=1, reason=FinishReason.LENGTH, reply_id="chatcmpl-1")
    session.add(root, [3], [], reason=FinishReason.ABORT, reply_id="chatcmpl-2")
    rest = {"committed_at": 1.5}
    assert tree_metadata(session.nodes) == {
        "nodes": [
            {"id": 0, "parent": None, "seq": 0, "status": "completed", "truncated": False, "completion_span": [2, 4]}
            | {"num_tokens": 4, "response_id": "chatcmpl-0"}
            | rest,
            {"id": 1, "parent": 0, "seq": 1, "status": "truncated", "truncated": True, "completion_span": [4, 5]}
            | {"num_tokens": 5, "response_id": "chatcmpl-1"}
            | rest,
            {"id": 2, "parent": 0, "seq": 2, "status": "aborted", "truncated": False, "completion_span": [5, 5]}
            | {"num_tokens": 5, "response_id": "chatcmpl-2"}
            | rest,
        ],
        "leaves": [{"node_id": 1, "path_node_ids": [0, 1]}, {"node_id": 2, "path_node_ids": [0, 2]}],
    }


def test_the_tree_table_of_an_empty_session_is_empty() -> None:
    assert tree_metadata([]) == {"nodes": [], "leaves": []}
