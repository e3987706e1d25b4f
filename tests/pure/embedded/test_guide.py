"""A guide's jobs: in order, never two at once, beside whoever waits; what fails in one is raised from the next mask."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from stenograph.core.types import GrammarKind
from stenograph.embedded.grammar.base import BadGrammar, GrammarState
from stenograph.embedded.grammar.guide import Guide
from stenograph.embedded.sampler import Allowed

from .grammar_walks import EOS_ID, start, steps

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}}'
)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Counting:
    """A grammar of all the numbers of tokens: says what was done to it, and finds out whether two did it at once."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.done: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()
        self._fails_at = fails_at
        self._alone = threading.Lock()
        self._num_accepted = 0

    @property
    def is_finished(self) -> bool:
        return False

    def allowed(self) -> Allowed:
        self._do("fill")
        return np.arange(8) == self._num_accepted

    def accept(self, token_id: int) -> None:
        self._do(f"accept {token_id}")
        self._num_accepted += 1
        if token_id == self._fails_at:
            raise BadGrammar(f"no {token_id}")

    def _do(self, what: str) -> None:
        assert self._alone.acquire(blocking=False), "two at once"
        try:
            self.has_begun.set()
            self.may_go_on.wait()
            self.done.append(what)
        finally:
            self._alone.release()


def test_a_guide_goes_where_its_state_would(threads: ThreadPoolExecutor) -> None:
    for seed in range(20):
        guide = Guide(start(GrammarKind.JSON_SCHEMA, SCHEMA), threads)
        alone = start(GrammarKind.JSON_SCHEMA, SCHEMA)
        followed = start(GrammarKind.JSON_SCHEMA, SCHEMA)
        for token_id in steps(alone, random.Random(seed), 80):
            assert np.array_equal(guide.mask(), followed.allowed())
            if token_id != EOS_ID:
                guide.accept(token_id)
                followed.accept(token_id)


def test_fill_and_accept_take_turns_whatever_the_number_of_threads(threads: ThreadPoolExecutor) -> None:
    for asks_between in (True, False):
        state = Counting()
        guide = Guide(state, threads)
        for token_id in range(6):
            if asks_between:
                assert guide.mask().nonzero()[0].tolist() == [token_id]
            guide.accept(token_id)
        assert guide.mask().nonzero()[0].tolist() == [6]
        assert state.done == ["fill", *(what for i in range(6) for what in (f"accept {i}", "fill"))]


def test_accept_returns_while_its_job_has_not_even_begun(threads: ThreadPoolExecutor) -> None:
    state = Counting()
    guide = Guide(state, threads)
    guide.mask()
    state.may_go_on.clear()
    guide.accept(0)
    assert state.done == ["fill"]
    state.may_go_on.set()
    assert guide.mask().nonzero()[0].tolist() == [1]


def test_a_mask_can_be_asked_for_twice(threads: ThreadPoolExecutor) -> None:
    state = Counting()
    guide = Guide(state, threads)
    assert guide.mask() is guide.mask()
    assert state.done == ["fill"]


def test_a_failure_of_accept_is_raised_from_every_later_mask(threads: ThreadPoolExecutor) -> None:
    state = Counting(fails_at=1)
    guide = Guide(state, threads)
    for token_id in range(4):
        guide.accept(token_id)
    for _ in range(2):
        with pytest.raises(BadGrammar, match="no 1"):
            guide.mask()
    assert state.done == ["fill", "accept 0", "fill", "accept 1"]


def test_a_token_that_no_mask_admits_is_its_own_guides_error(threads: ThreadPoolExecutor) -> None:
    guide, other = (Guide(start(GrammarKind.REGEX, "[ab]{3}"), threads) for _ in range(2))
    refused = int(np.flatnonzero(~guide.mask())[-1])
    guide.accept(refused)
    other.accept(int(np.flatnonzero(other.mask())[0]))
    with pytest.raises(BadGrammar) as raised:
        guide.mask()
    assert "\n" not in str(raised.value)
    assert other.mask().any()


def test_a_finished_grammar_admits_the_end_alone_and_is_not_advanced(threads: ThreadPoolExecutor) -> None:
    guide = Guide(start(GrammarKind.CHOICE, '["a"]'), threads)
    only = int(np.flatnonzero(guide.mask())[0])
    for _ in range(4):
        guide.accept(only)
        assert np.flatnonzero(guide.mask()).tolist() == [EOS_ID]


def test_an_abandoned_guide_begins_nothing_more() -> None:
    with ThreadPoolExecutor(1) as pool:
        state, waiting = Counting(), Counting()
        state.may_go_on.clear()
        running, queued = Guide(state, pool), Guide(waiting, pool)
        state.has_begun.wait()
        running.abandon()
        queued.abandon()
        state.may_go_on.set()
    assert state.done == ["fill"]
    assert waiting.done == []


def test_a_guide_that_is_abandoned_between_two_jobs_stops_at_the_first() -> None:
    with ThreadPoolExecutor(1) as pool:
        state = Counting()
        state.may_go_on.clear()
        guide = Guide(state, pool)
        state.has_begun.wait()
        guide.accept(0)
        guide.abandon()
        state.may_go_on.set()
    assert state.done == ["fill"]


def test_copies_of_one_grammar_do_not_meet_on_any_thread(threads: ThreadPoolExecutor) -> None:
    def trace(seed: int, state: GrammarState) -> list[tuple[int, int]]:
        ids = steps(state, random.Random(seed), 60)
        return [(id_, int(np.packbits(state.allowed()).view(np.uint8).sum())) for id_ in ids]

    def abandon(state: GrammarState) -> None:
        guide = Guide(state, threads)
        guide.accept(int(np.flatnonzero(guide.mask())[0]))
        guide.abandon()

    def fresh() -> GrammarState:
        return start(GrammarKind.JSON_SCHEMA, SCHEMA)

    expected = [trace(seed, fresh()) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        rounds: list[Future[list[tuple[int, int]]]] = []
        for _ in range(5):
            rounds += [pool.submit(trace, seed, fresh()) for seed in range(40)]
            abandon(fresh())
        found = [future.result() for future in rounds]
    assert found == expected * 5
