"""docs/metrics.md lists every metric with its type, label, label values, meaning and buckets, and nothing else."""

import re
from pathlib import Path

from stenograph.cluster.shared_store import OWNER_METRICS
from stenograph.cluster.worker import WORKER_METRICS
from stenograph.http.metric_table import METRICS, WEIGHT_METRICS, Metric
from stenograph.http.metrics import Metrics
from stenograph.http.session_services import STORE_METRICS
from stenograph.otel.tracing import TRACE_METRICS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows(heading: str) -> list[str]:
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def label_cell(metric: Metric) -> str:
    cells = ["`engine`: its address"] if metric.by_engine else []
    if metric.label is not None:
        values = "open" if metric.is_open else ", ".join(f"`{value}`" for value in metric.values)
        cells.append(f"`{metric.label}`: {values}")
    return "; ".join(cells)


def test_every_metric_is_listed_as_it_is() -> None:
    assert rows("Ours") == [
        f"| `{metric.name}` | {metric.type} | {label_cell(metric)} | {metric.help} |" for metric in METRICS
    ]


def test_every_metric_of_the_store_is_listed_as_it_is() -> None:
    assert rows("The store") == [
        f"| `{metric.name}` | {metric.type} | {label_cell(metric)} | {metric.help} |" for metric in STORE_METRICS
    ]
    assert rows("A shared database") == [
        f"| `{metric.name}` | {metric.type} | {label_cell(metric)} | {metric.help} |" for metric in OWNER_METRICS
    ]


def test_every_metric_of_weights_is_listed_as_it_is() -> None:
    assert rows("Weights") == [
        f"| `{metric.name}` | {metric.type} | {label_cell(metric)} | {metric.help} |" for metric in WEIGHT_METRICS
    ]


def test_every_metric_of_traces_is_listed_as_it_is() -> None:
    assert rows("Traces") == [
        f"| `{metric.name}` | {metric.type} | {label_cell(metric)} | {metric.help} |" for metric in TRACE_METRICS
    ]


def test_every_metric_of_a_worker_is_listed_as_it_is() -> None:
    assert rows("Several processes") == [
        f"| `{metric.name}` | {metric.type} | {label_cell(metric)} | {metric.help} |" for metric in WORKER_METRICS
    ]


def test_every_histogram_is_listed_with_its_buckets() -> None:
    assert rows("Buckets") == [
        f"| `{metric.name}` | {', '.join(f'{bound:g}' for bound in metric.bounds)} |"
        for metric in METRICS
        if metric.bounds
    ]


def test_what_the_process_shows_beside_them_is_listed() -> None:
    body, _ = Metrics().exposition()
    shown = set(re.findall(r"^# TYPE (\w+)", body.decode(), re.MULTILINE)) - {metric.name for metric in METRICS}
    listed = {row.split("`")[1] for row in rows("The process")}
    assert shown in (listed, set())  # none where there is no /proc
