"""The queue for engines' memory: who goes where, who waits, and that nobody waits for ever or is passed."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scripts.fleet.simulation import Agents, Simulation, affinity, round_robin
from stenograph.engine.base import EngineLoad
from stenograph.engine.fleet.memory import MemoryQueue, MemoryTurn
from stenograph.engine.fleet.placement import choose

STALE_S, WAIT_S = 10.0, 60.0
NAMES = [f"http://engine-{number}:30000" for number in range(5)]


@dataclass(slots=True, eq=False)
class MemberAt:
    """An engine, and our turns there."""

    name: str
    load_tokens: int = 0
    num_sessions: int = 0
    num_running: int = 0
    home_tokens: int = 0
    turns: list[int] = field(default_factory=list[int])

    def begin(self, cost_tokens: int) -> None:
        self.turns.append(cost_tokens)
        self.num_running += 1
        self.load_tokens += cost_tokens

    def end(self) -> None:
        self.num_running -= 1
        self.load_tokens -= self.turns.pop(0)


loads = st.builds(
    EngineLoad,
    kv_usage=st.floats(0, 1),
    num_running=st.integers(0, 20),
    num_waiting=st.sampled_from([0, 0, 0, 3]),
    kv_tokens=st.sampled_from([None, 1000, 100_000]),
    max_running=st.sampled_from([None, 8]),
)


class QueueMachine(RuleBasedStateMachine):
    """Turns come, wait, go, end and leave; engines say this and that, fall silent, and go and come."""

    @initialize(num=st.integers(1, 5))
    def start(self, num: int) -> None:
        self.now = 0.0
        self.engines = [MemberAt(name) for name in NAMES[:num]]
        self.up = list(self.engines)
        self.queue: MemoryQueue[MemberAt] = MemoryQueue(stale_s=STALE_S, max_wait_s=WAIT_S)
        self.waiting: dict[MemoryTurn[MemberAt], float] = {}
        self.num_asked = 0

    def _begin(self, asked: MemoryTurn[MemberAt], engine: MemberAt) -> None:
        assert engine in self.up
        self.waiting.pop(asked, None)
        engine.begin(asked.cost_tokens)

    def _candidates(self, lora: int | None) -> list[MemberAt]:
        """Those that have it, or all."""
        return [one for one in self.up if lora is not None and one.name == NAMES[lora]] or list(self.up)

    @rule(
        data=st.data(),
        cost=st.integers(1, 60_000),
        kept=st.integers(0, 300_000),
        at_home=st.booleans(),
        lora=st.sampled_from([None, None, 0, 1]),
    )
    def ask(self, data: st.DataObject, cost: int, kept: int, at_home: bool, lora: int | None) -> None:
        if not self.up:
            return
        home = data.draw(st.sampled_from(self.engines)) if at_home else None
        self.num_asked += 1
        asked = MemoryTurn(
            key=str(self.num_asked),
            home=home,
            cost_tokens=cost,
            kept_tokens=kept if home else 0,
            since=self.now,
            candidates=lambda: self._candidates(lora),
            needs=lora,
        )
        ahead = [one for one in self.waiting if one.home is home and home in one.candidates()]
        engine = self.queue.ask(asked, self.now)
        if engine is None:
            self.waiting[asked] = self.now
        else:
            assert engine is not home or not ahead or home is None, "a turn of the same home came first"
            assert self.queue.fits(engine, asked, self.now) or self._nobody_says(asked)
            self._begin(asked, engine)

    def _nobody_says(self, asked: MemoryTurn[MemberAt]) -> bool:
        return all(self.queue.load_of(one.name, self.now) is None for one in asked.candidates())

    @rule(data=st.data(), load=loads)
    def report(self, data: st.DataObject, load: EngineLoad) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        self.queue.report(engine, load, self.now)
        self._let_in(engine)

    def _let_in(self, engine: MemberAt) -> None:
        for asked in self.queue.freed(engine, self.now):
            able = [one for one in self.waiting if engine in one.candidates() and one.number < asked.number]
            earlier = [one for one in able if one.home is engine]
            assert not earlier or asked.home is not engine or asked.is_loose, "its own sessions go in their order"
            alike = [one for one in able if one.is_loose and one.needs == asked.needs]
            assert not alike or asked.home is engine, "those that come to it too"
            assert self.queue.fits(engine, asked, self.now)
            self._begin(asked, engine)

    @precondition(lambda self: any(one.turns for one in self.engines))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([one for one in self.engines if one.turns]))
        engine.end()
        if engine in self.up:
            self._let_in(engine)

    @precondition(lambda self: bool(self.waiting))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(list(self.waiting)))
        self.queue.left(asked)
        del self.waiting[asked]

    @rule(data=st.data())
    def go_or_come(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        if engine in self.up:
            self.up.remove(engine)
        else:
            self.up.append(engine)

    @rule(seconds=st.floats(0, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for asked in list(self.waiting):
            if not self.up or self.queue.wake_at(asked, asked.since) > self.now:
                continue
            engine = self.queue.overdue(asked, self.now)
            if engine is not None:
                self._begin(asked, engine)
            else:
                assert self.now < asked.since + WAIT_S, "a wait has an end"

    @invariant()
    def the_queue_has_whom_we_have(self) -> None:
        assert self.queue.num_waiting == len(self.waiting)


TestQueue = QueueMachine.TestCase


def test_turns_that_wait_for_one_engine_keep_none_out_of_another() -> None:
    full, other = MemberAt(NAMES[0]), MemberAt(NAMES[1])
    queue: MemoryQueue[MemberAt] = MemoryQueue(stale_s=STALE_S, max_wait_s=WAIT_S)
    queue.report(full, EngineLoad(kv_usage=1.0, num_running=8, num_waiting=3, kv_tokens=100_000), 0.0)
    queue.report(other, EngineLoad(kv_usage=0.0, num_running=1, num_waiting=0, kv_tokens=100_000), 0.0)

    def turn(key: str, *candidates: MemberAt) -> MemoryTurn[MemberAt]:
        return MemoryTurn(
            key=key, home=None, cost_tokens=40_000, kept_tokens=0, since=0.0, candidates=lambda: candidates, needs=key
        )

    for _ in range(50):
        assert queue.ask(turn("lora", full), 0.0) is None
    assert queue.ask(turn("any", full, other), 0.0) is other
    other.begin(40_000)
    waits = turn("any", full, other)
    assert queue.ask(waits, 0.0) is None, "it is full too"
    other.end()
    assert list(queue.freed(other, 0.0)) == [waits]
    assert queue.num_waiting == 50


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.integers(1, 10**5), st.integers(-1, 4))
def test_without_any_word_a_turn_goes_where_affinity_has_it(tokens: list[int], cost: int, at: int) -> None:
    engines = [MemberAt(name, load_tokens=load) for name, load in zip(NAMES, tokens, strict=False)]
    home = engines[at] if 0 <= at < len(engines) else None
    queue: MemoryQueue[MemberAt] = MemoryQueue(stale_s=STALE_S, max_wait_s=WAIT_S)
    asked = MemoryTurn(key="s", home=home, cost_tokens=cost, kept_tokens=0, since=0.0, candidates=lambda: engines)
    assert queue.ask(asked, 0.0) is choose(engines, key="s", home=home, cost_tokens=cost)


def test_by_memory_rollouts_find_more_cached_and_are_preempted_less() -> None:
    agents = Agents(num=300, num_at_once=144)
    memory = Simulation(agents, num_engines=8).run()
    plain = Simulation(agents, num_engines=8, rule=affinity).run()
    turns = Simulation(agents, num_engines=8, rule=round_robin()).run()
    assert len(memory.latencies_s) == len(plain.latencies_s) == len(turns.latencies_s)
    assert memory.num_cached > plain.num_cached > turns.num_cached
    assert 10 * memory.num_preemptions < plain.num_preemptions < turns.num_preemptions
    assert memory.quantile_s(0.5) < plain.quantile_s(0.5)
