"""A session's strands as an export sees them: their rows, their main strand, and what was left out."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import force_setattr

from stenograph.core.kinds import HistoryKind, Label, StrandKind
from stenograph.core.messages import Tool
from stenograph.core.types import Prompt, SessionId, token_ids
from stenograph.export.lines import left_out, strand_row, whole_line
from stenograph.session.facts import session_facts
from stenograph.session.session import Session
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.history import Attachment
from stenograph.trajectory.strand import Strand
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, leaves
from stenograph.trajectory.turn import Node, PromptContext

NewSession = Callable[[], Any]
ADD = Tool(name="add", json='{"name":"add"}', parameters_json="{}")


def held(kind: HistoryKind) -> Session:
    return Session(SessionId("s"), SessionOptions(history=kind), created_at=0.0, now=0.0)


def commit(session: Session, strand: Strand, by_hand: Any, parent: Node | None, *, shows_tools: bool = True) -> Node:
    """A turn of two prompt tokens and three sampled ones, in a real session."""
    made = by_hand.add(None, [1, 2], [(3, -1.0), (4, -1.0), (5, -1.0)])
    force_setattr(made.turn, "context", PromptContext(tools=(ADD,) if shows_tools else ()))
    at = Attachment(parent=parent, new_messages=made.turn.messages, revision=len(strand.history.nodes))
    node, _ = session.strands.commit(strand, at, made.turn, Prompt(new_ids=token_ids([1, 2])))
    return node


def test_a_tree_has_a_strand_for_each_root_with_all_that_follows_it(new_session: NewSession) -> None:
    session, by_hand = held(HistoryKind.TREE), new_session()
    only = session.strands.only
    assert only is not None
    first = commit(session, only, by_hand, None)
    title = commit(session, only, by_hand, None, shows_tools=False)
    second = commit(session, only, by_hand, first)
    other = commit(session, only, by_hand, first)
    facts = session_facts(session)
    assert [list(strand.nodes) for strand in facts.strands] == [[first, second, other], [title]]
    assert [strand.kind for strand in facts.strands] == [StrandKind.MAIN, StrandKind.AUXILIARY]
    assert facts.nodes == [first, title, second, other]
    assert facts.latest is other, "what was committed last, whatever it is"
    last = commit(session, only, by_hand, title, shows_tools=False)
    assert session_facts(session).latest is last
    assert facts.nodes == [first, title, second, other], "a snapshot"


def test_a_session_s_own_line_is_its_main_strand_s_however_late_a_title_comes(new_session: NewSession) -> None:
    session, by_hand = held(HistoryKind.STRANDS), new_session()
    main, title = (session.strands.of_ids(token_ids([number])) for number in (1, 2))
    first = commit(session, main, by_hand, None)
    beside = commit(session, title, by_hand, None, shows_tools=False)
    facts = session_facts(session)
    assert facts.latest is first
    assert facts.by_node() == {first.id: facts.strands[0], beside.id: facts.strands[1]}
    assert strand_row(facts.strands[1]) == {
        "strand": 1,
        "kind": "auxiliary",
        "rule": None,
        "client": None,
        "agent_id": "",
        "chapter": 0,
        "continues": None,
        "num_turns": 1,
        "num_tokens": 5,
        "leaf": beside.id,
    }
    title.label = Label(kind=StrandKind.MAIN)
    assert session_facts(session).latest is beside


def test_what_is_told_of_a_strand_is_what_it_says(new_session: NewSession) -> None:
    session, by_hand = held(HistoryKind.STRANDS), new_session()
    main, later = (session.strands.of_ids(token_ids([number])) for number in (1, 2))
    commit(session, main, by_hand, None)
    commit(session, later, by_hand, None)
    later.label = Label(rule="a rule", client="a client")
    later.continues, later.chapter, later.agent_id = main, 1, "agent"
    row: Any = strand_row(session_facts(session).strands[1])
    told = {name: row[name] for name in ("kind", "continues", "chapter", "rule", "client", "agent_id")}
    assert told == {
        "kind": "main",
        "continues": 0,
        "chapter": 1,
        "rule": "a rule",
        "client": "a client",
        "agent_id": "agent",
    }


@pytest.mark.parametrize("kind", list(HistoryKind))
def test_a_session_without_turns_has_no_strand_and_no_line(kind: HistoryKind) -> None:
    facts = session_facts(held(kind))
    assert (list(facts.strands), facts.nodes, facts.latest, facts.by_node()) == ([], [], None, {})
    assert left_out(facts, []) == {}


@given(turns=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=8), data=st.data())
def test_left_out_counts_each_strand_and_each_token_once(
    new_session: NewSession, turns: list[tuple[int, int]], data: st.DataObject
) -> None:
    by_hand = new_session()
    root_of: dict[int, int] = {}
    for back, num_drawn in turns:  # each extends one of the last turns, or begins a strand
        parent = by_hand.nodes[-back] if 0 < back <= len(by_hand.nodes) else None
        node = by_hand.add(parent, [1], [(number, -1.0) for number in range(num_drawn)])
        root_of[node.id] = node.id if parent is None else root_of[parent.id]
    roots = sorted(set(root_of.values()))
    kinds = data.draw(st.lists(st.sampled_from(StrandKind), min_size=len(roots), max_size=len(roots)))
    facts = SessionFacts(
        options=SessionOptions(history=HistoryKind.TREE),
        strands=[
            StrandFacts(number=number, kind=kind, nodes=[node for node in by_hand.nodes if root_of[node.id] == root])
            for number, (root, kind) in enumerate(zip(roots, kinds, strict=True))
        ],
    )
    ends = data.draw(st.lists(st.sampled_from(leaves(by_hand.nodes))))
    gone = {node.id: node for end in ends for node in end.line()}
    expected: dict[StrandKind, dict[str, int]] = {}
    for root, kind in zip(roots, kinds, strict=True):
        theirs = [node for node in gone.values() if root_of[node.id] == root]
        if theirs:
            row = expected.setdefault(kind, {"strands": 0, "sampled_tokens": 0})
            row["strands"] += 1
            row["sampled_tokens"] += sum(len(node.turn.sampled.ids) for node in theirs)
    assert left_out(facts, [whole_line(end, max_trim_tokens=0) for end in ends]) == expected
