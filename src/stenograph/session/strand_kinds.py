"""The kinds of a session's strands, where no rule says them. Pure.

A strand without tools beside one with tools is a side request. Of the others the one with most turns is the main one.
A chapter is what the strand was that it goes on with the work of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stenograph.core.strand_kinds import StrandKind


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
