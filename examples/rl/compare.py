"""Several runs of `scripts/rl` on one page: their curves, and a table of what each came to.

    scripts/rl compare FOLDER… [--plot FILE.svg] [--table FILE.md]

Reads each folder's steps.jsonl, and its summary.json once the run is over. A run that is not over is shown as far as it
has come, and the table says so.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

COLOURS = {
    "none": "#1b3a57",
    "retokenize": "#56b4e9",
    "re-render": "#009e73",
    "mask": "#e6a700",
    "retokenize-recorded": "#cc79a7",
    "compact-json": "#d55e00",
    "shift": "#8b1a1a",
}
"""Of each kind of drift, in the order of examples/rl/drift.py."""
TAUGHT = "#c04a00"
"""Of runs by a teacher's scores."""

HEADS = (
    "run", "steps", "held out before", "held out after", "samples changed", "recorded − recomputed", "KL",
    "outside [½, 2]", "forbidden drift", "minutes",
)  # fmt: skip
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided, 95 %, for two runs, three, ..."""

BEGIN, END = "<!-- runs -->", "<!-- /runs -->"
"""Between them a page has its table."""

PLAIN: Mapping[str, object] = {
    "old": "recorded", "truncate_ratios": None, "dual_clip": None, "max_grad_norm": None, "updates": 1, "stale": 0,
    "engine_weights": "float32", "temperature": 1.0, "forced_calls": False,
}  # fmt: skip
"""Options of the update and the sampling, as they are where nobody names them."""

USUAL: Mapping[str, object] = {
    "model": "smollm2-135m", "prompts": 6, "group_size": 6, "lr": 2e-5, "cold_lr": 1e-5,
}  # fmt: skip
"""Other options that tell runs apart, the same way."""
COLD_STEPS = {"price": 7, "errand": 14}
"""Of each task, where nobody names them."""

NOT_YET = "not yet"
UNKNOWN = "not recorded"
RECOMPUTED = ("retokenize", "re-render")
"""Faults with which the trainer's log-probabilities are all its own: there is nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run as its folder has it; `before` and `after` are its held-out measures, None until they are taken."""

    name: str
    task: str
    trainer: str
    drift: str
    is_taught: bool
    seed: int | None
    setting: str
    steps: Sequence[Mapping[str, Any]]
    commits: Sequence[str]
    before: Mapping[str, float] | None
    after: Mapping[str, float] | None

    @property
    def kind(self) -> str:
        """What the runs that differ in their seed alone have in common."""
        drift = "token-exact" if self.drift == "none" else self.drift
        drift = "teacher's scores" if self.is_taught else drift
        trainer = "" if self.trainer == "grpo" else self.trainer.upper()
        return ", ".join(filter(None, (drift, trainer, self.setting)))

    @property
    def label(self) -> str:
        """The run in the table."""
        seed = self.name if self.seed is None else f"seed {self.seed}"
        return f"{self.kind}, {seed}" if self.task == "price" else f"{self.task}: {self.kind}, {seed}"


def read_run(folder: Path) -> ShownRun:
    """The run of a folder. Raises SystemExit if there is none."""
    begun = _object(folder / "run.json")
    over = _object(folder / "summary.json")
    steps = list(_steps(folder / "steps.jsonl"))
    if not (begun or over or steps):
        raise SystemExit(f"{folder} has no run: neither steps.jsonl, run.json nor summary.json has anything in it")
    known = {**begun, **over}
    return ShownRun(
        name=folder.name,
        task=known.get("task", "price"),
        trainer=known.get("trainer", "grpo"),
        drift=known.get("drift", "none"),
        is_taught=known.get("teacher") is not None,
        seed=known.get("seed"),
        setting=setting(known),
        steps=steps,
        commits=known.get("commits", [UNKNOWN]),
        before=known.get("before"),
        after=over.get("after"),
    )


def setting(known: Mapping[str, object]) -> str:
    """The options that make runs unlike and are not as they are where nobody names them, in words."""
    usual = {**USUAL, "cold_steps": COLD_STEPS.get(str(known.get("task", "price"))), **PLAIN}
    named = {name: known[name] for name, plain in usual.items() if known.get(name, plain) != plain}
    words = (
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in named.items()
    )
    return ", ".join(words)


def _object(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def _steps(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; a run may be writing its last one."""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def table(runs: Sequence[ShownRun]) -> str:
    """The runs as a table in Markdown."""
    lines = [HEADS, ["---"] * len(HEADS), *map(_row, runs)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def means(runs: Sequence[ShownRun]) -> str:
    """Of each task and kind with several runs that are over, the mean of held-out success afterwards, and the 95 %
    interval of a run's mean by Student's t: over runs, whose number it names, not over episodes."""
    lines = []
    for task in dict.fromkeys(run.task for run in runs):
        for kind, members in by_kind([run for run in runs if run.task == task and run.after is not None]).items():
            found = [run.after["success"] for run in members if run.after is not None]
            if len(found) > 1:
                half = T_95[min(len(found) - 1, len(T_95)) - 1] * stdev(found) / len(found) ** 0.5
                mean = unlike(members) or f"{fmean(found):.2f} ± {half:.2f}"
                steps = " or ".join(map(str, sorted({len(run.steps) for run in members})))
                lines.append(f"| {task}: {kind} | {len(found)} | {steps} | {mean} |\n")
    head = "| runs of one kind | runs | steps | held out after, mean and 95 % over runs |\n| --- | --- | --- | --- |\n"
    return head + "".join(lines) if lines else ""


def unlike(runs: Sequence[ShownRun]) -> str | None:
    """Why runs of one kind have no mean, in words: the steps or the commits differ, or a tree was not as committed."""
    commits = sorted({commit for run in runs for commit in run.commits})
    if len({len(run.steps) for run in runs}) > 1:
        return "no mean: the steps differ"
    if len(commits) > 1:
        return f"no mean: the commits differ ({', '.join(map(_short, commits))})"
    if commits[0].endswith("-dirty"):
        return f"no mean: uncommitted changes ({_short(commits[0])})"
    return None


def _short(commit: str) -> str:
    revision, dash, dirty = commit.partition("-")
    return f"{revision[:12]}{dash}{dirty}"


def write_table(file: Path, shown: str) -> None:
    """Write the table: between its marks, if the file has them, else as the whole file. Raises SystemExit for a page
    without marks, which it would replace."""
    page = file.read_text() if file.exists() else ""
    begin, end = page.find(BEGIN), page.find(END)
    if 0 <= begin < end:
        shown = f"{page[: begin + len(BEGIN)]}\n{shown}{page[end:]}"
    elif page and not page.startswith(f"| {HEADS[0]} |"):
        raise SystemExit(f"{file} is neither a table of runs nor a page with {BEGIN} and {END}: name another file")
    file.write_text(shown)


def _row(run: ShownRun) -> list[str]:
    steps = run.steps
    is_over = run.after is not None
    figures = [NOT_YET] * 5
    if steps:
        changed = sum(step["drifted_samples"] for step in steps) / len(steps)
        num_tokens = sum(step["num_tokens"] for step in steps)
        outside = sum(step["share_outside"] * step["num_tokens"] for step in steps) / max(1, num_tokens)
        forbidden = UNKNOWN
        if all("forbidden_drift" in step for step in steps):
            forbidden = str(sum(step["forbidden_drift"] for step in steps))
        compared = ["nothing recorded"] * 3
        if run.drift not in RECOMPUTED:
            compared = [
                f"{max(step['max_distance'] for step in steps):.1e} nats",
                f"{max(step['kl'] for step in steps):.1e}",
                _outside(steps, outside),
            ]
        figures = [f"{changed:.0%}" if changed else "none", *compared, forbidden]
    minutes = sum(step[name] for step in steps for name in ("rollout_s", "update_s", "sync_s")) / 60
    count = str(len(steps)) if is_over else f"{len(steps)}, not over"
    return [run.label, count, _held_out(run.before), _held_out(run.after), *figures, f"{minutes:.0f}"]


def _outside(steps: Sequence[Mapping[str, Any]], share: float) -> str:
    if not share:
        return "none"
    of_changed = [one for step in steps if (one := step.get("share_outside_changed")) is not None]
    told = f"worst step {max(step['share_outside'] for step in steps):.1%}"
    if of_changed:
        told += f"; of changed samples {sum(of_changed) / len(of_changed):.1%}"
    return f"{share:.1%} ({told})"


def _held_out(held: Mapping[str, float] | None) -> str:
    if held is None:
        return NOT_YET
    return f"{held['success']:.2f} ({held['low']:.2f} to {held['high']:.2f})"


def has_matplotlib() -> bool:
    """Whether there is what draws."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: Sequence[ShownRun], file: Path) -> None:
    """The curves, and the held-out measures, as a picture: the same bytes for the same runs."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    matplotlib = importlib.import_module("matplotlib")
    style = {"svg.fonttype": "none", "svg.hashsalt": "stenograph", "font.size": 9, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = importlib.import_module("matplotlib.figure").Figure(
            figsize=(9, 3.8 * len(tasks)), layout="constrained"
        )
        panels = figure.subplots(len(tasks), 2, squeeze=False, width_ratios=(3, 2))
        for task, (curves, measures) in zip(tasks, panels, strict=True):
            chosen = [run for run in runs if run.task == task]
            draw_curves(curves, chosen)
            draw_measures(measures, chosen)
            if len(tasks) > 1:
                measures.set_title(f"--task {task}", loc="left", fontsize=9)
        figure.savefig(file, metadata={"Date": None, "Creator": None} if file.suffix == ".svg" else None)


def draw_curves(axes: Any, runs: Sequence[ShownRun]) -> None:
    """Success over steps: each kind as the mean of its seeds, each seed faintly beside it."""
    for kind, members in by_kind(runs).items():
        colour, dash = look(members[0])
        curves = [[step["success"] for step in run.steps] for run in members]
        longest = max(map(len, curves))
        means = []
        for number in range(longest):
            there = [curve[number] for curve in curves if number < len(curve)]
            means.append(sum(there) / len(there))
        if len(curves) > 1:
            for curve in curves:
                axes.plot(range(len(curve)), curve, color=colour, alpha=0.25, linewidth=0.8, linestyle=dash)
        seeds = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
        axes.plot(range(longest), means, color=colour, linewidth=1.8, linestyle=dash, label=kind + seeds)
    axes.set(xlabel="step", ylabel="full success of a step's episodes", ylim=(-0.02, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 1.0))


def draw_measures(axes: Any, runs: Sequence[ShownRun]) -> None:
    """Held-out success before (hollow) and after (full), with 95 % intervals; a row for each run."""
    for place, run in enumerate(runs):
        colour, _ = look(run)
        for held, offset, fill in ((run.before, -0.16, "white"), (run.after, 0.16, colour)):
            if held is not None:
                at = place + offset
                axes.plot([held["low"], held["high"]], [at, at], color=colour, linewidth=1.2)
                axes.plot([held["success"]], [at], marker="o", markersize=5, color=colour, markerfacecolor=fill)
    axes.set(xlabel="held-out success: before ○, after ●", xlim=(-0.02, 1.02))
    axes.set_yticks(range(len(runs)))
    axes.set_yticklabels([run.label.removeprefix(f"{run.task}: ") for run in runs], fontsize=8)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def by_kind(runs: Sequence[ShownRun]) -> dict[str, list[ShownRun]]:
    """The runs of each kind."""
    found: dict[str, list[ShownRun]] = defaultdict(list)
    for run in runs:
        found[run.kind].append(run)
    return found


def look(run: ShownRun) -> tuple[str, str]:
    """Colour and dash of a run's kind."""
    colour = TAUGHT if run.is_taught else COLOURS.get(run.drift, "#555555")
    return colour, "-" if run.trainer == "grpo" else "--"


def in_order(runs: Sequence[ShownRun]) -> list[ShownRun]:
    """By task and trainer, then from mild drift to severe, then by seed."""
    severity = list(COLOURS)
    place = {drift: index for index, drift in enumerate(severity)}
    return sorted(
        runs,
        key=lambda run: (
            *(run.task != "price", run.task, run.trainer, place.get(run.drift, 99)),
            *(run.is_taught, run.seed or 0, run.name),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="what a run was given as --out")
    parser.add_argument("--plot", type=Path, help="file for the picture: .svg, .png or .pdf. Default: none.")
    parser.add_argument("--table", type=Path, help=f"file for the table, or a page with {BEGIN} and {END} for it")
    options = parser.parse_args()
    runs = in_order([read_run(folder) for folder in options.folders])
    shown = table(runs)
    if of_kinds := means(runs):
        shown += f"\n{of_kinds}"
    print(shown, end="")
    if options.table is not None:
        write_table(options.table, shown)
    if options.plot is not None:
        if not has_matplotlib():
            raise SystemExit("--plot needs matplotlib: pip install matplotlib")
        draw(runs, options.plot)
    not_over = [run.label for run in runs if run.after is None]
    if not_over:
        print(f"not over: {'; '.join(not_over)}", file=sys.stderr)


if __name__ == "__main__":
    main()
