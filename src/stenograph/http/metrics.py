"""The server's metrics in Prometheus' text format: implements `core.telemetry.Telemetry` for `GET /metrics`.

Owns the counts of one app and the table of their names, `METRICS`, from which docs/metrics.md is checked. Knows
neither sessions nor an engine: what is read at the time of a scrape comes through `bind`. There is no global state, so
many apps can live in one process.

The counts are plain numbers, handed to prometheus_client when it asks for them: its own `Histogram.observe`, with two
locks and a linear search, takes 107 µs for 100 gaps between tokens, and `_Histogram` 12 µs (CPython 3.11).

Label values are never a client's words. Laws and error codes are open sets, but each is written in our own code, which
bounds them; the others are enums.
"""

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from stenograph.core.errors import Limit, StenographError
from stenograph.core.outcome import NO_VERDICT, RolloutVerdict
from stenograph.core.strand_kinds import StrandKind
from stenograph.core.telemetry import GrammarStep, SessionEnd, TurnEnd, TurnReport
from stenograph.core.types import Stage
from stenograph.engine.base import EngineState, EngineStatus, Outcome

BODY_BYTES = "body_bytes"
"""The one limit that is not a `Limit`: the server refuses a body with more bytes with 413."""

DRIFT_CLASSES = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")

_STAGE_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""A stage takes anything from a dictionary look-up to a long generation."""
_TTFT_BOUNDS_S = _STAGE_BOUNDS_S[3:]
"""Nothing gets from a socket to a token in less than a millisecond."""
_TOKEN_BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0),
)
"""Fine between 1 and 200 ms, where engines differ; above it are stalls."""

_GRAMMAR_BOUNDS_S = (0.00001, 0.000025, 0.00005, *_STAGE_BOUNDS_S[:17])
"""A mask is filled in some 0.1 ms, a grammar compiled in anything up to its deadline of 30 s."""

ENGINE_LABEL = "engine"


class MetricType(enum.StrEnum):
    """The type of a metric, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One metric. `values` of its one label are shown from the start, at 0; `is_open`: others may come.

    `bounds` are the upper ends of a histogram's buckets, ascending, without the infinite one. `by_engine`: read of each
    engine at the time of a scrape, whose name is the label before the other. Equal only to itself.
    """

    name: str
    type: MetricType
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    is_open: bool = False
    bounds: tuple[float, ...] = ()
    by_engine: bool = False

    def __post_init__(self) -> None:
        if (self.label is None) != (not self.values and not self.is_open):
            raise ValueError(f"{self.name}: label values without a label, or a label without values")
        if (self.type is MetricType.HISTOGRAM) != bool(self.bounds):
            raise ValueError(f"{self.name}: a histogram, and nothing else, has bounds")

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels: the engine's where there is one, and the other, if any."""
        return (*((ENGINE_LABEL,) if self.by_engine else ()), *(() if self.label is None else (self.label,)))


def _error_codes(kind: type[StenographError] = StenographError) -> Iterator[str]:
    """Codes of the tree's leaves."""
    below = kind.__subclasses__()
    if not below:
        yield kind.code
    for child in below:
        yield from _error_codes(child)


def _counter(
    name: str, meaning: str, *, label: str | None = None, values: Iterable[str] = (), is_open: bool = False
) -> Metric:
    once = tuple(dict.fromkeys(map(str, values)))
    return Metric(name=name, type=MetricType.COUNTER, help=meaning, label=label, values=once, is_open=is_open)


def _gauge(name: str, meaning: str, *, label: str | None = None) -> Metric:
    return Metric(name=name, type=MetricType.GAUGE, help=meaning, label=label, is_open=label is not None)


def _of_engine(
    name: str, type_: MetricType, meaning: str, *, label: str | None = None, values: Iterable[str] = ()
) -> Metric:
    once = tuple(map(str, values))
    return Metric(name=name, type=type_, help=meaning, label=label, values=once, by_engine=True)


def _histogram(
    name: str, meaning: str, bounds: tuple[float, ...], *, label: str | None = None, values: Iterable[str] = ()
) -> Metric:
    once = tuple(map(str, values))
    return Metric(name=name, type=MetricType.HISTOGRAM, help=meaning, label=label, values=once, bounds=bounds)


TURNS = _counter("stenograph_turns_total", "Turns, by how they ended.", label="end", values=TurnEnd)
LABELLED_TURNS = _counter(
    "stenograph_labelled_turns_total",
    "Turns of sessions whose requests a rule labels, by the kind that it says.",
    label="kind",
    values=StrandKind,
)
TURN_FAILURES = _counter(
    "stenograph_turn_failures_total",
    "Turns that failed, by the error's code.",
    label="code",
    values=sorted(_error_codes()),
    is_open=True,
)
UPSTREAM_INVALID = _counter(
    "stenograph_upstream_invalid_total",
    "Turns whose engine sent an invalid reply (502), by the law that it broke.",
    label="law",
    is_open=True,
)
TURNS_ABORTED = _counter(
    "stenograph_turns_aborted_total", "Turns that the engine ended early, with finish reason abort."
)
STAGE = _histogram(
    "stenograph_stage_seconds",
    "Time that a turn spent in a stage; render, tokenize, queue and prefill are the parts of the time to the first "
    "token.",
    _STAGE_BOUNDS_S,
    label="stage",
    values=Stage,
)
TTFT = _histogram(
    "stenograph_ttft_seconds", "Time from a request's first byte to its first token; streaming engines.", _TTFT_BOUNDS_S
)
TPOT = _histogram(
    "stenograph_tpot_seconds",
    "Mean time per token of a turn, after its first step; streaming engines.",
    _TOKEN_BOUNDS_S,
)
ITL = _histogram(
    "stenograph_itl_seconds", "Time between two steps that sampled tokens; streaming engines.", _TOKEN_BOUNDS_S
)
GRAMMAR = _histogram(
    "stenograph_grammar_seconds",
    "Time the embedded engine spent on grammars: compiling one, filling a token's mask, accepting a token.",
    _GRAMMAR_BOUNDS_S,
    label="step",
    values=GrammarStep,
)
PROMPT_TOKENS = _counter(
    "stenograph_prompt_tokens_total", "Prompt tokens of the turns that got a reply, cached ones included."
)
COMPLETION_TOKENS = _counter("stenograph_completion_tokens_total", "Sampled tokens, wasted ones included.")
KEPT_TOKENS = _counter(
    "stenograph_kept_prompt_tokens_total",
    "Prompt tokens that were in the session's line before the turn; an engine need not compute them again.",
)
CACHED_TOKENS = _counter("stenograph_cached_tokens_total", "Prompt tokens that the engine did not compute again.")
ABORTED_TOKENS = _counter(
    "stenograph_aborted_tokens_total", "Tokens of turns that the engine ended early, with finish reason abort."
)
WASTED_TOKENS = _counter("stenograph_wasted_tokens_total", "Sampled tokens of turns that failed or were abandoned.")
REWRITES = _counter(
    "stenograph_rewrites_total", "Changes to what clients sent, by their rules.", label="rule", is_open=True
)
DISCARDED_TURNS = _counter(
    "stenograph_discarded_turns_total", "Committed turns that a later turn of their session replaced."
)
DISCARDED_TOKENS = _counter(
    "stenograph_discarded_tokens_total", "Sampled tokens of the committed turns that a later turn replaced."
)
ERRORS = _counter(
    "stenograph_errors_total",
    "Error responses sent to clients, by code.",
    label="code",
    values=sorted(_error_codes()),
    is_open=True,
)
LIMITS = _counter(
    "stenograph_limits_total",
    "Requests refused by a limit, by limit.",
    label="limit",
    values=[*Limit, BODY_BYTES],
)
RETRIES = _counter(
    "stenograph_retries_total",
    "Repeated requests that joined a running turn or got a finished turn's reply again.",
    label="answer",
    values=["joined", "redelivered"],
)
SESSIONS_ENDED = _counter(
    "stenograph_sessions_ended_total", "Sessions that ended, by reason.", label="end", values=SessionEnd
)
OUTCOMES = _counter(
    "stenograph_session_outcomes_total",
    "Sessions that ended, by the verdict of their outcome; none: they ended without one.",
    label="verdict",
    values=[*RolloutVerdict, NO_VERDICT],
)
DRIFT = _counter(
    "stenograph_drift_total",
    "Differences between recorded tokens and a new render of their messages, by class.",
    label="class",
    values=DRIFT_CLASSES,
)
UNASKED_REPLAY = _counter(
    "stenograph_unasked_replay_total",
    "Replay payloads in replies to turns that did not request them; they are not recorded.",
    label="payload",
    values=["routed_experts", "indexer_topk"],
)
LOOP_LAG = _histogram(
    "stenograph_loop_lag_seconds", "How late the event loop's heartbeat, due every 10 ms, came.", _TOKEN_BOUNDS_S
)
SESSIONS = _gauge("stenograph_sessions", "Sessions held now, including those being deleted.")
TURNS_IN_FLIGHT = _gauge("stenograph_turns_in_flight", "Turns running now.")
ENGINE_READY = _gauge("stenograph_engine_ready", "1 if the engine takes turns now, else 0.")
ENGINE_UP = _of_engine("stenograph_engine_up", MetricType.GAUGE, "1 if this engine takes turns now, else 0.")
ENGINE_RUNNING = _of_engine(
    "stenograph_engine_turns_in_flight", MetricType.GAUGE, "This server's turns that the engine is running now."
)
ENGINE_REQUESTS = _of_engine(
    "stenograph_engine_requests_total",
    MetricType.COUNTER,
    "Turns given to this engine of a fleet, by how they ended; moved turns went on to another engine.",
    label="outcome",
    values=Outcome,
)
ENGINE_EXPECTED_CACHED = _of_engine(
    "stenograph_engine_expected_cached_tokens_total",
    MetricType.COUNTER,
    "Prompt tokens that the session's last turn had left in the cache of this engine of a fleet.",
)
ENGINE_CACHED = _of_engine(
    "stenograph_engine_cached_tokens_total",
    MetricType.COUNTER,
    "Prompt tokens of the same turns that this engine of a fleet did not compute again.",
)
BUILD_INFO = _gauge("stenograph_build_info", "Always 1; the label is the running version.", label="version")

METRICS: tuple[Metric, ...] = (
    *(TURNS, LABELLED_TURNS, TURN_FAILURES, UPSTREAM_INVALID, TURNS_ABORTED),
    *(STAGE, TTFT, TPOT, ITL, GRAMMAR),
    *(PROMPT_TOKENS, COMPLETION_TOKENS, KEPT_TOKENS, CACHED_TOKENS, ABORTED_TOKENS, WASTED_TOKENS),
    REWRITES,
    *(DISCARDED_TURNS, DISCARDED_TOKENS),
    *(ERRORS, LIMITS, RETRIES, SESSIONS_ENDED, OUTCOMES, DRIFT, UNASKED_REPLAY),
    LOOP_LAG,
    *(SESSIONS, TURNS_IN_FLIGHT, ENGINE_READY),
    *(ENGINE_UP, ENGINE_RUNNING, ENGINE_REQUESTS, ENGINE_EXPECTED_CACHED, ENGINE_CACHED),
    BUILD_INFO,
)
"""Every metric, in the order of the exposition."""

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def _family_of_engines(metric: Metric, engines: Sequence[EngineStatus]) -> _Family:
    """Collects the numbers of each engine. A single engine has no numbers that only a fleet counts."""
    kind = GaugeMetricFamily if metric.type is MetricType.GAUGE else CounterMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for engine in engines:
        for value, number in _numbers_of(metric, engine).items():
            family.add_metric([engine.name, value][: len(metric.labels)], number)
    return family


def _numbers_of(metric: Metric, engine: EngineStatus) -> Mapping[str, float]:
    """An engine's numbers by the value of the metric's other label; by "" where it has none."""
    if metric is ENGINE_UP:
        return {"": engine.health.state is EngineState.READY}
    if metric is ENGINE_RUNNING:
        return {"": engine.num_running}
    counts = engine.counts
    if counts is None:
        return {}
    if metric is ENGINE_REQUESTS:
        return {outcome: counts.outcomes.get(outcome, 0) for outcome in Outcome}
    return {"": counts.num_expected_cached if metric is ENGINE_EXPECTED_CACHED else counts.num_cached}


class _Counter:
    """Numbers that only grow, one per label value, or a single one under ""."""

    __slots__ = ("_counts", "_metric")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._counts: dict[str, int] = dict.fromkeys(("",) if metric.label is None else metric.values, 0)

    def add(self, num: int = 1, value: str = "") -> None:
        self._counts[value] = self._counts.get(value, 0) + num

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self._metric.name, self._metric.help, labels=self._metric.labels)
        for value, count in self._counts.copy().items():  # a copy: a scrape may run on another thread
            family.add_metric([value], count)
        return family


class _Histogram:
    """The number of durations in each bucket, and their sum; one of each per label value, or a single one."""

    __slots__ = ("_bounds", "_counts", "_les", "_metric", "_sums")

    def __init__(self, metric: Metric) -> None:
        values = ("",) if metric.label is None else metric.values
        self._metric = metric
        self._bounds = metric.bounds
        self._les = [*map(str, metric.bounds), "+Inf"]
        self._counts = {value: [0] * len(self._les) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def observe(self, durations_s: Iterable[float], value: str = "") -> None:
        counts, bounds, total = self._counts[value], self._bounds, 0.0
        for duration in durations_s:
            counts[bisect_left(bounds, duration)] += 1  # a bucket's upper end belongs to it
            total += duration
        self._sums[value] += total

    def family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=self._metric.labels)
        for value, counts in self._counts.items():
            buckets = list(zip(self._les, accumulate(counts), strict=True))
            family.add_metric([value], buckets, self._sums[value])
        return family


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probes:
    num_sessions: Callable[[], int]
    num_in_flight: Callable[[], int]
    engine_ready: Callable[[], bool]
    engines: Callable[[], Sequence[EngineStatus]]


class Metrics(Collector):
    """The counts of one app. Counting is synchronous, does no I/O, never raises, and belongs on the app's loop."""

    def __init__(self, *, version: str) -> None:
        self._version = version
        self._probes: _Probes | None = None
        own = [metric for metric in METRICS if not metric.by_engine]
        self._counters = {metric: _Counter(metric) for metric in own if metric.type is MetricType.COUNTER}
        self._histograms = {metric: _Histogram(metric) for metric in METRICS if metric.type is MetricType.HISTOGRAM}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def __repr__(self) -> str:
        return f"<Metrics {self._counters[TURNS].total} turns, {self._counters[ERRORS].total} errors>"

    def bind(
        self,
        *,
        num_sessions: Callable[[], int],
        num_in_flight: Callable[[], int],
        engine_ready: Callable[[], bool],
        engines: Callable[[], Sequence[EngineStatus]],
    ) -> None:
        """Set the sources of the gauges. Before this a scrape leaves them out: absent is not zero.

        They are called at each scrape, on its thread, and must be quick and not raise.
        """
        self._probes = _Probes(
            num_sessions=num_sessions, num_in_flight=num_in_flight, engine_ready=engine_ready, engines=engines
        )

    def turn_ended(self, report: TurnReport) -> None:
        """Count a turn. Its stage `reply`, if it has one, is left to `reply_delivered`, so that it counts once."""
        self._counters[TURNS].add(value=report.end)
        if report.kind is not None:
            self._counters[LABELLED_TURNS].add(value=report.kind)
        if report.code is not None:
            self._counters[TURN_FAILURES].add(value=report.code)
        if report.law is not None:
            self._counters[UPSTREAM_INVALID].add(value=report.law)
        if report.was_aborted:
            self._counters[TURNS_ABORTED].add()
            self._counters[ABORTED_TOKENS].add(report.num_completion)
        for stage, duration_s in report.stages_s.items():
            if stage is not Stage.REPLY:
                self._histograms[STAGE].observe((duration_s,), stage)
        if report.ttft_s is not None:
            self._histograms[TTFT].observe((report.ttft_s,))
        if report.tpot_s is not None:
            self._histograms[TPOT].observe((report.tpot_s,))
        self._histograms[ITL].observe(report.itl_s)
        self._counters[PROMPT_TOKENS].add(report.num_prompt)
        self._counters[COMPLETION_TOKENS].add(report.num_completion)
        self._counters[KEPT_TOKENS].add(report.num_kept)
        self._counters[CACHED_TOKENS].add(report.num_cached)
        self._counters[WASTED_TOKENS].add(report.num_wasted)
        for payload in report.unasked_replay:
            self._counters[UNASKED_REPLAY].add(value=payload)
        for rewrite in report.rewrites:
            self._counters[REWRITES].add(value=rewrite.rule)
        self._counters[DISCARDED_TURNS].add(report.num_discarded_turns)
        self._counters[DISCARDED_TOKENS].add(report.num_discarded_tokens)

    def reply_delivered(self, reply_s: float) -> None:
        """Count the stage `reply` of a turn."""
        self._histograms[STAGE].observe((reply_s,), Stage.REPLY)

    def retry_answered(self, *, joined: bool) -> None:
        """Count a repeated request."""
        self._counters[RETRIES].add(value="joined" if joined else "redelivered")

    def session_ended(self, end: SessionEnd, verdict: RolloutVerdict | None = None) -> None:
        """Count a session that ended, and the verdict of its outcome."""
        self._counters[SESSIONS_ENDED].add(value=end)
        self._counters[OUTCOMES].add(value=NO_VERDICT if verdict is None else verdict)

    def error_sent(self, code: str) -> None:
        """Count an error answer to a client, by the error's `code`."""
        self._counters[ERRORS].add(value=code)

    def limit_hit(self, limit: str) -> None:
        """Count a refusal by a `Limit`, or by `BODY_BYTES`."""
        self._counters[LIMITS].add(value=limit)

    def loop_lagged(self, lag_s: float) -> None:
        """Count one heartbeat of the event loop."""
        self._histograms[LOOP_LAG].observe((lag_s,))

    def grammar_took(self, step: GrammarStep, durations_s: Iterable[float]) -> None:
        """Count what the embedded engine did with grammars."""
        self._histograms[GRAMMAR].observe(durations_s, step)

    def drift_found(self, counts: Mapping[str, int]) -> None:
        """Count differences, by drift class."""
        for drift_class, num in counts.items():
            self._counters[DRIFT].add(num, drift_class)

    def exposition(self) -> tuple[bytes, str]:
        """Everything counted so far, as the body of an answer and its content type.

        Takes about 2 ms and reads files under /proc, so it is work for a worker thread: no number is torn by that, but
        a turn that ends meanwhile may be in one metric and not yet in another.
        """
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[_Family]:
        """The families of `METRICS`, in that order, for prometheus_client."""
        gauges = self._read_gauges()
        engines = () if self._probes is None else self._probes.engines()
        for metric in METRICS:
            if metric.by_engine:
                if self._probes is not None:
                    yield _family_of_engines(metric, engines)
            elif metric.type is MetricType.COUNTER:
                yield self._counters[metric].family()
            elif metric.type is MetricType.HISTOGRAM:
                yield self._histograms[metric].family()
            elif metric in gauges:
                family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                family.add_metric([self._version] if metric is BUILD_INFO else [], gauges[metric])
                yield family

    def _read_gauges(self) -> dict[Metric, float]:
        if self._probes is None:
            return {BUILD_INFO: 1}
        return {
            SESSIONS: self._probes.num_sessions(),
            TURNS_IN_FLIGHT: self._probes.num_in_flight(),
            ENGINE_READY: self._probes.engine_ready(),
            BUILD_INFO: 1,
        }
