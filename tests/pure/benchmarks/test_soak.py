"""`stenograph bench soak`: what is dealt, what a session must hold, how a difference is found, and what growth is."""

import zlib
from array import array
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from benchmarks.kit.figures import Goal
from benchmarks.soak.figures import Moment, flat_goals, growth, lag_figures, read_metrics
from benchmarks.soak.model import ABORTED, COMPLETED, TRUNCATED, Kept, SessionModel, Shown, differences
from benchmarks.soak.plan import DECK, DELETES, NEVER, OUTCOMES, SLOW, Card, Deck, Move, draw_session
from standins.faults import Fault
from standins.ordered_engine import ACTS, Generation

# -- what is dealt


def test_the_engine_knows_every_act_and_every_fault_of_it_is_dealt() -> None:
    acts = {card.act for card in (*DECK, *SLOW, *DELETES)} | {"none"}
    assert acts == {*OUTCOMES, *NEVER, "paused"}
    assert acts <= ACTS.keys()
    assert {str(fault) for fault in Fault} <= acts


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_deck_deals_each_card_that_suits_once_in_a_round(is_tree: bool) -> None:
    deck = Deck(7)
    cards = [card for card in DECK if card.suits(is_tree=is_tree)]
    dealt = Counter(deck.deal(is_tree=is_tree) for _ in range(len(cards) + 1))  # the first round has a slow one
    assert dealt == Counter([*cards, next(card for card in dealt if card in SLOW)])


def test_a_card_that_does_not_suit_waits_for_its_session() -> None:
    deck = Deck(7)
    for _ in range(60):
        deck.deal(is_tree=True)
    assert {deck.deal(is_tree=False).move for _ in range(2)} & {Move.BUSY, Move.STALE}


def test_the_same_seed_plays_the_same_sessions() -> None:
    def drawn(seed: int) -> list[object]:
        deck = Deck(seed)
        return [draw_session(number, seed=seed, deck=deck) for number in range(20)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_a_card_is_named_by_what_it_does() -> None:
    names = [Card(move=Move.ASK).name, Card(move=Move.ASK, act="reset").name, Card(move=Move.LEAVE, act="hang").name]
    assert names == ["ask", "fault reset", "hang up on hang"]


# -- what a session must hold

SAID = {(turn, play): tuple(range(10 * n, 10 * n + 6)) for n, turn in enumerate("abcx") for play in (0, 1)}


def kept(turn: str, parent: Kept | None, *, status: str = COMPLETED) -> Kept:
    return Kept(turn=turn, parent=parent, user=b"", status=status, rid=f"r-{turn}", ids=SAID[turn, 0])


class Session:
    """A session of turns that follow one another, as it must be, as it is shown, and as the engine saw it."""

    def __init__(self, turns: str = "abc", *, is_tree: bool = False) -> None:
        self.model = SessionModel(is_tree=is_tree)
        self.shown: list[Shown] = []
        self.seen: list[Generation] = []
        for turn in turns:
            self.model.commit(kept(turn, self.model.tip))
            self.show(turn)

    def show(self, turn: str, *, after: int = -1) -> None:
        """Say that the session holds a turn after the `after`-th that is shown."""
        before = self.shown[after] if self.shown else None
        prompt = (array("i") if before is None or before.line is None else before.line) + array("i", (7, len(turn)))
        request = Generation(
            turn=turn, play=0, rid=f"r-{turn}", num_prompt=len(prompt), prompt_crc=zlib.crc32(prompt.tobytes())
        )
        self.seen.append(request)
        line = prompt + array("i", SAID[turn, 0])
        self.shown.append(
            Shown(
                rid=f"r-{turn}",
                parent=None if before is None else before.rid,
                status=COMPLETED,
                start=len(prompt),
                end=len(line),
                line=line,
            )
        )

    def differences(self) -> list[str]:
        """What is wrong with it."""
        return list(differences(self.model, self.shown, self.seen, SAID))


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_session_that_is_as_it_must_be_has_no_difference(is_tree: bool) -> None:
    assert Session(is_tree=is_tree).differences() == []


def changed(index: int, **fields: object) -> Callable[[Session], None]:
    def change(session: Session) -> None:
        session.shown[index] = msgspec.structs.replace(session.shown[index], **fields)

    return change


def bent(index: int, at: int) -> Callable[[Session], None]:
    def bend(session: Session) -> None:
        line = session.shown[index].line
        assert line is not None
        line[at] += 1

    return bend


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda session: session.shown.pop(), "turn c is lost"),
        (lambda session: session.show("x"), "turn x is kept, and must not be"),
        (lambda session: session.seen.pop(), "no request that the engine saw"),
        (lambda session: session.seen.append(session.seen[0]), "a request id twice"),
        (changed(2, parent="r-a"), "turn c follows r-a, not r-b"),
        (changed(1, status=TRUNCATED), "turn b is truncated, not completed"),
        (changed(1, start=3), "are kept as its prompt"),
        (bent(0, 0), "prompt ids are not those that were sent"),
        (bent(2, -1), "ids are not those that were drawn"),
    ],
)
@pytest.mark.parametrize("is_tree", [False, True])
def test_whatever_is_wrong_with_a_session_is_told(
    break_it: Callable[[Session], object], says: str, is_tree: bool
) -> None:
    session = Session(is_tree=is_tree)
    break_it(session)
    assert any(says in line for line in session.differences()), session.differences()


def test_a_reply_that_is_not_the_one_that_its_client_got_is_told() -> None:
    session = Session()
    session.model.kept[1].ids = SAID["x", 0]
    assert session.differences() == ["turn b is not what its client was answered"]


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_turn_that_nobody_can_know_of_may_be_there_or_not(is_tree: bool) -> None:
    session = Session("ab", is_tree=is_tree)
    session.model.doubt(Kept(turn="x", parent=session.model.tip, user=b""))
    assert session.differences() == []
    session.show("x")
    assert session.differences() == []


def test_on_a_line_one_that_nobody_can_know_of_may_replace_a_turn_that_does_not_go_on() -> None:
    session = Session("ab")
    session.model.commit(kept("c", session.model.tip, status=ABORTED))
    session.model.doubt(Kept(turn="x", parent=session.model.tip, user=b""))
    session.show("x")
    assert session.differences() == []
    session.shown.pop()
    assert session.differences() == ["turn c is lost"]


def test_on_a_line_the_next_turn_settles_what_was_in_doubt_and_replaces_what_came_after_its_parent() -> None:
    model = Session("abc").model
    model.doubt(Kept(turn="x", parent=model.tip, user=b""))
    first = model.kept[0]
    model.commit(kept("x", first))
    assert [turn.turn for turn in model.kept] == ["a", "x"]
    assert model.maybe == []


def test_a_tip_is_never_a_turn_that_does_not_go_on() -> None:
    model = Session("ab").model
    model.commit(kept("c", model.tip, status=TRUNCATED))
    assert model.tip is model.kept[1]


# -- what growth is


def moments(rss_kib: Callable[[int], float], *, seconds: int = 600, per_s: int = 500) -> list[Moment]:
    return [Moment(float(s), s * per_s, round(rss_kib(s)), 40) for s in range(seconds)]


def is_flat(seen: list[Moment]) -> bool:
    figures = growth(seen)
    return all(
        Goal(figure=figure, value=value).is_reached(figures[figure]) for figure, value in flat_goals(seen, figures)
    )


def test_noise_a_peak_and_a_warm_up_are_flat_and_a_leak_is_not() -> None:
    assert is_flat(moments(lambda s: 180_000 + 3_000 * (s % 7)))
    assert is_flat(moments(lambda s: 180_000 + (90_000 if s == 590 else 0)))
    assert is_flat(moments(lambda s: 100_000 if s < 100 else 180_000))
    assert not is_flat(moments(lambda s: 180_000 + 40 * s))


def test_a_slow_leak_is_told_by_the_slope_where_the_turns_are_many() -> None:
    seen = moments(lambda s: 250_000 + 15 * s, seconds=800)
    assert growth(seen)["rss_slope_kib_per_1000_turns"] == pytest.approx(30, rel=0.01)
    assert ("rss_slope_kib_per_1000_turns", 64.0) in flat_goals(seen, growth(seen))


def test_files_that_stay_open_are_not_flat() -> None:
    leaking = [Moment(m.seconds, m.num_turns, m.rss_kib, 40 + int(m.seconds) // 10) for m in moments(lambda _: 1e5)]
    assert not is_flat(leaking)


def test_a_run_too_short_to_tell_of_growth_has_no_goal_for_it() -> None:
    short = moments(lambda s: 100_000 + 1000 * s, seconds=200)
    assert flat_goals(short, growth(short)) == []
    assert growth(short[:3]) == {}


METRICS = """\
stenograph_sessions 3.0
stenograph_turns_in_flight 2.0
stenograph_loop_lag_seconds_bucket{le="0.001"} %d
stenograph_loop_lag_seconds_bucket{le="0.01"} %d
stenograph_loop_lag_seconds_bucket{le="0.1"} %d
stenograph_loop_lag_seconds_bucket{le="+Inf"} %d
"""


def test_lag_is_that_between_two_readings() -> None:
    before, after = read_metrics(METRICS % (0, 0, 9, 9)), read_metrics(METRICS % (99, 100, 109, 109))
    assert (after.num_sessions, after.num_in_flight) == (3, 2)
    assert lag_figures(before, after) == {"loop_lag_p99_ms": 1.0, "loop_lag_max_ms": 10.0}
    assert lag_figures(after, after) == {}
