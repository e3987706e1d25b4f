"""The kinds of a session's strands where no rule names them."""

from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.kinds import StrandKind
from stenograph.trajectory.strand_facts import StrandSight, kinds_of

MAIN, UNKNOWN, AUXILIARY = StrandKind.MAIN, StrandKind.UNKNOWN, StrandKind.AUXILIARY


def sight(
    num_turns: int, *, shows_tools: bool = True, kind: StrandKind | None = None, continues: int | None = None
) -> StrandSight:
    return StrandSight(kind=kind, shows_tools=shows_tools, num_turns=num_turns, continues=continues)


def test_a_lone_strand_is_the_main_one_with_tools_or_without() -> None:
    assert kinds_of([]) == ()
    assert kinds_of([sight(1)]) == kinds_of([sight(1, shows_tools=False)]) == (MAIN,)


def test_without_tools_beside_one_with_tools_is_a_side_request_however_many_its_turns() -> None:
    assert kinds_of([sight(9, shows_tools=False), sight(1)]) == (AUXILIARY, MAIN)


def test_without_tools_anywhere_the_one_with_most_turns_is_the_main_one_and_the_first_of_several() -> None:
    def plain(*nums: int) -> tuple[StrandKind, ...]:
        return kinds_of([sight(num, shows_tools=False) for num in nums])

    assert plain(1, 3, 2) == (UNKNOWN, MAIN, UNKNOWN)
    assert plain(2, 2) == (MAIN, UNKNOWN)


def test_a_rule_wins_and_a_strand_that_it_names_main_leaves_the_others_unknown() -> None:
    assert kinds_of([sight(9), sight(1, kind=MAIN)]) == (UNKNOWN, MAIN)
    assert kinds_of([sight(9, kind=StrandKind.AGENT), sight(1)]) == (StrandKind.AGENT, MAIN)
    assert kinds_of([sight(9, kind=StrandKind.TITLE)]) == (StrandKind.TITLE,)


def test_tools_of_a_strand_that_a_rule_names_make_one_without_a_side_request_too() -> None:
    assert kinds_of([sight(1, kind=StrandKind.AGENT), sight(5, shows_tools=False)]) == (StrandKind.AGENT, AUXILIARY)


def test_a_chapter_is_what_its_work_began_as_and_all_its_turns_count_for_it() -> None:
    assert kinds_of([sight(2), sight(3), sight(2, continues=0)]) == (MAIN, UNKNOWN, MAIN)
    agents = [sight(2, kind=StrandKind.AGENT), sight(9, continues=0), sight(9, continues=1), sight(1)]
    assert kinds_of(agents) == (StrandKind.AGENT,) * 3 + (MAIN,)
    assert kinds_of([sight(2), sight(9, kind=StrandKind.COMPACTION, continues=0)]) == (MAIN, StrandKind.COMPACTION)


@st.composite
def sessions(draw: st.DrawFn) -> list[StrandSight]:
    return [
        sight(
            draw(st.integers(0, 3)),
            shows_tools=draw(st.booleans()),
            kind=draw(st.none() | st.sampled_from(StrandKind)),
            continues=draw(st.none() | st.integers(0, number - 1)) if number else None,
        )
        for number in range(draw(st.integers(0, 6)))
    ]


@given(sessions())
def test_each_strand_has_a_kind_and_there_is_one_main_work_if_any_strand_is_open(strands: list[StrandSight]) -> None:
    kinds = kinds_of(strands)
    assert len(kinds) == len(strands)
    works = list(range(len(strands)))
    for number, strand in enumerate(strands):
        assert strand.kind is None or kinds[number] is strand.kind
        if strand.continues is not None:
            works[number] = works[strand.continues]
    if MAIN not in [strand.kind for strand in strands]:
        mains = {works[number] for number, kind in enumerate(kinds) if kind is MAIN}
        assert len(mains) == (MAIN in kinds)
        assert MAIN in kinds or UNKNOWN not in [
            kind
            for strand, kind in zip(strands, kinds, strict=True)
            if strand.kind is None and strand.continues is None
        ]
