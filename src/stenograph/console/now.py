"""The server at this moment, for people watching it: running requests by stage, and figures of the last minute. Pure.

Reads growing counts; for a span of time it takes the difference between two readings.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypedDict

from stenograph.core.json_types import Count, Hex32
from stenograph.core.stages import Stage, StageTimes
from stenograph.engine.base import ShownEngine
from stenograph.session.watch import RequestTask

MAX_RUNNING = 200
"""Most requests in flight to list, the oldest."""
WINDOW_S = 60.0
"""Window of the latencies."""
RATE_S = 10.0
"""Window of the rates."""


class RunningRequest(TypedDict):
    """A request in flight. `session` is null for one that names none; `stage` is the one that it is in."""

    session: Hex32 | None
    request: Hex32
    kind: str | None
    stage: Stage
    age_s: float
    prompt_tokens: Count
    sampled_tokens: Count


class Quantiles(TypedDict):
    """Durations of the last minute, in seconds: their number, and about where half, 99 of 100 and all are below."""

    num: Count
    p50: float | None
    p99: float | None
    max: float | None


class NowEngine(ShownEngine):
    """An engine."""

    state: str
    num_running: Count | None


class NowWeights(TypedDict):
    """The weights that sample now, and whether new turns wait."""

    version: str | None
    paused: bool
    changing: bool


class ConsoleNow(TypedDict):
    """The server now. Rates are of the last ten seconds. `workers` is the number of processes that it is about; of
    several the quantiles are the worst of any. `workers_away` more do not answer, and what they do is missing."""

    at: float
    version: str
    model: str
    instance_id: Hex32
    workers: Count
    workers_away: Count
    num_sessions: Count
    num_held_tokens: Count
    num_in_flight: Count
    running: Sequence[RunningRequest]
    turns: Count
    errors: Count
    sampled_tokens: Count
    prompt_tokens: Count
    wasted_tokens: Count
    turns_per_s: float
    sampled_per_s: float
    prompt_per_s: float
    loop_lag: Quantiles
    ttft: Quantiles
    engines: Sequence[NowEngine]
    weights: NowWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts since the server's start, read at a time; sampled tokens are those of running turns too. `lags` and
    `ttfts` have the number in each bucket."""

    at_s: float
    turns: int
    sampled_tokens: int
    prompt_tokens: int
    lags: Sequence[int]
    ttfts: Sequence[int]


@dataclass(slots=True, kw_only=True)
class Readings:
    """The readings of the last minute, oldest first."""

    kept: deque[Counts] = field(default_factory=deque[Counts])

    def add(self, counts: Counts) -> None:
        """Keep a reading; those before the window are dropped, but for the last of them."""
        self.kept.append(counts)
        while len(self.kept) > 2 and self.kept[1].at_s <= counts.at_s - WINDOW_S:
            self.kept.popleft()

    def rate(self, count: Callable[[Counts], int]) -> float:
        """The number per second of late; 0 before the second reading."""
        last = self.kept[-1]
        recent = [one for one in self.kept if one.at_s >= last.at_s - RATE_S]
        first = recent[0] if len(recent) > 1 else self.kept[max(len(self.kept) - 2, 0)]
        span_s = last.at_s - first.at_s
        return (count(last) - count(first)) / span_s if span_s > 0 else 0.0

    def quantiles(self, buckets: Callable[[Counts], Sequence[int]], bounds: Sequence[float]) -> Quantiles:
        """The durations of a histogram with these bounds, within the window."""
        last = buckets(self.kept[-1])
        first = buckets(self.kept[0]) if len(self.kept) > 1 else [0] * len(last)
        return quantiles_of([now - then for now, then in zip(last, first, strict=True)], bounds)


def quantiles_of(counts: Sequence[int], bounds: Sequence[float]) -> Quantiles:
    """The quantiles of a histogram, within a bucket in proportion; a value above the last bound counts as it."""
    num = sum(counts)
    if not num:
        return {"num": 0, "p50": None, "p99": None, "max": None}
    sums, ends = list(accumulate(counts)), [*bounds, bounds[-1]]

    def at(share: float) -> float:
        index = min(bisect_right(sums, share * num), len(sums) - 1)
        begin = 0.0 if index == 0 else ends[index - 1]
        inside = share * num - (sums[index - 1] if index else 0)
        return begin + (ends[index] - begin) * inside / counts[index] if counts[index] else ends[index]

    largest = max(index for index, count in enumerate(counts) if count)
    return {"num": num, "p50": at(0.5), "p99": at(0.99), "max": ends[largest]}


def running_requests(tasks: Iterable[RequestTask], now_s: float) -> list[RunningRequest]:
    """The running requests, the oldest first."""
    oldest = sorted(tasks, key=lambda task: task.run.turns[0].stages.start)[:MAX_RUNNING]
    return [_running(task, now_s) for task in oldest]


def _running(task: RequestTask, now_s: float) -> RunningRequest:
    turns = task.run.turns
    num_sampled = sum(turn.meter.num_sampled for turn in turns)
    opened = [turn for turn in turns if turn.is_open]
    return {
        "session": task.run.leases.session_id,
        "request": task.request_id,
        "kind": None if turns[0].kind is None else str(turns[0].kind),
        "stage": stage_of(turns[0].stages, is_open=turns[0].is_open, has_sampled=num_sampled > 0),
        "age_s": max(0.0, now_s - turns[0].stages.start),
        "prompt_tokens": sum(len(turn.prompt.ids) for turn in opened),
        "sampled_tokens": num_sampled,
    }


_LAST = (Stage.VALIDATE, Stage.STORE, Stage.COMMIT, Stage.REPLY)


def stage_of(stages: StageTimes, *, is_open: bool, has_sampled: bool) -> Stage:
    """A turn's stage. An engine says only afterwards when it took a prompt from its queue: until the first token it
    counts as prefill."""
    ends = stages.ends
    for ended, begun in reversed([*pairwise(_LAST)]):
        if ended.value in ends:
            return begun
    if has_sampled:
        return Stage.DECODE_TOKENS
    return Stage.PREFILL if is_open else Stage.RENDER
