"""Runs the simulation of 64 engines and 10,000 rollouts for each rule and load; prints a table and one line of JSON.

    python -m scripts.fleet.run [--rollouts N] [--engines N] [--plot FILE.svg]

Nothing in it depends on the machine: the same figures come out everywhere. Two processes, about four minutes of CPU.
"""

import importlib
import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from scripts.fleet.simulation import Agents, Outcomes, Rule, Simulation, affinity, round_robin

LOADS = (12, 16, 20, 24, 32)
"""Rollouts at once for each engine."""
RULES: dict[str, tuple[Rule | None, float]] = {
    "round robin": (round_robin(), 0.0),
    "affinity": (affinity, 0.0),
    "memory": (None, 60.0),
    "memory, waits 300 s": (None, 300.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rule made of a load. `per_hour` are rollouts of an engine, of the middle half."""

    rule: str
    at_once: int
    hits: float
    mean_s: float
    p50_s: float
    p99_s: float
    preemptions: int
    moved: int
    per_hour: float


def measured(rule: str, at_once: int, num_rollouts: int, num_engines: int) -> Figures:
    place, max_wait_s = RULES[rule]
    agents = Agents(num=num_rollouts, num_at_once=num_engines * at_once)
    outcomes = Simulation(agents, num_engines=num_engines, rule=place, max_wait_s=max_wait_s).run()
    return figures_of(outcomes, rule, at_once, num_engines)


def figures_of(outcomes: Outcomes, rule: str, at_once: int, num_engines: int) -> Figures:
    ends = sorted(outcomes.rollout_ends_s)
    first, last = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return Figures(
        rule=rule,
        at_once=at_once,
        hits=outcomes.num_cached / outcomes.num_prompt,
        mean_s=sum(outcomes.latencies_s) / len(outcomes.latencies_s),
        p50_s=outcomes.quantile_s(0.5),
        p99_s=outcomes.quantile_s(0.99),
        preemptions=outcomes.num_preemptions,
        moved=outcomes.num_moved,
        per_hour=len(ends) / 2 / (last - first) * 3600 / num_engines,
    )


def table(found: Sequence[Figures]) -> str:
    rows = ["| at once | rule | cache hits | turn, mean | p50 | p99 | preemptions | moved | rollouts an hour |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for one in found:
        rows.append(
            f"| {one.at_once} | {one.rule} | {one.hits:.1%} | {one.mean_s:.1f} s | {one.p50_s:.1f} s"
            f" | {one.p99_s:.0f} s | {one.preemptions:,} | {one.moved:,} | {one.per_hour:.0f} |"
        )
    return "\n".join(rows)


def plot(found: Sequence[Figures], path: str) -> None:
    """A panel for each figure, a line for each rule."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fleet"
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    panels = (("hits", "prompt tokens found cached"), ("p99_s", "a turn's p99, s"), ("preemptions", "preemptions"))
    figure, axes = pyplot.subplots(1, len(panels) + 1, figsize=(15, 3.6))
    for axis, (name, title) in zip(axes, (*panels, ("per_hour", "rollouts an hour and engine")), strict=True):
        for rule in RULES:
            points = [(one.at_once, getattr(one, name)) for one in found if one.rule == rule]
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=rule)
        axis.set(title=title, xlabel="rollouts at once, an engine", ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--plot")
    options = parser.parse_args()
    runs = [(rule, at_once, options.rollouts, options.engines) for at_once, rule in product(LOADS, RULES)]
    with ProcessPoolExecutor(2) as processes:
        found = list(processes.map(measured, *zip(*runs, strict=True)))
    sys.stdout.write(f"{table(found)}\n{json.dumps([asdict(one) for one in found])}\n")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
