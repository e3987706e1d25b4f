"""Plans carried out step by step until every request has ended, over blocks that are merely counted and real ones."""

from array import array
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.embedded.kv.block_pool import BlockPool, Match
from stenograph.embedded.kv.prefix_tree import BLOCK_TOKENS
from stenograph.embedded.scheduler import Budget, Running, StepPlan, Waiting, plan


class Table(Protocol):
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_filled(self) -> int: ...


AnyTable = TypeVar("AnyTable", bound=Table)


class Pool(Protocol[AnyTable]):
    """What a simulation needs of a block pool."""

    @property
    def num_available(self) -> int: ...
    def own_blocks(self, table: AnyTable) -> int: ...
    def match(self, ids: "array[int]") -> Match: ...
    def open(self, ids: "array[int]") -> tuple[AnyTable, object]: ...
    def extend(self, table: AnyTable, num_tokens: int) -> bool: ...
    def fill(self, table: AnyTable, ids: "array[int]", num_filled: int) -> None: ...
    def close(self, table: AnyTable, ids: "array[int]") -> None: ...
    def check(self) -> None: ...


@dataclass(slots=True, eq=False)
class CountedTable:
    num_tokens: int = 0
    num_filled: int = 0


class CountedBlocks:
    """A pool that shares nothing and finds nothing: the simplest true account of blocks."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_available = num_blocks
        self.block_tokens = block_tokens

    def own_blocks(self, table: CountedTable) -> int:
        return table.num_tokens // self.block_tokens

    def match(self, ids: "array[int]") -> Match:
        return Match(num_tokens=0, num_shared_blocks=0)

    def open(self, ids: "array[int]") -> tuple[CountedTable, None]:
        return CountedTable(), None

    def extend(self, table: CountedTable, num_tokens: int) -> bool:
        num_blocks = max(0, -(-num_tokens // self.block_tokens) - self.own_blocks(table))
        if num_blocks > self.num_available:
            return False
        self.num_available -= num_blocks
        table.num_tokens += num_blocks * self.block_tokens
        return True

    def fill(self, table: CountedTable, ids: "array[int]", num_filled: int) -> None:
        assert table.num_filled <= num_filled <= table.num_tokens
        table.num_filled = num_filled

    def close(self, table: CountedTable, ids: "array[int]") -> None:
        self.num_available += self.own_blocks(table)

    def check(self) -> None:
        assert self.num_available >= 0


@dataclass(slots=True, kw_only=True)
class Request:
    """Arrives before step `arrives`, and ends when `num_to_draw` tokens are drawn."""

    prompt: "array[int]"
    num_to_draw: int
    arrives: int
    ids: "array[int]" = field(init=False)
    ended: int | None = None

    def __post_init__(self) -> None:
        self.ids = self.prompt[:]

    @property
    def num_tokens_at_most(self) -> int:
        return len(self.prompt) + self.num_to_draw

    def draw(self) -> bool:
        """Draw a token, the same for all, so that what begins alike goes on alike. Whether that was the last."""
        self.ids.append(0)
        return len(self.ids) == self.num_tokens_at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Blocks there are beside those that the largest request needs, and what bounds a step."""

    num_spare_blocks: int
    block_tokens: int
    max_batch: int
    num_prefill_tokens: int

    def num_blocks(self, requests: Sequence[Request]) -> int:
        return -(-max(r.num_tokens_at_most for r in requests) // self.block_tokens) + self.num_spare_blocks


class Simulation(Generic[AnyTable]):
    """The engine's loop around a plan, without a model. Requests are known by their place in order of arrival."""

    def __init__(self, requests: Sequence[Request], limits: Limits, pool: Pool[AnyTable]) -> None:
        self.requests = requests
        self.limits = limits
        self.pool = pool
        self.num_steps = self.num_preempted = self.num_computed = 0
        self.first_admissions: list[int] = []
        self._waiting: list[int] = []
        self._running: dict[int, AnyTable] = {}

    def run(self) -> None:
        """To the end of all, in no more steps than there may be.

        While the oldest request waits nobody is admitted, and the oldest of at most `max_batch` that run gets on until
        it ends; when it runs, it gets on itself. A step which only preempts follows one that admitted. So each request
        is the oldest for no more steps than this.
        """
        longest = max(r.num_tokens_at_most for r in self.requests)
        at_most = max(r.arrives for r in self.requests)
        at_most += sum(2 * (r.num_tokens_at_most + self.limits.max_batch * longest) + 2 for r in self.requests)
        while any(request.ended is None for request in self.requests):
            assert self.num_steps <= at_most, "somebody starves"
            self._waiting += [key for key, r in enumerate(self.requests) if r.arrives == self.num_steps]
            self.step()
            self.num_steps += 1

    def step(self) -> None:
        budget = Budget(
            step_tokens=self.limits.max_batch + self.limits.num_prefill_tokens,
            max_batch=self.limits.max_batch,
            block_tokens=self.limits.block_tokens,
            available_blocks=self.pool.num_available,
        )
        running = [self._running_view(key) for key in sorted(self._running)]
        planned = plan(self._waiting_views(), running, budget)
        assert planned.preempted or planned.shares or not (running or self._waiting), "nothing happens"
        assert not running or running[0].key not in planned.preempted, "the oldest was preempted"
        assert sum(share.num_tokens for share in planned.shares) <= budget.step_tokens
        self._carry_out(planned)
        assert len(self._running) <= budget.max_batch
        self.pool.check()

    def _running_view(self, key: int) -> Running[int]:
        table = self._running[key]
        return Running(
            key=key,
            num_tokens=len(self.requests[key].ids),
            num_filled=table.num_filled,
            num_blocks=table.num_tokens // self.limits.block_tokens,
            num_own_blocks=self.pool.own_blocks(table),
        )

    def _waiting_views(self) -> Iterator[Waiting[int]]:
        for key in tuple(self._waiting):
            ids = self.requests[key].ids
            match = self.pool.match(ids)
            num_blocks = -(-(len(ids) + 1) // self.limits.block_tokens)
            yield Waiting(
                key=key,
                num_tokens=len(ids),
                num_cached=match.num_tokens,
                num_new_blocks=num_blocks - match.num_shared_blocks,
            )

    def _carry_out(self, planned: StepPlan[int]) -> None:
        for key in planned.preempted:
            self.pool.close(self._running.pop(key), self.requests[key].ids)
            insort(self._waiting, key)
        for key in planned.admitted:
            self._waiting.remove(key)
            self._running[key], _ = self.pool.open(self.requests[key].ids)
            if key not in self.first_admissions:
                self.first_admissions.append(key)
        ends: dict[int, int] = {}
        for share in planned.shares:
            table = self._running[share.key]
            ends[share.key] = table.num_filled + share.num_tokens
            assert self.pool.extend(table, ends[share.key]), "a share without room"
        for key, end in ends.items():
            request, table = self.requests[key], self._running[key]
            self.pool.fill(table, request.ids, end)
            if end == len(request.ids) and request.draw():
                self.pool.close(self._running.pop(key), request.ids)
                request.ended = self.num_steps
        self.num_preempted += len(planned.preempted)
        self.num_computed += sum(share.num_tokens for share in planned.shares)


@st.composite
def loads(draw: st.DrawFn, *, most_tokens: int) -> list[Request]:
    """Requests in order of arrival, in bursts and alone, whose prompts often begin alike."""
    sizes = draw(st.lists(st.tuples(st.integers(1, most_tokens), st.integers(1, most_tokens)), min_size=1, max_size=3))
    requests: list[Request] = []
    arrives = 0
    for _ in range(draw(st.integers(1, 10))):
        arrives += draw(st.sampled_from([0, 0, 0, 1, 5, 30]))
        num_prompt, num_to_draw = draw(st.sampled_from(sizes))
        num_alike = draw(st.sampled_from([0, num_prompt // 2, num_prompt]))
        prompt = array("i", [0] * num_alike + [len(requests) + 1] * (num_prompt - num_alike))
        requests.append(Request(prompt=prompt, num_to_draw=num_to_draw, arrives=arrives))
    return requests


def limits(block_tokens: st.SearchStrategy[int]) -> st.SearchStrategy[Limits]:
    return st.builds(
        Limits,
        num_spare_blocks=st.just(0) | st.integers(0, 20),
        block_tokens=block_tokens,
        max_batch=st.integers(1, 6),
        num_prefill_tokens=st.integers(1, 30),
    )


def simulate(requests: list[Request], limits: Limits, pool: Pool[AnyTable]) -> Simulation[AnyTable]:
    simulation = Simulation(requests, limits, pool)
    simulation.run()
    assert pool.num_available == limits.num_blocks(requests), "blocks were lost"
    return simulation


@settings(deadline=None)
@given(loads(most_tokens=30), limits(st.integers(1, 8)))
def test_over_counted_blocks_everybody_ends_and_is_first_admitted_in_order(
    requests: list[Request], limits: Limits
) -> None:
    simulation = simulate(requests, limits, CountedBlocks(limits.num_blocks(requests), limits.block_tokens))
    assert simulation.first_admissions == list(range(len(requests)))


@settings(deadline=None)
@given(loads(most_tokens=30), limits(st.integers(1, 8)))
def test_no_request_overtakes_an_older_one_of_its_own_size_when_blocks_are_short(
    requests: list[Request], limits: Limits
) -> None:
    simulate(requests, limits, CountedBlocks(limits.num_blocks(requests), limits.block_tokens))
    ends: dict[tuple[int, int], int] = {}
    for request in requests:
        assert request.ended is not None
        size = (len(request.prompt), request.num_to_draw)
        assert request.ended >= ends.get(size, 0)
        ends[size] = request.ended


@settings(deadline=None)
@given(loads(most_tokens=100), limits(st.just(BLOCK_TOKENS)), st.booleans())
def test_over_a_real_pool_everybody_ends_and_is_first_admitted_in_order(
    requests: list[Request], limits: Limits, reuse: bool
) -> None:
    pool = BlockPool(limits.num_blocks(requests), reuse=reuse)
    simulation = simulate(requests, limits, pool)
    assert simulation.first_admissions == list(range(len(requests)))


@pytest.mark.parametrize("num_spare_blocks", [1, 5, 20])
def test_an_overload_that_preempts_computes_less_twice_where_what_was_computed_is_found(
    num_spare_blocks: int,
) -> None:
    limits = Limits(num_spare_blocks=num_spare_blocks, block_tokens=BLOCK_TOKENS, max_batch=8, num_prefill_tokens=56)
    computed: dict[bool, int] = {}
    for reuse in (False, True):
        requests = [Request(prompt=array("i", [k + 1] * 40), num_to_draw=150, arrives=k) for k in range(20)]
        simulation = simulate(requests, limits, BlockPool(limits.num_blocks(requests), reuse=reuse))
        assert simulation.num_preempted > 0
        computed[reuse] = simulation.num_computed
    needed = 20 * (40 + 150 - 1)
    assert needed <= computed[True] < computed[False]
