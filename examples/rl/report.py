"""The figures of a run: a line a step, the summary, what it promised, the table, the plot."""

import argparse
import json
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from compare import PLAIN, draw, has_matplotlib, read_run

TIMES = ("rollout_s", "update_s", "sync_s")
MEANS = ("drifted_samples", "changed_turns", "changed_renders")
SUMS = ("forbidden_drift", "uncompared_lines", "other_version_tokens")
LIMITS = {"max_distance": 1e-4, "kl": 1e-8, "share_outside": 0.0}
"""What recorded and recomputed log-probabilities differ by at most at each step of a run without a fault."""


def step_line(step: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    """A step in a line."""
    times = ", ".join(f"{name[:-2]} {step[name]:.1f}" for name in TIMES)
    recent = steps[-5:]
    left_s = (num_steps - step["step"] - 1) * sum(one[name] for one in recent for name in TIMES) / len(recent)
    return (
        f"step {step['step']:3}  reward {step['reward']:.3f}  success {step['success']:.2f}"
        f"  recorded - recomputed max {step['max_distance']:.1e} KL {step['kl']:.1e}"
        f"  outside {step['share_outside']:.1%}  gradient {step['gradient_norm']:.2f}  s: {times}"
        f"  forbidden drift {step['forbidden_drift']}  {left_s / 60:.0f} min left"
        + (f"  reverse KL {step['reverse_kl']:.3f} nats a token" if "reverse_kl" in step else "")
    )


def summary(
    options: argparse.Namespace, steps: Sequence[Mapping[str, Any]], before: Any, after: Any, engine_gib: float | None
) -> dict[str, Any]:
    """What a run came to."""
    of_changed = [one for step in steps if (one := step.get("share_outside_changed")) is not None]
    return {
        "task": options.task,
        "trainer": options.trainer,
        "drift": options.drift,
        "teacher": None if options.teacher is None else str(options.teacher),
        "seed": options.seed,
        **{name: getattr(options, name) for name in PLAIN},
        "before": before,
        "after": after,
        "steps": steps,
        **{name: max((step[name] for step in steps), default=0.0) for name in LIMITS},
        **{name: float(np.mean([step[name] for step in steps] or [0])) for name in (*TIMES, *MEANS)},
        "share_outside_changed": float(np.mean(of_changed)) if of_changed else None,
        **{name: sum(step[name] for step in steps) for name in SUMS},
        "broken_promises": broken_promises(steps, is_exact=is_exact(options)),
        "trainer_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "engine_gib": engine_gib,
    }


def is_exact(options: argparse.Namespace) -> bool:
    """Whether the recorded log-probabilities are to be the trainer's: no fault, and the engine has its very weights."""
    return options.drift == "none" and not options.stale and options.engine_weights == "float32"


def broken_promises(steps: Sequence[Mapping[str, Any]], *, is_exact: bool) -> list[str]:
    """What was to hold at every step, and did not: whatever the fault no forbidden drift and no token of another
    version, and the limits where samples `is_exact`."""
    limits: dict[str, float] = dict.fromkeys(SUMS, 0)
    if is_exact:
        limits |= LIMITS
    return [
        f"step {step['step']}: {name} is {step[name]:.3g}, more than {limit:g}"
        for step in steps
        for name, limit in limits.items()
        if step[name] > limit
    ]


def show(found: Mapping[str, Any], out: Path) -> None:
    """Print the table, write it, and draw the curve."""
    for name in ("before", "after"):
        held = found[name]
        print(f"held-out success {name:<7} {held['success']:.2f}  (95 %: {held['low']:.2f} to {held['high']:.2f})")
    print(f"recorded - recomputed: at most {found['max_distance']:.1e} nats, KL {found['kl']:.1e}")
    print(f"tokens with a ratio outside [1/2, 2]: at most {found['share_outside']:.1%} of a step")
    print(f"samples whose ids the fault ({found['drift']}) changed: {found['drifted_samples']:.0%}")
    if (changed := found["share_outside_changed"]) is not None:
        print(f"their tokens with a ratio outside [1/2, 2]: {changed:.1%}")
    print(f"replies whose text tokenizes to other ids: {found['changed_turns']:.1%}")
    print(f"samples that a render of their messages changes: {found['changed_renders']:.1%}")
    print(f"forbidden drift: {found['forbidden_drift']}; lines without a report: {found['uncompared_lines']}")
    print(f"trained tokens of another version than their step's: {found['other_version_tokens']}")
    print("seconds a step: " + ", ".join(f"{name[:-2]} {found[name]:.1f}" for name in TIMES))
    engine = "unknown" if found["engine_gib"] is None else f"{found['engine_gib']:.1f} GiB"
    print(f"peak memory: trainer {found['trainer_gib']:.1f} GiB, server with its engine {engine}")
    for broken in found["broken_promises"]:
        print(f"not as promised: {broken}")
    (out / "summary.json").write_text(json.dumps(found, indent=1))
    if has_matplotlib():
        draw([read_run(out)], out / "curve.svg")
    else:
        print("no plot: matplotlib is not installed")


def peak_gib(pid: int) -> float | None:
    """The most memory that a process and those below it have had, each at its time; None where /proc does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, StopIteration):
        return None
    below = [peak_gib(int(child)) for child in children]
    return kib / 2**20 + sum(one for one in below if one is not None)
