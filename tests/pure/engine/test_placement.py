"""Who of a fleet gets a turn: the home while it is not overloaded, else the least loaded; and who is in doubt."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from stenograph.engine.fleet.placement import (
    FIRST_PAUSE_S,
    LOAD_FACTOR,
    LONGEST_PAUSE_S,
    Trust,
    choose,
    cost_of,
    load_bound,
)


@dataclass(frozen=True, kw_only=True)
class PlacedAt:
    """An engine and what it has to do."""

    name: str
    load_tokens: int
    num_sessions: int


NAMES = [f"http://engine-{number}:30000" for number in range(6)]


def idle(*names: str) -> list[PlacedAt]:
    return [PlacedAt(name=name, load_tokens=0, num_sessions=0) for name in names]


loads = st.lists(st.integers(0, 10**6), min_size=1, max_size=len(NAMES))
fleets = loads.map(
    lambda tokens: [PlacedAt(name=n, load_tokens=t, num_sessions=0) for n, t in zip(NAMES, tokens, strict=False)]
)


@given(fleets, st.sampled_from([*NAMES, None]), st.text(), st.integers(1, 10**6))
def test_the_home_gets_the_turn_within_the_bound_and_else_the_least_loaded(
    candidates: list[PlacedAt], home: str | None, key: str, cost: int
) -> None:
    at_home = next((candidate for candidate in candidates if candidate.name == home), None)
    chosen = choose(candidates, key=key, home=at_home, cost_tokens=cost)
    if at_home is not None and at_home.load_tokens <= load_bound(candidates, cost_tokens=cost):
        assert chosen is at_home
    else:
        assert chosen.load_tokens == min(candidate.load_tokens for candidate in candidates)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20_000), st.booleans()), max_size=80), st.integers(2, 6))
def test_no_engine_is_given_more_than_its_share_by_the_factor_and_one_turn(
    turns: list[tuple[int, int, bool]], num_engines: int
) -> None:
    """Sessions come with turns, some of which end at once; homes are kept as the fleet keeps them."""
    load, homes = Counter[str](), dict[int, int]()
    for session, num_prompt, ends in turns:
        candidates = [PlacedAt(name=n, load_tokens=load[n], num_sessions=0) for n in NAMES[:num_engines]]
        cost = cost_of(num_prompt)
        home = candidates[homes[session]] if session in homes else None
        chosen = choose(candidates, key=str(session), home=home, cost_tokens=cost).name
        homes[session] = NAMES.index(chosen)
        load[chosen] += cost
        assert load[chosen] <= LOAD_FACTOR * load.total() / num_engines + cost
        if ends:
            load[chosen] -= cost


@given(st.text(), st.lists(st.sampled_from(NAMES), min_size=2, unique=True))
def test_among_equals_only_the_sessions_of_an_engine_that_goes_move(key: str, names: list[str]) -> None:
    chosen = choose(idle(*names), key=key, home=None, cost_tokens=1).name
    assert choose(idle(*sorted(names)), key=key, home=None, cost_tokens=1).name == chosen
    for gone in names:
        left = [name for name in names if name != gone]
        moved = choose(idle(*left), key=key, home=None, cost_tokens=1).name
        assert chosen in (gone, moved)


def test_rendezvous_spreads_keys_over_idle_engines() -> None:
    chosen = Counter(choose(idle(*NAMES[:4]), key=f"s{n}", home=None, cost_tokens=1).name for n in range(4000))
    assert all(900 < num < 1100 for num in chosen.values()), chosen


def test_the_engine_that_is_home_to_fewer_sessions_is_preferred_among_equal_loads() -> None:
    candidates = [PlacedAt(name=name, load_tokens=5, num_sessions=3 - at) for at, name in enumerate(NAMES[:3])]
    assert choose(candidates, key="s", home=None, cost_tokens=1).name == NAMES[2]


# -- trust


def test_one_that_failed_gets_nothing_then_one_trial_then_everything() -> None:
    trust = Trust(trial_s=10.0)
    assert trust.admits(0.0)
    assert not trust.began(0.0)
    trust.failed(0.0, "gone", was_trial=False)
    assert not trust.admits(FIRST_PAUSE_S - 0.01)
    assert trust.admits(FIRST_PAUSE_S)
    assert trust.began(FIRST_PAUSE_S)
    assert not trust.admits(FIRST_PAUSE_S)
    trust.worked()
    assert trust.admits(FIRST_PAUSE_S)
    assert not trust.in_doubt


def test_a_failed_trial_doubles_the_pause_up_to_the_longest_and_a_success_forgets_it() -> None:
    trust, now, pauses = Trust(trial_s=10.0), 0.0, list[float]()
    trust.failed(now, "gone", was_trial=False)
    for _ in range(8):
        pauses.append(trust.retry_in_s(now))
        now += pauses[-1]
        assert trust.admits(now)
        trust.failed(now, "gone", was_trial=trust.began(now))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    trust.worked()
    trust.failed(now, "gone", was_trial=False)
    assert trust.retry_in_s(now) == FIRST_PAUSE_S


def test_many_that_find_out_at_once_count_as_one() -> None:
    trust = Trust(trial_s=10.0)
    for number in range(50):
        trust.failed(number / 1000, "gone", was_trial=False)
    assert trust.admits(FIRST_PAUSE_S)


def test_a_trial_that_is_left_makes_room_for_the_next_and_a_long_one_counts_as_passed() -> None:
    trust = Trust(trial_s=10.0)
    trust.failed(0.0, "gone", was_trial=False)
    assert trust.began(2.0)
    trust.left(was_trial=True)
    assert trust.admits(2.0)
    assert trust.began(2.0)
    assert not trust.admits(11.9)
    assert trust.admits(12.0)
    assert not trust.in_doubt
