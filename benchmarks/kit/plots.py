"""Plots of artifacts, as PNG: latency and throughput against load, responsiveness against sessions, memory over time.

Needs matplotlib, which the extra `bench` brings. It is imported by name when a plot is drawn: all else does without.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.figures import LABELS, Goal, spread, values_of

WIDTH_INCHES, HEIGHT_INCHES, DPI = 5.2, 4.2, 120
COLOURS = ("tab:blue", "tab:red", "tab:green", "tab:orange")
TARGETS = {"server": "server", "before": "before", "direct": "straight at the engine"}
STYLES = {"server": "-", "before": "-.", "direct": ":"}
SERVING_PANELS = (
    ("time to the first token, ms", ("ttft_p50_ms", "ttft_p99_ms")),
    ("time per output token, ms", ("tpot_p50_ms", "tpot_p99_ms")),
    ("whole reply, ms", ("e2e_p50_ms", "e2e_p99_ms")),
    ("throughput, tokens/s", ("completion_tokens_per_s",)),
    ("throughput, chats/s", ("chats_per_s",)),
)
SESSION_PANELS = (
    ("latency of /health, ms", ("health_p50_ms", "health_p99_ms", "health_max_ms")),
    ("latency of a chat, ms", ("chat_p50_ms", "chat_p99_ms")),
    ("throughput, chats/s", ("chats_per_s",)),
)

Panels = Sequence[tuple[str, Sequence[str]]]
Points = Sequence[tuple[float, ScenarioResult]]


def plot_latency(artifact: Artifact, path: Path) -> None:
    """A run of `responsiveness`: a row a scenario, against sessions at once. Takes artifacts of `--levels`."""
    rows: dict[str, list[tuple[float, ScenarioResult]]] = {}
    for result in artifact.scenarios:
        rows.setdefault(f"{result.name}: {result.title}", []).append((result.sessions, result))
    _draw_rows(rows, SESSION_PANELS, path, load_label=lambda _: "sessions at once")


def plot_serving(artifact: Artifact, path: Path) -> None:
    """A run of `serving`: a row for closed loops and one for open ones, against the load that was offered."""
    rows: dict[str, list[tuple[float, ScenarioResult]]] = {}
    for result in artifact.scenarios:
        load = next(iter(result.raw.values()))[0]["load"]
        is_open = load["rate"] is not None
        title = "open loop" if is_open else "closed loop"
        rows.setdefault(title, []).append((load["rate"] if is_open else load["concurrency"], result))
    labels = {"open loop": "sessions that arrive in a second", "closed loop": "clients at once"}
    _draw_rows(rows, SERVING_PANELS, path, load_label=lambda title: labels[title])


def plot_soak(artifact: Artifact, path: Path) -> None:
    """A run of `soak`: memory and open files over time, and the turns so far."""
    (result,) = artifact.scenarios
    raw = result.raw["server"][0]
    minutes = [moment[0] / 60 for moment in raw["moments"]]
    series = (
        ("memory of the server, MiB", [moment[2] / 1024 for moment in raw["moments"]]),
        ("open files of the server", [moment[3] for moment in raw["moments"]]),
        ("turns so far", [moment[1] for moment in raw["moments"]]),
    )
    plots = _matplotlib()
    figure, axes = plots.subplots(1, len(series), figsize=(WIDTH_INCHES * len(series), HEIGHT_INCHES))
    for axis, (label, values) in zip(axes, series, strict=True):
        axis.plot(minutes, values, color=COLOURS[0], linewidth=1)
        axis.set(xlabel="minutes", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
    most = dict(result.goals).get("rss_growth_mib")
    early = values_of(result.figures["server"], "rss_early_mib")
    if most is not None and early:
        axes[0].axhline(early[0] + most, linestyle="--", color="grey", label="most that is flat (median, last quarter)")
        axes[0].legend(fontsize="small")
    axes[0].set_title(f"{result.sessions} clients, {result.turns:,} turns with faults", fontsize="medium")
    _save(figure, path)


PLOTS: Mapping[str, Callable[[Artifact, Path], None]] = {
    "responsiveness": plot_latency,
    "serving": plot_serving,
    "soak": plot_soak,
}
"""By the benchmark that wrote an artifact."""


def _draw_rows(
    rows: Mapping[str, list[tuple[float, ScenarioResult]]],
    panels: Panels,
    path: Path,
    *,
    load_label: Callable[[str], str],
) -> None:
    """A row of panels for each title. A panel that nothing was measured for is left out."""
    results = [result for points in rows.values() for _, result in points]
    shown = [(label, keys) for label, keys in panels if any(_has(result, keys) for result in results)]
    size = (WIDTH_INCHES * len(shown), HEIGHT_INCHES * len(rows))
    ticker: Any = importlib.import_module("matplotlib.ticker")
    figure, grid = _matplotlib().subplots(len(rows), len(shown), figsize=size, squeeze=False)
    for axes, (title, points) in zip(grid, rows.items(), strict=True):
        points.sort(key=lambda point: point[0])
        axes[0].set_title(title, fontsize="medium", loc="left")
        for axis, (label, keys) in zip(axes, shown, strict=True):
            _draw(axis, points, keys)
            axis.set(xlabel=load_label(title), ylabel=label)
            axis.set_xscale("log", base=2)
            if all(key.endswith("_ms") for key in keys):
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
                axis.yaxis.set_minor_formatter("{x:g}")
            else:
                axis.set_ylim(bottom=0)
            axis.set_xticks([load for load, _ in points], labels=[f"{load:g}" for load, _ in points])
            axis.xaxis.set_minor_locator(ticker.NullLocator())
            axis.grid(visible=True, alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    _save(figure, path)


def _draw(axis: Any, points: Points, keys: Sequence[str]) -> None:
    """The figures of a panel for each target: the median over repeats, from the least to the most; goals as dashes."""
    for colour, key in zip(COLOURS, keys, strict=False):
        name = LABELS[key].removesuffix(", ms")
        for target, shown in TARGETS.items():
            if key.startswith("health_") and target == "direct":
                continue  # that would be the stand-in's own
            found = list(_spreads(points, target, key))
            if found:
                loads, least, median, most = zip(*found, strict=True)
                axis.plot(
                    loads, median, STYLES[target], marker="o", markersize=4, color=colour, label=f"{name}, {shown}"
                )
                axis.fill_between(loads, least, most, color=colour, alpha=0.12, linewidth=0)
        for value in sorted({goal for _, result in points for figure, goal in result.goals if figure == key}):
            goal = f"{name} {Goal(figure=key, value=value).shown}"
            axis.axhline(value, linestyle="--", linewidth=1, color=colour, label=f"to reach: {goal}")


def _spreads(points: Points, target: str, key: str) -> Iterator[tuple[float, float, float, float]]:
    """Load, least, median and most. What is 0 has no place on a logarithmic axis."""
    for load, result in points:
        values = [value for value in values_of(result.figures.get(target, []), key) if value > 0]
        if values:
            found = spread(values)
            yield load, found.least, found.median, found.most


def _has(result: ScenarioResult, keys: Sequence[str]) -> bool:
    return any(values_of(repeats, key) for repeats in result.figures.values() for key in keys)


def _matplotlib() -> Any:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    _matplotlib().close(figure)
