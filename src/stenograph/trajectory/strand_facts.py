"""The strands of a session as facts, which do not change while a worker reads them; and their kinds, where no rule
says them. Pure.

A strand without tools beside one with tools is a side request. Of the others the one with most turns is the main one.
A chapter is what the strand was that it goes on with the work of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stenograph.core.kinds import Compat, HistoryKind, StrandKind
from stenograph.core.outcome import SessionOutcome
from stenograph.trajectory.history import Discarded
from stenograph.trajectory.turn import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandSight:
    """The part of a strand that tells its kind: the `kind` that a rule named, and the number of the strand that it
    continues, which is an earlier one."""

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
    """For each strand the number of the one that its work began with."""
    works: list[int] = []
    for number, strand in enumerate(strands):
        works.append(number if strand.continues is None else works[strand.continues])
    return works


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """All strands of a session, by their numbers. `history` is its kind: a strand has one line, unless it is a tree.

    `group`, `compat` and `outcome` are the session's, None if it has none; `session_id` "" is of one that nobody kept.
    `discarded` are turns that later ones replaced, `metadata` is what the session was opened with.
    """

    history: HistoryKind
    strands: Sequence[StrandFacts]
    session_id: str = ""
    group: str | None = None
    compat: Compat | None = None
    outcome: SessionOutcome | None = None
    discarded: Discarded = field(default_factory=Discarded)
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])

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
