"""The laws of one step's plan, over states of every kind that can be."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stenograph.embedded.scheduler import Budget, Running, StepPlan, Waiting, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a step is planned from. Keys of `running` are 0, 1, …, of `waiting` 100, 101, …, each by age."""

    waiting: tuple[Waiting[int], ...]
    running: tuple[Running[int], ...]
    budget: Budget

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.budget.block_tokens)

    def needs(self, sequence: Running[int], num_tokens: int) -> int:
        """Blocks that the next `num_tokens` of a sequence take."""
        return max(0, self.blocks(sequence.num_filled + num_tokens) - sequence.num_blocks)

    def needs_now(self, sequences: tuple[Running[int], ...]) -> int:
        """Blocks for a token of each that must go on: all that decode, and the oldest."""
        return sum(self.needs(s, 1) for s in sequences if s.num_pending == 1 or s is self.running[0])

    def available_without(self, preempted: tuple[Running[int], ...]) -> int:
        return self.budget.available_blocks + sum(s.num_own_blocks for s in preempted)

    def plan(self) -> StepPlan[int]:
        return plan(self.waiting, self.running, self.budget)


@st.composite
def states(draw: st.DrawFn) -> State:
    size = draw(st.integers(1, 5))
    running: list[Running[int]] = []
    for key in range(draw(st.integers(0, 6))):
        num_filled = draw(st.integers(0, 20))
        num_pending = draw(st.just(1) | st.integers(2, 30))
        num_blocks = -(-num_filled // size) + draw(st.sampled_from([0, 0, 0, 1]))
        running.append(
            Running(
                key=key,
                num_tokens=num_filled + num_pending,
                num_filled=num_filled,
                num_blocks=num_blocks,
                num_own_blocks=draw(st.integers(0, num_blocks)),
            )
        )
    waiting: list[Waiting[int]] = []
    for key in range(100, 100 + draw(st.integers(0, 4))):
        num_cached = draw(st.integers(0, 10))
        num_tokens = num_cached + draw(st.integers(1, 20))
        num_shared_blocks = draw(st.integers(0, num_cached // size))
        waiting.append(
            Waiting(
                key=key,
                num_tokens=num_tokens,
                num_cached=num_cached,
                num_new_blocks=-(-(num_tokens + 1) // size) - num_shared_blocks,
            )
        )
    max_batch = max(1, len(running)) + draw(st.integers(0, 3))
    return State(
        waiting=tuple(waiting),
        running=tuple(running),
        budget=Budget(
            step_tokens=max_batch + draw(st.integers(1, 40)),
            max_batch=max_batch,
            block_tokens=size,
            available_blocks=draw(st.sampled_from([0, 1, 2]) | st.integers(0, 30)),
        ),
    )


def shares_of(planned: StepPlan[int]) -> dict[int, int]:
    shares = {share.key: share.num_tokens for share in planned.shares}
    assert len(shares) == len(planned.shares), "each has one share at most"
    return shares


def split(state: State, planned: StepPlan[int]) -> tuple[tuple[Running[int], ...], tuple[Running[int], ...]]:
    """The running sequences that stay, and those that go."""
    num_kept = len(state.running) - len(planned.preempted)
    return state.running[:num_kept], state.running[num_kept:]


@given(states())
def test_a_step_computes_no_more_tokens_and_runs_no_more_sequences_than_it_may(state: State) -> None:
    planned = state.plan()
    kept, _ = split(state, planned)
    assert sum(shares_of(planned).values()) <= state.budget.step_tokens
    assert len(kept) + len(planned.admitted) <= state.budget.max_batch


@given(states())
def test_a_step_takes_no_more_blocks_than_are_surely_there(state: State) -> None:
    planned = state.plan()
    kept, gone = split(state, planned)
    shares = shares_of(planned)
    taken = sum(state.needs(s, shares[s.key]) for s in kept if s.key in shares)
    taken += sum(request.num_new_blocks for request in state.waiting if request.key in planned.admitted)
    assert taken <= state.available_without(gone)


@given(states())
def test_shares_are_of_pending_tokens_of_those_that_stay_or_are_admitted(state: State) -> None:
    planned = state.plan()
    kept, _ = split(state, planned)
    pending = {s.key: s.num_pending for s in kept}
    pending |= {r.key: r.num_tokens - r.num_cached for r in state.waiting if r.key in planned.admitted}
    shares = shares_of(planned)
    assert all(1 <= num_tokens <= pending[key] for key, num_tokens in shares.items())
    assert set(planned.admitted) <= set(shares), "whoever is admitted begins at once"


@given(states())
def test_the_youngest_are_preempted_and_the_oldest_never(state: State) -> None:
    planned = state.plan()
    _, gone = split(state, planned)
    assert planned.preempted == tuple(s.key for s in reversed(gone)), "youngest first"
    assert 0 not in planned.preempted


@given(states())
def test_just_as_many_are_preempted_as_those_that_must_go_on_need(state: State) -> None:
    planned = state.plan()
    kept, gone = split(state, planned)
    assert len(kept) <= 1 or state.needs_now(kept) <= state.available_without(gone)
    if gone:
        assert state.needs_now((*kept, gone[0])) > state.available_without(gone[1:])


@given(states())
def test_whoever_decodes_and_stays_gets_one_token_before_any_prefill(state: State) -> None:
    planned = state.plan()
    kept, gone = split(state, planned)
    assume(state.needs_now(kept) <= state.available_without(gone))
    decoding = [s.key for s in kept if s.num_pending == 1]
    assert [(share.key, share.num_tokens) for share in planned.shares[: len(decoding)]] == [(k, 1) for k in decoding]


@given(states())
def test_the_oldest_is_without_a_token_only_where_it_is_left_alone_and_no_block_is_surely_there(state: State) -> None:
    planned = state.plan()
    kept, gone = split(state, planned)
    if kept and kept[0].key not in shares_of(planned):
        assert len(kept) == 1
        assert state.needs(kept[0], 1) > state.available_without(gone)


@given(states())
def test_prefill_is_as_much_as_tokens_and_blocks_allow_oldest_first(state: State) -> None:
    planned = state.plan()
    kept, gone = split(state, planned)
    shares = shares_of(planned)
    tokens_left, blocks_left = state.budget.step_tokens, state.available_without(gone)
    for sequence in [s for s in kept if s.num_pending == 1]:
        tokens_left -= 1
        blocks_left -= state.needs(sequence, 1)
    assume(blocks_left >= 0)
    assert not kept or tokens_left > 0, "decoding never takes the whole step"
    older_are_whole = True
    for sequence in [s for s in kept if s.num_pending > 1]:
        share = shares.get(sequence.key, 0)
        assert older_are_whole or share == 0, "a younger one began before an older was done"
        tokens_left -= share
        blocks_left -= state.needs(sequence, share) if share else 0
        if older_are_whole and share < sequence.num_pending:
            assert tokens_left == 0 or state.needs(sequence, share + 1) > blocks_left + state.needs(sequence, share)
            older_are_whole = False
    assert not planned.admitted or older_are_whole, "somebody was admitted before an older one was done"


@given(states())
def test_the_longest_prefix_that_fits_is_admitted_and_none_in_a_step_that_preempts(state: State) -> None:
    planned = state.plan()
    kept, gone = split(state, planned)
    shares = shares_of(planned)
    assert planned.admitted == tuple(r.key for r in state.waiting[: len(planned.admitted)])
    if gone:
        assert not planned.admitted
    elif len(planned.admitted) < len(state.waiting):
        taken = sum(state.needs(s, shares[s.key]) for s in kept if s.key in shares)
        taken += sum(r.num_new_blocks for r in state.waiting[: len(planned.admitted)])
        assert (
            len(kept) + len(planned.admitted) == state.budget.max_batch
            or sum(shares.values()) == state.budget.step_tokens
            or taken + state.waiting[len(planned.admitted)].num_new_blocks > state.budget.available_blocks
        )


@given(states())
def test_the_plan_reads_one_waiting_request_more_than_it_admits_and_none_without_capacity(state: State) -> None:
    looked_at: list[int] = []

    def waiting() -> Iterator[Waiting[int]]:
        for request in state.waiting:
            looked_at.append(request.key)
            yield request

    planned = plan(waiting(), state.running, state.budget)
    assert planned == state.plan(), "how it is given makes no difference"
    assert len(looked_at) <= len(planned.admitted) + 1
    if planned.preempted or len(state.running) == state.budget.max_batch or not state.budget.available_blocks:
        assert not looked_at


@given(states())
def test_something_happens_wherever_there_is_a_request_that_fits_alone(state: State) -> None:
    if len(state.running) == 1:
        assume(state.needs(state.running[0], 1) <= state.budget.available_blocks)
    if not state.running:
        assume(state.waiting and state.waiting[0].num_new_blocks <= state.budget.available_blocks)
    planned = state.plan()
    assert planned.preempted or planned.shares


@given(states())
def test_no_sequence_is_preempted_while_blocks_suffice(state: State) -> None:
    assume(state.needs_now(state.running) <= state.budget.available_blocks)
    assert state.plan().preempted == ()


RUNNING = {"num_blocks": 1, "num_own_blocks": 1}
ONE_BLOCK_OF_FOUR = {"step_tokens": 8, "max_batch": 4, "block_tokens": 4}


def test_two_that_share_all_their_blocks_go_and_the_oldest_goes_on_when_the_true_number_is_known() -> None:
    oldest = Running(key="a", num_tokens=5, num_filled=4, **RUNNING)
    sharing = [Running(key=key, num_tokens=5, num_filled=4, num_blocks=1, num_own_blocks=0) for key in "bc"]
    planned = plan([], [oldest, *sharing], Budget(available_blocks=0, **ONE_BLOCK_OF_FOUR))
    assert (planned.preempted, planned.shares) == (("c", "b"), ())
    planned = plan([], [oldest], Budget(available_blocks=1, **ONE_BLOCK_OF_FOUR))
    assert [(share.key, share.num_tokens) for share in planned.shares] == [("a", 1)]


def test_the_oldest_in_prefill_takes_the_blocks_of_younger_ones_that_decode() -> None:
    oldest = Running(key="a", num_tokens=30, num_filled=4, **RUNNING)
    younger = Running(key="b", num_tokens=3, num_filled=2, **RUNNING)
    planned = plan([], [oldest, younger], Budget(available_blocks=0, **ONE_BLOCK_OF_FOUR))
    assert planned.preempted == ("b",)
    assert [(share.key, share.num_tokens) for share in planned.shares] == [("a", 4)]


def test_a_younger_prefill_without_blocks_waits_and_disturbs_no_other() -> None:
    oldest = Running(key="a", num_tokens=3, num_filled=2, **RUNNING)
    prefill = Running(key="b", num_tokens=30, num_filled=4, **RUNNING)
    youngest = Running(key="c", num_tokens=2, num_filled=1, **RUNNING)
    planned = plan([], [oldest, prefill, youngest], Budget(available_blocks=0, **ONE_BLOCK_OF_FOUR))
    assert planned.preempted == ()
    assert [(share.key, share.num_tokens) for share in planned.shares] == [("a", 1), ("c", 1)]


def test_a_request_that_does_not_fit_holds_back_a_smaller_one_behind_it() -> None:
    large = Waiting(key="large", num_tokens=8, num_cached=0, num_new_blocks=3)
    small = Waiting(key="small", num_tokens=2, num_cached=0, num_new_blocks=1)
    budget = Budget(available_blocks=2, **ONE_BLOCK_OF_FOUR)
    assert plan([large, small], [], budget).admitted == ()
    assert plan([small, large], [], budget).admitted == ("small",)


def test_a_request_is_admitted_to_what_the_step_has_left_and_the_rest_comes_later() -> None:
    first = Waiting(key="first", num_tokens=9, num_cached=4, num_new_blocks=2)
    second = Waiting(key="second", num_tokens=9, num_cached=0, num_new_blocks=3)
    third = Waiting(key="third", num_tokens=2, num_cached=0, num_new_blocks=1)
    planned = plan([first, second, third], [], Budget(available_blocks=9, **ONE_BLOCK_OF_FOUR))
    assert planned.admitted == ("first", "second")
    assert [(share.key, share.num_tokens) for share in planned.shares] == [("first", 5), ("second", 3)]


@pytest.mark.parametrize(
    ("max_prefills", "admitted"), [(1, ()), (2, ("first",)), (3, ("first", "second")), (None, ("first", "second"))]
)
def test_a_step_computes_tokens_of_no_more_prompts_than_it_may(
    max_prefills: int | None, admitted: tuple[str, ...]
) -> None:
    first = Waiting(key="first", num_tokens=2, num_cached=0, num_new_blocks=1)
    second = Waiting(key="second", num_tokens=2, num_cached=0, num_new_blocks=1)
    prefill = Running(key="prefill", num_tokens=5, num_filled=2, num_blocks=2, num_own_blocks=2)
    decode = Running(key="decode", num_tokens=4, num_filled=3, num_blocks=1, num_own_blocks=1)
    budget = Budget(available_blocks=9, step_tokens=9, max_batch=8, block_tokens=4, max_prefills=max_prefills)
    planned = plan([first, second], [prefill, decode], budget)
    assert planned.admitted == admitted
    assert [share.key for share in planned.shares] == ["decode", "prefill", *admitted]


def test_the_older_of_two_prompts_goes_on_where_a_step_computes_tokens_of_one() -> None:
    prompts = [Running(key=key, num_tokens=9, num_filled=2, num_blocks=1, num_own_blocks=1) for key in ("old", "new")]
    budget = Budget(available_blocks=9, step_tokens=30, max_batch=8, block_tokens=4, max_prefills=1)
    assert [share.key for share in plan([], prompts, budget).shares] == ["old"]


@pytest.mark.parametrize(
    "budget",
    [
        {"step_tokens": 4, "max_batch": 2, "block_tokens": 16, "available_blocks": 1, "max_prefills": 0},
        {"step_tokens": 4, "max_batch": 4, "block_tokens": 16, "available_blocks": 1},
        {"step_tokens": 4, "max_batch": 0, "block_tokens": 16, "available_blocks": 1},
        {"step_tokens": 4, "max_batch": 2, "block_tokens": 0, "available_blocks": 1},
        {"step_tokens": 4, "max_batch": 2, "block_tokens": 16, "available_blocks": -1},
    ],
)
def test_a_budget_that_could_starve_anybody_cannot_be_made(budget: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="step"):
        Budget(**budget)


def test_a_state_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="computed"):
        Running(key=0, num_tokens=4, num_filled=4, **RUNNING)
    with pytest.raises(ValueError, match="own blocks"):
        Running(key=0, num_tokens=4, num_filled=3, num_blocks=1, num_own_blocks=2)
    with pytest.raises(ValueError, match="cached"):
        Waiting(key=0, num_tokens=4, num_cached=4, num_new_blocks=1)
    with pytest.raises(ValueError, match="not shared"):
        Waiting(key=0, num_tokens=4, num_cached=3, num_new_blocks=0)
