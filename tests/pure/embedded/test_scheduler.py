"""The scheduler's plans: within their budgets, in order, and nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from stenograph.embedded.scheduler import Running, Waiting, admissions, shares

WAITING = st.lists(st.integers(1, 50), max_size=10).map(
    lambda sizes: [Waiting(key=index, max_tokens=size) for index, size in enumerate(sizes)]
)
RUNNING = st.lists(st.integers(1, 50), max_size=10).map(
    lambda sizes: [Running(key=index, num_pending=size) for index, size in enumerate(sizes)]
)


@given(WAITING, st.integers(0, 5), st.integers(1, 8), st.integers(0, 120))
def test_the_longest_prefix_that_fits_is_admitted(
    waiting: list[Waiting[int]], num_running: int, max_batch: int, free_tokens: int
) -> None:
    admitted = admissions(waiting, num_running=num_running, max_batch=max_batch, free_tokens=free_tokens)
    assert list(admitted) == list(range(len(admitted)))
    used = sum(waiting[key].max_tokens for key in admitted)
    assert used <= free_tokens
    assert len(admitted) <= max(0, max_batch - num_running)
    if len(admitted) < len(waiting):
        full = num_running + len(admitted) >= max_batch
        assert full or used + waiting[len(admitted)].max_tokens > free_tokens


@given(RUNNING, st.integers(1, 60))
def test_decoding_comes_first_and_prefill_gets_what_is_left(running: list[Running[int]], step_tokens: int) -> None:
    planned = {share.key: share.num_tokens for share in shares(running, step_tokens=step_tokens)}
    decoding = [sequence.key for sequence in running if sequence.num_pending == 1]
    assert all(planned[key] == 1 for key in decoding)
    assert all(1 <= planned[key] <= running[key].num_pending for key in planned)
    assert sum(planned.values()) <= max(step_tokens, len(decoding))
    prefilling = [sequence for sequence in running if sequence.num_pending > 1]
    computed = [planned.get(sequence.key, 0) for sequence in prefilling]
    # The oldest is done before a younger one begins.
    for index, sequence in enumerate(prefilling[:-1]):
        assert computed[index] == sequence.num_pending or not any(computed[index + 1 :])


@given(RUNNING, st.integers(1, 60))
def test_every_step_makes_progress_until_all_have_computed_everything(
    running: list[Running[int]], step_tokens: int
) -> None:
    pending = {sequence.key: sequence.num_pending for sequence in running}
    while pending:
        plan = shares([Running(key=k, num_pending=n) for k, n in pending.items()], step_tokens=step_tokens)
        assert plan
        for share in plan:
            pending[share.key] -= share.num_tokens
        pending = {key: left for key, left in pending.items() if left}
