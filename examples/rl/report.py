"""The figures of a run: a line a step, the summary, the table, the plot."""

import argparse
import importlib
import importlib.util
import json
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TIMES = ("rollout_s", "update_s", "sync_s")
WORST = ("max_distance", "kl", "share_outside")


def step_line(step: Mapping[str, Any]) -> str:
    """A step in a line."""
    times = ", ".join(f"{name[:-2]} {step[name]:.1f}" for name in TIMES)
    return (
        f"step {step['step']:3}  reward {step['reward']:.3f}  success {step['success']:.2f}"
        f"  recorded - recomputed max {step['max_distance']:.1e} KL {step['kl']:.1e}"
        f"  outside {step['share_outside']:.1%}  gradient {step['gradient_norm']:.2f}  s: {times}"
    )


def summary(options: argparse.Namespace, steps: Sequence[Mapping[str, Any]], before: Any, after: Any) -> dict[str, Any]:
    """What a run came to."""
    return {
        "drift": options.drift,
        "seed": options.seed,
        "before": before,
        "after": after,
        "steps": steps,
        **{name: max((step[name] for step in steps), default=0.0) for name in WORST},
        **{name: float(np.mean([step[name] for step in steps] or [0])) for name in (*TIMES, "drifted_samples")},
        "trainer_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def show(found: Mapping[str, Any], out: Path) -> None:
    """Print the table, write it, and draw the curve."""
    for name in ("before", "after"):
        held = found[name]
        print(f"held-out success {name:<7} {held['success']:.2f}  (95 %: {held['low']:.2f} to {held['high']:.2f})")
    print(f"recorded - recomputed: at most {found['max_distance']:.1e} nats, KL {found['kl']:.1e}")
    print(f"tokens with a ratio outside [1/2, 2]: at most {found['share_outside']:.1%} of a step")
    print(f"samples whose ids the fault ({found['drift']}) changed: {found['drifted_samples']:.0%}")
    print("seconds a step: " + ", ".join(f"{name[:-2]} {found[name]:.1f}" for name in TIMES))
    print(f"peak memory of the trainer: {found['trainer_gib']:.1f} GiB")
    (out / "summary.json").write_text(json.dumps(found, indent=1))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(5.2, 3.6))
    steps = found["steps"]
    axes.plot([step["step"] for step in steps], [step["success"] for step in steps], label=found["drift"])
    axes.set(xlabel="step", ylabel="full success", ylim=(0, 1))
    axes.legend()
    figure.savefig(out / "curve.png", dpi=120, bbox_inches="tight")
