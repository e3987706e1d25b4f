"""A fleet of model engines under rollouts of agents: what a rule of placement makes of it.

Rollouts are a closed load: so many run at once, and where one ends the next begins. A turn's prompt is all before it
and what a tool said; then a tool runs. Sizes and times are drawn once, by rollout: the same for every rule.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from scripts.fleet.engine_model import ModelEngine, ModelRequest
from stenograph.engine.base import EngineLoad
from stenograph.engine.fleet.memory import MemoryQueue, MemoryTurn
from stenograph.engine.fleet.placement import choose, cost_of

READ_S = 1.0
"""Between two readings of an engine: the default of `--engine-load-interval`."""


@dataclass(frozen=True, slots=True)
class Agents:
    """The rollouts. Medians of log-normal sizes and times, with their sigma; turns are geometric."""

    num: int = 10_000
    num_at_once: int = 64 * 24
    first_prompt: tuple[float, float] = (4000, 0.5)
    sampled: tuple[float, float] = (250, 0.9)
    observed: tuple[float, float] = (600, 1.0)
    tool_s: tuple[float, float] = (3.0, 1.0)
    mean_turns: float = 20.0
    max_turns: int = 60
    seed: int = 0

    def rollout(self, number: int) -> "Rollout":
        draw = random.Random(self.seed * 1_000_003 + number)

        def one(of: tuple[float, float], most: float = 32_768) -> float:
            return min(most, of[0] * draw.lognormvariate(0, of[1]))

        num_turns = 1
        while num_turns < self.max_turns and draw.random() > 1 / self.mean_turns:
            num_turns += 1
        turns = [(int(one(self.sampled)) + 1, int(one(self.observed)) + 1, one(self.tool_s)) for _ in range(num_turns)]
        return Rollout(number, int(one(self.first_prompt)) + 1, turns)


@dataclass(slots=True, eq=False)
class Rollout:
    """One rollout: tokens so far, and of each turn the sampled and observed tokens, and the tool's time."""

    number: int
    num_tokens: int
    turns: list[tuple[int, int, float]]
    num_done: int = 0
    home: "Seat | None" = None
    left_tokens: int = 0


@dataclass(slots=True, eq=False)
class Seat:
    """An engine as a fleet sees it: `MemoryEngine` of the policy."""

    name: str
    engine: ModelEngine = field(default_factory=ModelEngine)
    load_tokens: int = 0
    num_sessions: int = 0
    num_running: int = 0
    home_tokens: int = 0

    def load(self) -> EngineLoad:
        engine = self.engine
        return EngineLoad(
            kv_usage=engine.kv_usage,
            num_running=engine.num_running,
            num_waiting=len(engine.waiting),
            kv_tokens=engine.kv_tokens,
            num_preemptions=engine.num_preemptions,
        )


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """What became of the turns: latencies from their coming to their last token, tokens of prompts, and found ones."""

    latencies_s: list[float] = field(default_factory=list[float])
    num_prompt: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_moved: int = 0
    longest_wait_s: float = 0.0
    rollout_ends_s: list[float] = field(default_factory=list[float])

    def quantile_s(self, share: float) -> float:
        return sorted(self.latencies_s)[int(share * (len(self.latencies_s) - 1))]


Rule = Callable[[Sequence[Seat], Rollout, int], Seat]


def affinity(seats: Sequence[Seat], rollout: Rollout, cost_tokens: int) -> Seat:
    """What a fleet does without its engines' word."""
    return choose(seats, key=str(rollout.number), home=rollout.home, cost_tokens=cost_tokens)


def round_robin() -> Rule:
    turn = count()
    return lambda seats, rollout, cost_tokens: seats[next(turn) % len(seats)]


class Simulation:
    """A run. `rule` None: by the engines' memory, as `MemoryQueue` has it."""

    def __init__(
        self, agents: Agents, *, num_engines: int = 64, rule: Rule | None = None, max_wait_s: float = 60.0
    ) -> None:
        self.outcomes = Outcomes()
        self._agents = agents
        self._rule = rule
        self._seats = [Seat(f"http://engine-{number}:30000") for number in range(num_engines)]
        self._queue: MemoryQueue[Seat] = MemoryQueue(stale_s=5 * READ_S, max_wait_s=max_wait_s)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = count()
        self._numbers = iter(range(agents.num))
        self._begun: dict[ModelRequest, tuple[Rollout, float, int, Seat]] = {}
        self._num_left = agents.num

    def run(self) -> Outcomes:
        draw = random.Random(self._agents.seed)
        for _ in range(min(self._agents.num_at_once, self._agents.num)):
            self._at(draw.uniform(0, 60), self._next_rollout)
        if self._rule is None:
            for number, seat in enumerate(self._seats):
                self._at(READ_S * number / len(self._seats), partial(self._read, seat))
        while self._events:
            now, _, call = heappop(self._events)
            call(now)
        self.outcomes.num_preemptions = sum(seat.engine.num_preemptions for seat in self._seats)
        return self.outcomes

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._num_events), call))

    def _next_rollout(self, now: float) -> None:
        number = next(self._numbers, None)
        if number is not None:
            self._ask(self._agents.rollout(number), now)

    def _read(self, seat: Seat, now: float) -> None:
        self._queue.report(seat, seat.load(), now)
        self._let_in(seat, now)
        if self._num_left:
            self._at(now + READ_S, partial(self._read, seat))

    def _ask(self, rollout: Rollout, now: float) -> None:
        cost = cost_of(rollout.num_tokens)
        if self._rule is not None:
            self._begin(rollout, self._rule(self._seats, rollout, cost), now, now)
            return
        asked = AskedRollout(
            key=str(rollout.number),
            home=rollout.home,
            cost_tokens=cost,
            kept_tokens=rollout.left_tokens,
            since=now,
            candidates=lambda: self._seats,
            rollout=rollout,
        )
        if (seat := self._queue.ask(asked, now)) is not None:
            self._begin(rollout, seat, now, now)
        else:
            self._at(self._queue.wake_at(asked, now), lambda now: self._wake(asked, now))

    def _wake(self, asked: "AskedRollout", now: float) -> None:
        if asked.has_begun:
            return
        if (seat := self._queue.overdue(asked, now)) is not None:
            asked.has_begun = True
            self._begin(asked.rollout, seat, now, asked.since)
        else:
            self._at(self._queue.wake_at(asked, now), lambda now: self._wake(asked, now))

    def _let_in(self, seat: Seat, now: float) -> None:
        for asked in self._queue.freed(seat, now):
            assert isinstance(asked, AskedRollout)
            asked.has_begun = True
            self._begin(asked.rollout, seat, now, asked.since)

    def _begin(self, rollout: Rollout, seat: Seat, now: float, since: float) -> None:
        cost = cost_of(rollout.num_tokens)
        seat.num_running += 1
        seat.load_tokens += cost
        request = ModelRequest(rollout.number, rollout.num_tokens, rollout.turns[rollout.num_done][0])
        self.outcomes.longest_wait_s = max(self.outcomes.longest_wait_s, now - since)
        self.outcomes.num_prompt += rollout.num_tokens
        self.outcomes.num_moved += rollout.home not in (None, seat)
        self._begun[request] = (rollout, since, cost, seat)
        before = seat.engine.next_at
        seat.engine.add(request, now)
        self._follow(seat, before)

    def _follow(self, seat: Seat, before: float | None) -> None:
        when = seat.engine.next_at
        if when is not None and when != before:
            self._at(when, lambda now: self._advance(seat, now))

    def _advance(self, seat: Seat, now: float) -> None:
        if seat.engine.next_at != now:
            return  # it was planned anew since
        for request in seat.engine.advance(now):
            self._end(request, now)
        self._follow(seat, None)
        if self._rule is None:
            self._let_in(seat, now)

    def _end(self, request: ModelRequest, now: float) -> None:
        rollout, since, cost, seat = self._begun.pop(request)
        self.outcomes.latencies_s.append(now - since)
        self.outcomes.num_cached += request.num_cached
        seat.num_running -= 1
        seat.load_tokens -= cost
        sampled, observed, tool_s = rollout.turns[rollout.num_done]
        if rollout.home is not None:
            rollout.home.num_sessions -= 1
            rollout.home.home_tokens -= rollout.left_tokens
        rollout.num_done += 1
        rollout.home, rollout.left_tokens = seat, rollout.num_tokens + sampled
        rollout.num_tokens += sampled + observed
        if rollout.num_done < len(rollout.turns):
            seat.num_sessions += 1
            seat.home_tokens += rollout.left_tokens
            self._at(now + tool_s, lambda now: self._ask(rollout, now))
        else:
            self._num_left -= 1
            self.outcomes.rollout_ends_s.append(now)
            self._next_rollout(now)


@dataclass(slots=True, eq=False, kw_only=True)
class AskedRollout(MemoryTurn[Seat]):
    """A turn that may wait."""

    rollout: Rollout
    has_begun: bool = False
