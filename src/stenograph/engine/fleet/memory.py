"""The choice of a turn's engine by the engines' memory, and the turns that wait for some. Pure: it is given the time.

An engine whose running requests outgrow its keys and values preempts some, and computes them again; one with a queue
keeps it although another has room; one whose sessions outgrow its cache computes their prefixes at every turn. So a
turn goes to an engine where it fits, and else waits here:

- A session stays at its home, where its prefix is, while its turn fits there. Else it waits for its home as long as
  computing its prefix elsewhere would take, and then goes to whichever has room first: never more than twice the better
  of both (ski rental; Karlin, Manasse, Rudolph and Sleator, 1988).
- A session that comes to an engine, new or from its home, goes to the lowest pressure: tokens of running requests, and
  those left by idle sessions at home there, whose next turns want them back. Above `RESIDENT_SHARE` it waits: sessions
  that all lose their prefix to each other gain nothing by running at once.
- An engine's own sessions go first, then those that would come to it; both in their order, and none passes the first
  that could go there: turns that wait for the one engine with their LoRA keep no others out elsewhere.
- A wait has an end (`max_wait_s`): then the turn goes to its home, or to the lowest pressure, and waits there.

An engine's use is its last word, and since then our own turns there. Where requests share prefixes it holds fewer
tokens than our prompts have: the mean ratio so far is taken for the turns since. An engine whose word is missing, or
older than `stale_s`, gets no more than the share of our load that `placement` allows.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from stenograph.engine.base import EngineLoad
from stenograph.engine.fleet.placement import Candidate, choose, load_bound

FULL_SHARE = 0.9
"""Of an engine's memory that running requests may hold for one more to be added: those that run still grow."""
RESIDENT_SHARE = 0.6
"""The same for a session that comes to it, with the tokens of idle ones: contexts grow to several times their first."""
PREFILL_TOKENS_PER_S = 24_000
"""The worth of a prefix in time: about the speed of an H100 with an 8B model (scripts/fleet/engine_model.py)."""
MIN_SHARING = 0.05
SHARING_GAIN = 0.2
"""Weight of a new reading in the mean ratio of tokens held to tokens of our prompts."""


class MemoryEngine(Candidate, Protocol):
    """A candidate, our turns under way there, and the tokens left by its sessions that had a turn lately."""

    @property
    def num_running(self) -> int: ...
    @property
    def home_tokens(self) -> int: ...


H = TypeVar("H", bound=MemoryEngine)
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, eq=False, kw_only=True)
class MemoryTurn(Generic[H]):
    """A turn that wants an engine. `kept_tokens` of its prompt are at `home`; `cost_tokens` is what it will hold.

    `is_loose`: it no longer waits for its home. `candidates` are asked for anew: engines come and go. Turns with
    the same `needs` have the same candidates.
    """

    key: str
    home: H | None
    cost_tokens: int
    kept_tokens: int
    since: float
    candidates: Callable[[], Sequence[H]]
    needs: Hashable = None
    number: int = 0
    is_loose: bool = False

    @property
    def patience_s(self) -> float:
        """The time for which waiting for its home costs no more than leaving it."""
        return self.kept_tokens / PREFILL_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class _LoadReading:
    """An engine's word, and our own turns there at that time. `sharing`: tokens held for each token of our prompts."""

    load: EngineLoad
    at: float
    our_tokens: int
    our_running: int
    sharing: float


@dataclass(slots=True)
class _InOrder(Generic[H]):
    """Turns in the order of their coming, by number."""

    numbers: list[int] = field(default_factory=list[int])
    turns: "dict[int, MemoryTurn[H]]" = field(default_factory=dict[int, "MemoryTurn[H]"])

    def add(self, asked: MemoryTurn[H]) -> None:
        insort(self.numbers, asked.number)
        self.turns[asked.number] = asked

    def remove(self, asked: MemoryTurn[H]) -> bool:
        if self.turns.pop(asked.number, None) is None:
            return False
        del self.numbers[bisect_left(self.numbers, asked.number)]
        return True

    @property
    def head(self) -> "MemoryTurn[H]":
        return self.turns[self.numbers[0]]


class MemoryQueue(Generic[H]):
    """The engines' last words, and the turns that wait. Whoever gets an engine from it begins the turn there before it
    asks again: the queue reads our turns from the engines themselves."""

    def __init__(self, *, stale_s: float, max_wait_s: float) -> None:
        self._stale_s = stale_s
        self._max_wait_s = max_wait_s
        self._readings: dict[str, _LoadReading] = {}
        self._at_home: dict[str, _InOrder[H]] = {}
        self._loose: dict[Hashable, _InOrder[H]] = {}
        """Those that may go anywhere, by needs; with a home they are in its queue too."""
        self._num_asked = 0

    def __repr__(self) -> str:
        return f"<MemoryQueue {len(self._readings)} engines, {self.num_waiting} turns wait>"

    @property
    def num_waiting(self) -> int:
        """Turns that wait."""
        num_homeless = sum(one.home is None for loose in self._loose.values() for one in loose.turns.values())
        return num_homeless + sum(len(one.numbers) for one in self._at_home.values())

    def load_of(self, name: str, now: float) -> EngineLoad | None:
        """An engine's last word; None where there is none, or an old one."""
        reading = self._reading(name, now)
        return None if reading is None else reading.load

    def report(self, engine: H, load: EngineLoad, now: float) -> None:
        """Note an engine's word. Waiting turns may go there: `freed` has them."""
        before = self._readings.get(engine.name)
        sharing = 1.0 if before is None else before.sharing
        if load.kv_tokens and engine.load_tokens and not load.num_waiting:  # of those in its queue it holds nothing
            found = min(1.0, max(MIN_SHARING, load.kv_usage * load.kv_tokens / engine.load_tokens))
            sharing += SHARING_GAIN * (found - sharing)
        self._readings[engine.name] = _LoadReading(load, now, engine.load_tokens, engine.num_running, sharing)

    def forget(self, name: str) -> None:
        """An engine has left."""
        self._readings.pop(name, None)

    def ask(self, asked: MemoryTurn[H], now: float) -> H | None:
        """The engine for a turn; None: it waits, until `freed` or `overdue` gives it one, or it has `left`."""
        self._num_asked += 1
        asked.number = self._num_asked
        engine = self._found(asked, now)
        if engine is None and self._max_wait_s <= 0:
            engine = self._at_last(asked, now)
        if engine is None:
            self._wait(asked)
        return engine

    def freed(self, engine: H, now: float) -> Iterator[MemoryTurn[H]]:
        """Waiting turns that may go to an engine now, one after the other; each has left the queue."""
        while (asked := self._next(engine, now)) is not None:
            self.left(asked)
            yield asked

    def wake_at(self, asked: MemoryTurn[H], now: float) -> float:
        """When to ask `overdue` about a turn, at the latest."""
        ends = [asked.since + self._max_wait_s, now + self._stale_s]
        return min(ends if asked.is_loose else [*ends, asked.since + asked.patience_s])

    def overdue(self, asked: MemoryTurn[H], now: float) -> H | None:
        """The engine for a turn that has waited for a while; None: it waits on."""
        if not asked.is_loose and now >= asked.since + asked.patience_s:
            self._loosen(asked)
        engine = self._found(asked, now)
        if engine is None and now >= asked.since + self._max_wait_s:
            engine = self._at_last(asked, now)
        if engine is not None:
            self.left(asked)
        return engine

    def left(self, asked: MemoryTurn[H]) -> None:
        """A turn waits no more."""
        _leave(self._loose, asked.needs, asked)
        if asked.home is not None:
            _leave(self._at_home, asked.home.name, asked)

    def fits(self, engine: H, asked: MemoryTurn[H], now: float) -> bool:
        """Whether an engine has room for a turn. An idle one has, and one that does not say by the share of our load
        that it may have: unbounded, a silent engine would get all that the others refuse."""
        reading = self._reading(engine.name, now)
        if reading is None:
            return engine.load_tokens <= load_bound(asked.candidates(), cost_tokens=asked.cost_tokens)
        load = reading.load
        cost = asked.cost_tokens * reading.sharing / load.kv_tokens if load.kv_tokens else 0.0
        is_idle = engine.num_running == 0 and load.num_running == 0
        is_foreign = engine is not asked.home and (not is_idle or engine.home_tokens > 0)
        if is_foreign and _pressure(engine, reading) + cost > RESIDENT_SHARE:
            return False
        if is_idle:
            return True
        num_running = load.num_running + engine.num_running - reading.our_running
        if load.num_waiting > 0 or (load.max_running is not None and num_running >= load.max_running):
            return False
        return _use(engine, reading) + cost <= FULL_SHARE

    # -- which engine

    def _reading(self, name: str, now: float) -> _LoadReading | None:
        reading = self._readings.get(name)
        return None if reading is None or now - reading.at > self._stale_s else reading

    def _wait(self, asked: MemoryTurn[H]) -> None:
        if asked.home is None or asked.is_loose:
            self._loosen(asked)
        if asked.home is not None:
            self._at_home.setdefault(asked.home.name, _InOrder()).add(asked)

    def _loosen(self, asked: MemoryTurn[H]) -> None:
        asked.is_loose = True
        self._loose.setdefault(asked.needs, _InOrder()).add(asked)

    def _found(self, asked: MemoryTurn[H], now: float) -> H | None:
        """An engine that a turn may have now, without passing one that came before it."""
        candidates = asked.candidates()
        home = _home_in(candidates, asked)
        if home is not None:
            waiting = self._at_home.get(home.name)
            if (waiting is None or waiting.numbers[0] >= asked.number) and self.fits(home, asked, now):
                return home
        if all(self._reading(one.name, now) is None for one in candidates):
            return choose(candidates, key=asked.key, home=asked.home, cost_tokens=asked.cost_tokens)
        if home is not None and not asked.is_loose:
            return None
        earlier = [loose.head for loose in self._loose.values() if loose.numbers[0] < asked.number]
        claimed = self._at_home.keys() | {one.name for head in earlier for one in head.candidates()}
        fitting = [one for one in candidates if one.name not in claimed and self.fits(one, asked, now)]
        return self._least(fitting, asked.key, now) if fitting else None

    def _next(self, engine: H, now: float) -> MemoryTurn[H] | None:
        """The first waiting turn that may go to an engine now."""
        if (at_home := self._at_home.get(engine.name)) is not None:
            head = at_home.head
            if engine in head.candidates():
                return head if self.fits(engine, head, now) else None
        heads = [loose.head for loose in self._loose.values()]
        first = min((one for one in heads if engine in one.candidates()), key=lambda one: one.number, default=None)
        return first if first is not None and self.fits(engine, first, now) else None

    def _at_last(self, asked: MemoryTurn[H], now: float) -> H | None:
        """The engine of a turn that has waited too long; None where all have gone."""
        candidates = asked.candidates()
        home = _home_in(candidates, asked)
        return home if home is not None or not candidates else self._least(candidates, asked.key, now)

    def _least(self, candidates: Sequence[H], key: str, now: float) -> H:
        """The one of the lowest pressure; among equals as `placement` has it."""
        readings = [self._reading(one.name, now) for one in candidates]
        sizes = [one.load.kv_tokens for one in readings if one is not None and one.load.kv_tokens]
        mean_tokens = sum(sizes) / len(sizes) if sizes else 1.0
        pressures = [
            _our_tokens(one) / mean_tokens if reading is None else _pressure(one, reading)
            for one, reading in zip(candidates, readings, strict=True)
        ]
        lowest = min(pressures)
        least = [one for one, pressure in zip(candidates, pressures, strict=True) if pressure <= lowest]
        return choose(least, key=key, home=None, cost_tokens=0)


def _leave(waiting: dict[K, _InOrder[H]], key: K, asked: MemoryTurn[H]) -> None:
    """Take a turn out of a queue, if it is in it, and leave no empty one."""
    if (queue := waiting.get(key)) is not None and queue.remove(asked) and not queue.numbers:
        del waiting[key]


def _home_in(candidates: Sequence[H], asked: MemoryTurn[H]) -> H | None:
    return next((one for one in candidates if one is asked.home), None)


def _our_tokens(engine: MemoryEngine) -> int:
    """Tokens of our turns, and those left by idle sessions at home there."""
    return max(engine.home_tokens, engine.load_tokens)


def _pressure(engine: MemoryEngine, reading: _LoadReading) -> float:
    """The share of its memory that is held, or will be wanted back."""
    use, kv_tokens = _use(engine, reading), reading.load.kv_tokens
    return use + (_our_tokens(engine) - engine.load_tokens) * reading.sharing / kv_tokens if kv_tokens else use


def _use(engine: MemoryEngine, reading: _LoadReading) -> float:
    """The share of its memory that running requests hold, with our turns since its last word."""
    load = reading.load
    if not load.kv_tokens:
        return load.kv_usage
    since = (engine.load_tokens - reading.our_tokens) * reading.sharing / load.kv_tokens
    return max(0.0, load.kv_usage + since)
