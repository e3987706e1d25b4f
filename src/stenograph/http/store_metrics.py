"""The metrics of the store, read at the time of a scrape. Without a store there are none: absent is not zero."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from stenograph.http.metric_table import Metric, MetricType
from stenograph.session.manager import SessionManager
from stenograph.session.shelf import Shelf

ROWS = Metric(
    name="stenograph_store_rows_total", type=MetricType.COUNTER, help="Requests whose turns the store has written."
)
GROUPS = Metric(
    name="stenograph_store_groups_total",
    type=MetricType.COUNTER,
    help="Groups that they were written in; a group is synced once.",
)
BYTES = Metric(name="stenograph_store_bytes_total", type=MetricType.COUNTER, help="Bytes of these rows.")
BUSY = Metric(
    name="stenograph_store_busy_seconds_total",
    type=MetricType.COUNTER,
    help="Seconds that the store's thread was at work.",
)
FAILURES = Metric(
    name="stenograph_store_failures_total",
    type=MetricType.COUNTER,
    help="Writes that failed: because the disk was full, or for any other reason, after which the server ends.",
    label="reason",
    values=("full", "failed"),
)
READ = Metric(
    name="stenograph_store_sessions_read_total",
    type=MetricType.COUNTER,
    help="Sessions that were read from the store, to go on or to be looked at.",
)
DAMAGED = Metric(
    name="stenograph_store_sessions_damaged_total",
    type=MetricType.COUNTER,
    help="Reads that found a session damaged.",
)
EVICTED = Metric(
    name="stenograph_sessions_evicted_total",
    type=MetricType.COUNTER,
    help="Sessions that left memory and stayed in the store, because of --max-held-tokens or --max-sessions.",
)
USABLE = Metric(
    name="stenograph_store_usable", type=MetricType.GAUGE, help="1 while the store takes turns, 0 after it has failed."
)

STORE_METRICS = (ROWS, GROUPS, BYTES, BUSY, FAILURES, READ, DAMAGED, EVICTED, USABLE)


class StoreMetrics(Collector):
    """Reads the counts of a store, and of the sessions that come from it and go to it."""

    def __init__(self, shelf: Shelf, manager: SessionManager) -> None:
        self._shelf = shelf
        self._manager = manager

    def __repr__(self) -> str:
        return f"<StoreMetrics of {self._shelf!r}>"

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families of `STORE_METRICS`, in that order."""
        yield from families(self._numbers())

    def _numbers(self) -> Mapping[Metric, Mapping[str, float]]:
        stats = self._shelf.store.stats
        return {
            ROWS: {"": stats.num_rows},
            GROUPS: {"": stats.num_groups},
            BYTES: {"": stats.num_bytes},
            BUSY: {"": stats.write_s},
            FAILURES: {"full": stats.num_full, "failed": stats.num_failed},
            READ: {"": self._shelf.num_read},
            DAMAGED: {"": self._shelf.num_damaged},
            EVICTED: {"": self._manager.sessions.num_evicted},
            USABLE: {"": self._shelf.store.failure is None},
        }


def families(
    numbers: Mapping[Metric, Mapping[str, float]],
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Each metric with its number, or with one for each value of its label."""
    for metric, found in numbers.items():
        kind: Callable[..., CounterMetricFamily | GaugeMetricFamily]
        kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for value, number in found.items():
            family.add_metric([value] if metric.label else [], number)
        yield family
