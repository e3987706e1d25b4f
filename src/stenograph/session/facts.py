"""A session as exports read it: its strands as they are now, and the drift of its lines. Pure.

The drift of a line renders the whole line, so it is work for the CPU pool.
"""

from collections.abc import Sequence

from stenograph.core.chat import Asked
from stenograph.core.drift import DriftReport
from stenograph.core.kinds import HistoryKind
from stenograph.session.session import Session
from stenograph.text.drift import find_drift
from stenograph.text.renderer import Renderer
from stenograph.trajectory.strand import Strand
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, StrandSight, kinds_of
from stenograph.trajectory.turn import Node, line_ids, line_messages


def session_facts(session: Session) -> SessionFacts:
    """A session as it is now. The turns are a snapshot: a worker may read them."""
    groups: list[tuple[Strand | None, list[Node]]]
    if session.options.history is HistoryKind.TREE:
        groups = [(None, nodes) for nodes in _by_root(session.nodes)]
        kinds = kinds_of([_sight(nodes) for _, nodes in groups])
    else:
        groups = [(strand, list(strand.history.nodes)) for strand in session.strands.kept]
        kinds = tuple(session.strands.kinds())
    facts = [
        StrandFacts(
            number=number,
            kind=kind,
            nodes=nodes,
            rule=None if strand is None else strand.label.rule,
            client=None if strand is None else strand.label.client,
            agent_id="" if strand is None else strand.agent_id,
            chapter=0 if strand is None else strand.chapter,
            continues=_number(strand),
        )
        for number, ((strand, nodes), kind) in enumerate(zip(groups, kinds, strict=True))
    ]
    return SessionFacts(
        session_id=session.id,
        options=session.options,
        strands=facts,
        outcome=session.outcome,
        discarded=session.strands.discarded,
        annotations=dict(session.annotations),
    )


def _sight(nodes: Sequence[Node]) -> StrandSight:
    """The turns after one root of a tree, as evidence of their kind."""
    return StrandSight(kind=None, shows_tools=bool(nodes[-1].turn.context.tools), num_turns=len(nodes))


def _number(strand: Strand | None) -> int | None:
    """The number of the strand whose work this one goes on with."""
    return None if strand is None or strand.continues is None else strand.continues.number


def _by_root(nodes: Sequence[Node]) -> list[list[Node]]:
    """The turns of a tree, those of each root together, oldest commit first."""
    roots: dict[int, list[Node]] = {}
    root_of: dict[int, int] = {}
    for node in nodes:
        root_of[node.id] = node.id if node.parent is None else root_of[node.parent.id]
        roots.setdefault(root_of[node.id], []).append(node)
    return list(roots.values())


def sampled_spans(leaf: Node) -> list[tuple[int, int]]:
    """Half-open spans, in the ids of the line down to `leaf`, of the sampled tokens still in it."""
    spans: list[tuple[int, int]] = []
    end = 0
    for node in leaf.line():
        turn = node.turn
        if turn.num_trimmed:
            end -= turn.num_trimmed
            start, _ = spans.pop()
            spans.append((start, end))
        start = end + len(turn.new_prompt_ids)
        end = start + len(turn.sampled.ids)
        spans.append((start, end))
    return spans


def line_drift(leaf: Node, renderer: Renderer) -> DriftReport:
    """Compare the ids of the line down to `leaf` with a new render of its messages, if it has them."""
    if any(node.turn.asked is Asked.COMPLETION for node in leaf.line()):
        return DriftReport(unrenderable="There is a completion in this line: it has no messages to compare.")
    context = leaf.turn.context
    return find_drift(
        renderer,
        ids=line_ids(leaf),
        sampled_spans=sampled_spans(leaf),
        messages=line_messages(leaf),
        tools=context.tools,
        kwargs=context.arguments,
    )
