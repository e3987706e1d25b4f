"""What `bench serving` shows: a table with the server beside the engine alone, and latency against load as a plot."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stenograph.bench.artifact import Artifact, ScenarioResult
from stenograph.bench.figures import LABELS, better, spread, values_of
from stenograph.bench.report import name_in, number, spread_cell, table
from stenograph.bench.verdicts import Verdict, compare_values

PLOTTED = (("ttft_p50_ms", "ttft_p99_ms"), ("tpot_p50_ms", "tpot_p99_ms"), ("e2e_p50_ms", "e2e_p99_ms"))
"""A panel each."""
SHOWN = {"server": "server", "direct": "straight at the engine"}
STYLES = {"server": "-", "direct": "--"}


def serving_table(artifact: Artifact) -> str:
    """Every figure of every load: median (least … most) through the server and straight, and what lies between."""
    rows = [["load", "figure", "server", "straight", "server - straight", "told from noise"]]
    for result in artifact.scenarios:
        rows += _rows_of(result, name_in(artifact, result))
    return table(rows)


def _rows_of(result: ScenarioResult, name: str) -> Iterator[list[str]]:
    shown = name
    for figure, label in LABELS.items():
        server = values_of(result.figures.get("server", []), figure)
        direct = values_of(result.figures.get("direct", []), figure)
        if server or direct:
            yield [shown, label, spread_cell(server), spread_cell(direct), *_between(figure, direct, server)]
            shown = ""


def _between(figure: str, direct: list[float], server: list[float]) -> tuple[str, str]:
    if not direct or not server:
        return "", ""
    difference = spread(server).median - spread(direct).median
    sign = "+" if difference > 0 else ""
    found = compare_values(direct, server, better(figure))
    share = "" if found.change is None else f" ({found.change:+.1%})"
    return f"{sign}{number(difference)}{share}", "no" if found.verdict is Verdict.NOISE else "yes"


def plot_serving(artifact: Artifact, path: Path) -> None:
    """Latency against load as a PNG: a row a kind of loop, a panel a latency; p50 and p99, server and straight.

    Needs matplotlib.
    """
    plots: Any = importlib.import_module("matplotlib.pyplot")
    loops: dict[str, list[tuple[float, ScenarioResult]]] = {}
    for result in artifact.scenarios:
        kind, load = _load_of(result)
        loops.setdefault(kind, []).append((load, result))
    panels = [keys for keys in PLOTTED if any(_has(result, keys) for result in artifact.scenarios)]
    figure, axes = plots.subplots(len(loops), len(panels), figsize=(5 * len(panels), 4 * len(loops)), squeeze=False)
    for row, (kind, results) in zip(axes, loops.items(), strict=True):
        results.sort(key=lambda pair: pair[0])
        for axis, keys in zip(row, panels, strict=True):
            _draw(axis, results, keys)
            axis.set(xlabel=kind, ylabel="ms")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks([load for load, _ in results], labels=[f"{load:g}" for load, _ in results])
            axis.legend(fontsize="small")
            axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plots.close(figure)


def _has(result: ScenarioResult, keys: tuple[str, ...]) -> bool:
    return any(values_of(repeats, key) for repeats in result.figures.values() for key in keys)


def _load_of(result: ScenarioResult) -> tuple[str, float]:
    """What a result's load is counted in, and how much of it there was."""
    load = next(iter(result.raw.values()))[0]["load"]
    if load["rate"] is not None:
        return "open loop: sessions that arrive in a second", load["rate"]
    return "closed loop: sessions at once", load["concurrency"]


def _draw(axis: Any, results: list[tuple[float, ScenarioResult]], keys: tuple[str, ...]) -> None:
    for target, style in STYLES.items():
        for key, colour in zip(keys, ("tab:blue", "tab:red"), strict=True):
            points = [
                (load, spread(values).median)
                for load, result in results
                if (values := values_of(result.figures.get(target, []), key))
            ]
            if points:
                label = f"{LABELS[key].removesuffix(', ms')}, {SHOWN[target]}"
                axis.plot(*zip(*points, strict=True), marker="o", linestyle=style, color=colour, label=label)
