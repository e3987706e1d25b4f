"""The server's metrics in Prometheus' text format: implements `core.telemetry.Telemetry` for `GET /metrics`.

Owns the counts of one app; metric_table.py lists the metrics and how each is read. There is no global state, so many
apps can live in one process.

The counts are plain numbers, handed to prometheus_client when it asks for them: its own `Histogram.observe`, with two
locks and a linear search, takes 107 µs for 100 gaps between tokens, and `_Histogram` 12 µs (CPython 3.11).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import cast

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from stenograph.core.stages import Stage
from stenograph.core.telemetry import GrammarStep, SessionReport, TurnEnd, TurnReport
from stenograph.engine.base import EngineStatus
from stenograph.http.metric_table import (
    ABORTED_TOKENS,
    DRIFT,
    ERRORS,
    GRAMMAR,
    LIMITS,
    LOOP_LAG,
    METRICS,
    RETRIES,
    REWRITES,
    STAGE,
    TURNS,
    WASTED_TOKENS,
    Metric,
    MetricType,
    Reading,
    Serving,
)

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def _family(metric: Metric, numbers: Iterable[tuple[Sequence[str], float]]) -> _Family:
    """The numbers of a counter or gauge, each with the values of its labels."""
    kind = GaugeMetricFamily if metric.type is MetricType.GAUGE else CounterMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for values, number in numbers:
        family.add_metric(values[: len(metric.labels)], number)
    return family


def _reader(metric: Metric) -> Callable[[object], Reading]:
    read = metric.read
    return attrgetter(read) if isinstance(read, str) else cast("Callable[[object], Reading]", read)


def _numbers(metric: Metric, source: object) -> Mapping[str, float]:
    """Numbers read from a source, by label value; a single one is under ""."""
    reading = _reader(metric)(source)
    if reading is None:
        return {}
    return reading if isinstance(reading, Mapping) else {"": cast("float", reading)}


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

    def observe_each(self, durations_s: Mapping[Stage, float], *, but: Stage) -> None:
        counts, bounds, sums = self._counts, self._bounds, self._sums
        for value, duration_s in durations_s.items():
            if value is not but:
                counts[value][bisect_left(bounds, duration_s)] += 1
                sums[value] += duration_s

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(self._counts[""])

    def family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=self._metric.labels)
        for value, counts in self._counts.items():
            buckets = list(zip(self._les, accumulate(counts), strict=True))
            family.add_metric([value], buckets, self._sums[value])
        return family


class _Counted:
    """The counters and histograms read from each report of one type.

    They are sorted out once: a turn's report comes on the hot path.
    """

    __slots__ = ("_sums", "_tallies", "_times")

    def __init__(
        self, of: type, counts: Mapping[Metric, dict[str, float]], histograms: Mapping[Metric, _Histogram]
    ) -> None:
        read = [(metric, _reader(metric)) for metric in METRICS if metric.of is of]
        self._sums = [
            (cast("Callable[[object], float]", reader), counts[one])
            for one, reader in read
            if one in counts and one.label is None
        ]
        self._tallies = [(reader, counts[one]) for one, reader in read if one in counts and one.label is not None]
        self._times = [(reader, histograms[one]) for one, reader in read if one in histograms]

    def add(self, report: object) -> None:
        for number, counts in self._sums:
            counts[""] += number(report)
        for reader, counts in self._tallies:
            if found := reader(report):
                _tally(counts, found)
        for reader, histogram in self._times:
            durations_s = reader(report)
            if isinstance(durations_s, float):
                histogram.observe(durations_s)
            elif durations_s:
                histogram.observe_all(cast("Sequence[float]", durations_s))


def _tally(counts: dict[str, float], found: Reading) -> None:
    """Count a label value once, each of several once, or add numbers by label value."""
    if isinstance(found, str):
        counts[found] += 1
    elif isinstance(found, Mapping):
        for value, number in found.items():
            counts[value] += number
    else:
        for value in cast("Sequence[str]", found):
            counts[value] += 1


class _PartMetrics(Collector):
    """Metrics read from these sources at the time of a scrape."""

    def __init__(self, metrics: Sequence[Metric], sources: Sequence[object]) -> None:
        self._metrics = metrics
        self._sources = sources

    def collect(self) -> Iterator[_Family]:
        for metric in self._metrics:
            if (family := _read_family(metric, self._sources)) is not None:
                yield family


def _read_family(metric: Metric, sources: Sequence[object]) -> _Family | None:
    """The metric as its source has it; None where the source is not among these."""
    found = next((one for one in sources if metric.of is not None and isinstance(one, metric.of)), None)
    if found is None:
        return None
    return _family(metric, (([value], number) for value, number in _numbers(metric, found).items()))


class Metrics(Collector):
    """The counts of one app. Counting is synchronous, does no I/O, never raises, and belongs on the app's loop."""

    def __init__(self) -> None:
        self._serving: Serving | None = None
        self._counts = {
            metric: defaultdict[str, float](int, dict.fromkeys(("",) if metric.label is None else metric.values, 0))
            for metric in METRICS
            if metric.type is MetricType.COUNTER and not metric.by_engine
        }
        """Numbers that only grow, by label value; a single one is under ""."""
        self._histograms = {metric: _Histogram(metric) for metric in METRICS if metric.type is MetricType.HISTOGRAM}
        self._of_turns = _Counted(TurnReport, self._counts, self._histograms)
        self._of_sessions = _Counted(SessionReport, self._counts, self._histograms)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def __repr__(self) -> str:
        return f"<Metrics {self.count_of(TURNS)} turns, {self.count_of(ERRORS)} errors>"

    def bind(self, serving: Serving) -> None:
        """Set the source of the gauges. Before this a scrape leaves them out: absent is not zero.

        It is read at each scrape, on its thread: the reading must be quick and not raise.
        """
        self._serving = serving

    def show(self, metrics: Sequence[Metric], *sources: object) -> None:
        """Show metrics of a part, read from these sources at each scrape, beside these."""
        self._registry.register(_PartMetrics(metrics, sources))

    def turn_ended(self, report: TurnReport) -> None:
        """Count a turn. Its stage `reply`, if it has one, is left to `reply_delivered`, so it counts once."""
        self._of_turns.add(report)
        self._histograms[STAGE].observe_each(report.stages_s, but=Stage.REPLY)
        if report.was_aborted:
            self._counts[ABORTED_TOKENS][""] += report.num_completion
        for rewrite in report.rewrites:
            self._counts[REWRITES][rewrite.rule] += 1
        if report.end is not TurnEnd.COMMITTED and (num_wasted := report.num_wasted):
            self._counts[WASTED_TOKENS][""] += num_wasted

    def reply_delivered(self, reply_s: float) -> None:
        """Count the stage `reply` of a turn."""
        self._histograms[STAGE].observe(reply_s, Stage.REPLY)

    def retry_answered(self, *, joined: bool) -> None:
        """Count a repeated request."""
        self._counts[RETRIES]["joined" if joined else "redelivered"] += 1

    def session_ended(self, report: SessionReport) -> None:
        """Count an ended session."""
        self._of_sessions.add(report)

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
        """Count the embedded engine's work with grammars."""
        self._histograms[GRAMMAR].observe_all(durations_s, step)

    def drift_found(self, counts: Mapping[str, int]) -> None:
        """Count differences, by drift class."""
        for drift_class, num in counts.items():
            self._counts[DRIFT][drift_class] += num

    def count_of(self, metric: Metric) -> int:
        """A counter's sum over all values of its label."""
        return int(sum(self._counts[metric].values()))

    def buckets_of(self, metric: Metric) -> tuple[int, ...]:
        """A histogram's number of durations in each bucket; it has no label."""
        return self._histograms[metric].buckets

    def exposition(self) -> tuple[bytes, str]:
        """Everything counted so far, as the body of an answer and its content type.

        Takes about 2 ms and reads files under /proc, so it is work for a worker thread: no number is torn by this, but
        a turn ending meanwhile may be in one metric and not yet in another.
        """
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[_Family]:
        """The families of `METRICS`, in that order, for prometheus_client."""
        serving = self._serving
        sources = (self,) if serving is None else (serving, self)
        engines: Sequence[EngineStatus] = () if serving is None else serving.engine.statuses()
        for metric in METRICS:
            if metric.by_engine:
                if serving is not None:
                    yield _engines_family(metric, engines)
            elif metric.type is MetricType.COUNTER:
                counts = dict(self._counts[metric])  # a copy: a scrape may be on another thread
                yield _family(metric, (([value], count) for value, count in counts.items()))
            elif metric.type is MetricType.HISTOGRAM:
                yield self._histograms[metric].family()
            elif (family := _read_family(metric, sources)) is not None:
                yield family


def _engines_family(metric: Metric, engines: Sequence[EngineStatus]) -> _Family:
    """Collects the numbers of each engine. A single engine has none of the numbers counted by a fleet alone."""
    return _family(
        metric,
        (([one.name, value], number) for one in engines for value, number in _numbers(metric, one).items()),
    )
