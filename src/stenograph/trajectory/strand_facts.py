"""Strands of a session as facts, unchanged while a worker reads them; and their kinds, where no rule names them. Pure.

A strand without tools beside one with tools is a side request. Of the others the one with most turns is the main one. A
chapter has the kind of the strand it continues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stenograph.core.kinds import HistoryKind, StrandKind
from stenograph.core.outcome import Annotation, SessionOutcome
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.history import Discarded
from stenograph.trajectory.turn import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandSight:
    """The part of a strand that decides its kind: the `kind` named by a rule, and the number of the earlier strand it
    continues."""

    kind: StrandKind | None
    shows_tools: bool
    num_turns: int
    continues: int | None = None


def kinds_of(strands: Sequence[StrandSight], *, beside_tools: bool = False) -> tuple[StrandKind, ...]:
    """The kind of each strand of a session, in the order of their numbers. `beside_tools`: there is one with tools
    besides."""
    works = _works(strands)
    has_tools = beside_tools or any(strand.shows_tools for strand in strands)
    kinds: list[StrandKind | None] = [strand.kind for strand in strands]
    open_turns: dict[int, int] = {}
    for number, strand in enumerate(strands):
        work = works[number]
        if kinds[number] is None and work != number:
            kinds[number] = kinds[work]
        if kinds[number] is None and has_tools and not strand.shows_tools:
            kinds[number] = StrandKind.AUXILIARY
        if kinds[number] is None:
            open_turns[work] = open_turns.get(work, 0) + strand.num_turns
    main = None if StrandKind.MAIN in kinds else max(open_turns, key=lambda work: open_turns[work], default=None)
    return tuple(
        kind or (StrandKind.MAIN if works[number] == main else StrandKind.UNKNOWN) for number, kind in enumerate(kinds)
    )


def _works(strands: Sequence[StrandSight]) -> list[int]:
    """For each strand the number of the first strand of its work."""
    works: list[int] = []
    for number, strand in enumerate(strands):
        works.append(number if strand.continues is None else works[strand.continues])
    return works


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandFacts:
    """A strand: the turns of one opening, or those after one root of a tree.

    `chapter` counts from 0 the strands with the work it continues, `continues` is the last of them. `rule` named its
    `kind`, None if no rule did; `client` is the client named by the rule.
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
        """Its latest committed turn."""
        return self.nodes[-1] if self.nodes else None

    @property
    def num_tokens(self) -> int:
        """Effective tokens of its turns; those shared by several lines count once."""
        return sum(node.turn.num_effective for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """All strands of a session, by their numbers. A strand has one line, unless its `options` say that it is a tree.

    `outcome` is the session's, None if it has none; `annotations` are scores of its tokens, by name; `session_id` is ""
    for a session nobody kept. `discarded` are turns replaced by later ones.
    """

    options: SessionOptions
    strands: Sequence[StrandFacts]
    session_id: str = ""
    outcome: SessionOutcome | None = None
    discarded: Discarded = field(default_factory=Discarded)
    annotations: Mapping[str, Annotation] = field(default_factory=dict[str, Annotation])

    @property
    def nodes(self) -> list[Node]:
        """All turns, oldest commit first."""
        return sorted((node for strand in self.strands for node in strand.nodes), key=lambda node: node.id)

    @property
    def latest(self) -> Node | None:
        """The last turn of the session's own line: the main strand's; without strands, the turn committed last."""
        if self.options.history is not HistoryKind.STRANDS:
            return max((strand.nodes[-1] for strand in self.strands), key=lambda node: node.id, default=None)
        mains = (strand.latest for strand in reversed(self.strands) if strand.kind is StrandKind.MAIN)
        return next(mains, None)

    def by_node(self) -> dict[int, StrandFacts]:
        """The strand of each turn, by node id."""
        return {node.id: strand for strand in self.strands for node in strand.nodes}


def leaves(nodes: Sequence[Node]) -> list[Node]:
    """The nodes without a child, oldest commit first."""
    parents = {node.parent.id for node in nodes if node.parent is not None}
    return [node for node in nodes if node.id not in parents]


def leaves_of(nodes: Sequence[Node], history: HistoryKind | None) -> list[Node]:
    """The leaves of the lines for samples: of strands all of them, each strand has one line."""
    return leaves(nodes) if history is HistoryKind.STRANDS else kept_leaves(nodes)


def kept_leaves(nodes: Sequence[Node]) -> list[Node]:
    """The leaves of the lines for samples, oldest commit first: all but those superseded by a later sibling.

    Roots are siblings only where their prompts are equal: a side request beside the main strand, a sub-agent's or a
    compaction's, is a line of its own.
    """
    latest = {_place(node): node.id for node in nodes}
    return [leaf for leaf in leaves(nodes) if latest[_place(leaf)] == leaf.id]


def _place(node: Node) -> object:
    """A key shared by siblings."""
    turn, parent = node.turn, node.parent
    return (turn.new_prompt_ids.tobytes(), *[one.ref.sha256 for one in turn.media]) if parent is None else parent.id
