"""A session's strands as an export sees them: facts that do not change while a worker reads them. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from stenograph.core.history_kinds import Compat, HistoryKind
from stenograph.core.json_types import Count
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.strand_kinds import StrandKind
from stenograph.export.lines import SampleLine
from stenograph.session.session import Session
from stenograph.session.strand import Strand
from stenograph.session.strand_kinds import StrandSight, kinds_of
from stenograph.trajectory.turn import Node


class StrandRow(TypedDict):
    """A strand in a session's metadata. `leaf` is its latest turn, None if its turns have all been replaced."""

    strand: Count
    kind: StrandKind
    rule: str | None
    client: str | None
    agent_id: str
    chapter: Count
    continues: Count | None
    num_turns: Count
    num_tokens: Count
    leaf: Count | None


class LeftOut(TypedDict):
    """Strands that became no samples, and their sampled tokens."""

    strands: Count
    sampled_tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandFacts:
    """A strand: the turns that one opening has, or that follow one root of a tree.

    `chapter` counts from 0 the strands that this one goes on with the work of, `continues` is the last of them.
    `rule` named its `kind`, None if no rule did; `client` is what the rule takes its client for.
    """

    number: int
    kind: StrandKind
    nodes: Sequence[Node]
    rule: str | None = None
    client: str | None = None
    agent_id: str = ""
    chapter: int = 0
    continues: int | None = None

    @property
    def latest(self) -> Node | None:
        """Its turn that was committed last."""
        return self.nodes[-1] if self.nodes else None

    @property
    def num_tokens(self) -> int:
        """Tokens of its turns, those that several lines share once."""
        return sum(node.turn.num_tokens for node in self.nodes)

    def row(self) -> StrandRow:
        """The strand as plain values."""
        return {
            "strand": self.number,
            "kind": self.kind,
            "rule": self.rule,
            "client": self.client,
            "agent_id": self.agent_id,
            "chapter": self.chapter,
            "continues": self.continues,
            "num_turns": len(self.nodes),
            "num_tokens": self.num_tokens,
            "leaf": None if self.latest is None else self.latest.id,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """All strands of a session, by their numbers. `history` is its kind: a strand has one line, unless it is a tree.

    `group`, `compat` and `outcome` are the session's, None if it has none; `session_id` "" is of one that nobody kept.
    """

    history: HistoryKind
    strands: Sequence[StrandFacts]
    session_id: str = ""
    group: str | None = None
    compat: Compat | None = None
    outcome: SessionOutcome | None = None

    @property
    def nodes(self) -> list[Node]:
        """All turns, oldest commit first."""
        return sorted((node for strand in self.strands for node in strand.nodes), key=lambda node: node.id)

    @property
    def latest(self) -> Node | None:
        """The last turn of the session's own line: the main strand's; without strands, the turn committed last."""
        if self.history is not HistoryKind.STRANDS:
            return max((strand.nodes[-1] for strand in self.strands), key=lambda node: node.id, default=None)
        mains = (strand.latest for strand in reversed(self.strands) if strand.kind is StrandKind.MAIN)
        return next(mains, None)

    def by_node(self) -> dict[int, StrandFacts]:
        """The strand of each turn, by node id."""
        return {node.id: strand for strand in self.strands for node in strand.nodes}

    def left_out(self, lines: Sequence[SampleLine], failed: Sequence[SampleLine] = ()) -> dict[str, LeftOut]:
        """By kind, the strands that these lines are of, and the sampled tokens in them, each counted once; those of
        `failed` lines together, as `infra_failed`."""
        told: dict[str, LeftOut] = {}
        for strand, num_tokens in self._counted(lines):
            _add(told, strand.kind, num_tokens)
        for _, num_tokens in self._counted(failed):
            _add(told, RolloutVerdict.INFRA_FAILED, num_tokens)
        return told

    def _counted(self, lines: Sequence[SampleLine]) -> Iterator[tuple[StrandFacts, int]]:
        """The strands that these lines are of, with the sampled tokens in them."""
        by_node, found = self.by_node(), dict[int, set[int]]()
        for line in lines:
            found.setdefault(by_node[line.leaf.id].number, set()).update(part.node.id for part in line.parts)
        for number, ids in found.items():
            nodes = self.strands[number].nodes
            yield self.strands[number], sum(len(node.turn.sampled.ids) for node in nodes if node.id in ids)


def _add(told: dict[str, LeftOut], name: str, num_tokens: int) -> None:
    row = told.setdefault(name, {"strands": 0, "sampled_tokens": 0})
    row["strands"] += 1
    row["sampled_tokens"] += num_tokens


def session_facts(session: Session) -> SessionFacts:
    """A session as it is now. The turns are a snapshot: a worker may read them."""
    groups: list[tuple[Strand | None, list[Node]]]
    kinds: Sequence[StrandKind]
    if session.options.history is HistoryKind.TREE:
        groups = [(None, nodes) for nodes in _by_root(session.nodes)]
    else:
        groups = [(strand, list(strand.history.nodes)) for strand in session.strands.kept]
    if session.options.history is HistoryKind.TREE:
        kinds = kinds_of([_sight(nodes) for _, nodes in groups])
    else:
        kinds = session.strands.kinds()
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
    options = session.options
    return SessionFacts(
        session_id=session.id,
        history=options.history,
        strands=facts,
        group=options.group,
        compat=options.compat,
        outcome=session.outcome,
    )


def _sight(nodes: Sequence[Node]) -> StrandSight:
    """The turns that follow one root of a tree, as what tells their kind."""
    return StrandSight(kind=None, shows_tools=bool(nodes[-1].turn.context.tools), num_turns=len(nodes))


def _number(strand: Strand | None) -> int | None:
    """The number of the strand that this one goes on with the work of."""
    return None if strand is None or strand.continues is None else strand.continues.number


def _by_root(nodes: Sequence[Node]) -> list[list[Node]]:
    """The turns of a tree, those of each root together, oldest commit first."""
    roots: dict[int, list[Node]] = {}
    root_of: dict[int, int] = {}
    for node in nodes:
        root_of[node.id] = node.id if node.parent is None else root_of[node.parent.id]
        roots.setdefault(root_of[node.id], []).append(node)
    return list(roots.values())
