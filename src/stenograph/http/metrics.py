"""The server's metrics in Prometheus' text format: implements `core.telemetry.Telemetry` for `GET /metrics`.

Owns the counts of one app; metric_table.py has their names. Knows neither sessions nor an engine: what is read at the
time of a scrape comes through `bind`. There is no global state, so many apps can live in one process.

The counts are plain numbers, handed to prometheus_client when it asks for them: its own `Histogram.observe`, with two
locks and a linear search, takes 107 µs for 100 gaps between tokens, and `_Histogram` 12 µs (CPython 3.11).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from stenograph.core.outcome import NO_VERDICT
from stenograph.core.stages import Stage
from stenograph.core.telemetry import GrammarStep, SessionReport, TurnEnd, TurnReport
from stenograph.core.waste import WasteCounts
from stenograph.engine.base import EngineState, EngineStatus, Outcome
from stenograph.http.metric_table import (
    ABORTED_TOKENS,
    BUILD_INFO,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    DISCARDED_TOKENS,
    DISCARDED_TURNS,
    DRIFT,
    ENDED_TOKENS,
    ENGINE_EXPECTED_CACHED,
    ENGINE_READY,
    ENGINE_REQUESTS,
    ENGINE_RUNNING,
    ENGINE_UP,
    ERRORS,
    GRAMMAR,
    ITL,
    KEPT_TOKENS,
    LABELLED_TURNS,
    LIMITS,
    LOOP_LAG,
    METRICS,
    OUTCOMES,
    PROMPT_TOKENS,
    RETRIES,
    REWRITES,
    SESSIONS,
    SESSIONS_ENDED,
    STAGE,
    TPOT,
    TTFT,
    TURN_FAILURES,
    TURNS,
    TURNS_ABORTED,
    TURNS_IN_FLIGHT,
    UNASKED_REPLAY,
    UPSTREAM_INVALID,
    WASTED_TOKENS,
    Metric,
    MetricType,
)

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


def _zeros(metric: Metric) -> defaultdict[str, int]:
    return defaultdict(int, dict.fromkeys(("",) if metric.label is None else metric.values, 0))


def _family_of_counts(metric: Metric, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for value, count in counts.items():
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

    def observe(self, duration_s: float, value: str = "") -> None:
        self._counts[value][bisect_left(self._bounds, duration_s)] += 1  # a bucket's upper end belongs to it
        self._sums[value] += duration_s

    def observe_all(self, durations_s: Iterable[float], value: str = "") -> None:
        counts, bounds, total = self._counts[value], self._bounds, 0.0
        for duration in durations_s:
            counts[bisect_left(bounds, duration)] += 1
            total += duration
        self._sums[value] += total

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(self._counts[""])

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
        self.waste = WasteCounts()
        """Fates of sampled tokens, by group."""
        own = [metric for metric in METRICS if not metric.by_engine]
        self._counts = {metric: _zeros(metric) for metric in own if metric.type is MetricType.COUNTER}
        """Numbers that only grow, by label value; a single one is under ""."""
        self._histograms = {metric: _Histogram(metric) for metric in METRICS if metric.type is MetricType.HISTOGRAM}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def __repr__(self) -> str:
        return f"<Metrics {self.count_of(TURNS)} turns, {self.count_of(ERRORS)} errors>"

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

    def register(self, collector: Collector) -> None:
        """Show another's metrics beside these."""
        self._registry.register(collector)

    def turn_ended(self, report: TurnReport) -> None:
        """Count a turn. Its stage `reply`, if it has one, is left to `reply_delivered`, so that it counts once."""
        self._counts[TURNS][report.end] += 1
        if report.kind is not None:
            self._counts[LABELLED_TURNS][report.kind] += 1
        if report.code is not None:
            self._counts[TURN_FAILURES][report.code] += 1
        if report.law is not None:
            self._counts[UPSTREAM_INVALID][report.law] += 1
        if report.was_aborted:
            self._counts[TURNS_ABORTED][""] += 1
            self._counts[ABORTED_TOKENS][""] += report.num_completion
        for stage, duration_s in report.stages_s.items():
            if stage is not Stage.REPLY:
                self._histograms[STAGE].observe(duration_s, stage)
        if report.ttft_s is not None:
            self._histograms[TTFT].observe(report.ttft_s)
        if report.tpot_s is not None:
            self._histograms[TPOT].observe(report.tpot_s)
        if report.itl_s:
            self._histograms[ITL].observe_all(report.itl_s)
        self._counts[PROMPT_TOKENS][""] += report.num_prompt
        self._counts[COMPLETION_TOKENS][""] += report.num_completion
        self._counts[KEPT_TOKENS][""] += report.num_kept
        self._counts[CACHED_TOKENS][""] += report.num_cached
        if report.end is not TurnEnd.COMMITTED and (num_wasted := report.num_wasted):
            self._counts[WASTED_TOKENS][""] += num_wasted
            self.waste.turn_wasted(report.group, num_wasted)
        for payload in report.unasked_replay:
            self._counts[UNASKED_REPLAY][payload] += 1
        for rewrite in report.rewrites:
            self._counts[REWRITES][rewrite.rule] += 1
        self._counts[DISCARDED_TURNS][""] += report.num_discarded_turns
        self._counts[DISCARDED_TOKENS][""] += report.num_discarded_tokens

    def reply_delivered(self, reply_s: float) -> None:
        """Count the stage `reply` of a turn."""
        self._histograms[STAGE].observe(reply_s, Stage.REPLY)

    def retry_answered(self, *, joined: bool) -> None:
        """Count a repeated request."""
        self._counts[RETRIES]["joined" if joined else "redelivered"] += 1

    def session_ended(self, report: SessionReport) -> None:
        """Count a session that ended, the verdict of its outcome, and what became of its sampled tokens."""
        self._counts[SESSIONS_ENDED][report.end] += 1
        self._counts[OUTCOMES][NO_VERDICT if report.verdict is None else report.verdict] += 1
        for fate, num_tokens in report.num_tokens.items():
            self._counts[ENDED_TOKENS][fate] += num_tokens
        self.waste.session_ended(report.group, report.num_tokens)

    def error_sent(self, code: str) -> None:
        """Count an error answer to a client, by the error's `code`."""
        self._counts[ERRORS][code] += 1

    def limit_hit(self, limit: str) -> None:
        """Count a refusal by a `Limit`, or by `BODY_BYTES`."""
        self._counts[LIMITS][limit] += 1

    def loop_lagged(self, lag_s: float) -> None:
        """Count one heartbeat of the event loop."""
        self._histograms[LOOP_LAG].observe(lag_s)

    def grammar_took(self, step: GrammarStep, durations_s: Iterable[float]) -> None:
        """Count what the embedded engine did with grammars."""
        self._histograms[GRAMMAR].observe_all(durations_s, step)

    def drift_found(self, counts: Mapping[str, int]) -> None:
        """Count differences, by drift class."""
        for drift_class, num in counts.items():
            self._counts[DRIFT][drift_class] += num

    def count_of(self, metric: Metric) -> int:
        """A counter's sum over all values of its label."""
        return sum(self._counts[metric].values())

    def buckets_of(self, metric: Metric) -> tuple[int, ...]:
        """A histogram's number of durations in each bucket; it has no label."""
        return self._histograms[metric].buckets

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
                yield _family_of_counts(metric, dict(self._counts[metric]))  # a copy: a scrape may be on another thread
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
