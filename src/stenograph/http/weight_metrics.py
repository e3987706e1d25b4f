"""The metrics of weights: updates, whether turns wait, turns of mixed versions."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from stenograph.http.metric_table import Metric, MetricType
from stenograph.session.weight_sync import UpdateOutcome, WeightSync

UPDATES = Metric(
    name="stenograph_weight_updates_total",
    type=MetricType.COUNTER,
    help="Updates of weights, by outcome: taken by all engines, by some (partial), or by none (refused).",
    label="outcome",
    values=tuple(UpdateOutcome),
)
PAUSED = Metric(
    name="stenograph_generation_paused",
    type=MetricType.GAUGE,
    help="1 while new turns wait, because generation is paused or new weights come.",
)
MIXED = Metric(
    name="stenograph_mixed_version_turns_total",
    type=MetricType.COUNTER,
    help="Turns over a change of weights whose engine does not say which weights sampled which token.",
)
WEIGHT_METRICS = (UPDATES, PAUSED, MIXED)


class WeightMetrics(Collector):
    """Reads the counts of updates, and whether turns wait."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families of `WEIGHT_METRICS`, in that order."""
        updates = CounterMetricFamily(UPDATES.name, UPDATES.help, labels=UPDATES.labels)
        for outcome in UpdateOutcome:
            updates.add_metric([outcome], self._sync.outcomes[outcome])
        yield updates
        yield GaugeMetricFamily(PAUSED.name, PAUSED.help, value=float(self._sync.weights.is_held))
        yield CounterMetricFamily(MIXED.name, MIXED.help, value=self._sync.weights.num_mixed_turns)
