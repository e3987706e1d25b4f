"""The options of `scripts/rl`, and which of them fit together; it needs no torch."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import errand
import price
from compare import PLAIN
from drift import KINDS
from items import TRAINED

MANUAL = """A policy that learns from what was recorded: cold start, GRPO, weights swapped into the running engine.

    scripts/rl [--task price] [--trainer grpo] [--seed 0] [--steps 40] [--drift KIND] [--teacher FOLDER] [--out FOLDER]
    scripts/rl compare FOLDER… [--plot FILE.svg] [--table FILE.md]

Prints a line a step, writes FOLDER/steps.jsonl, ends with a table, summary.json and curve.svg. Started again with the
same options, a run that was interrupted goes on. Exits with 1 if something was not as promised (docs/science.md).
"""

TASKS = {"price": price.TASK, "errand": errand.TASK}
NATS_ALONE = ("retokenize-recorded", "compact-json", "shift")
"""Faults in recorded log-probabilities, which TRL without vLLM does not read."""

OURS = ("old", "truncate_ratios", "dual_clip", "max_grad_norm", "updates")
"""Options of our update."""


def of_update(parser: argparse.ArgumentParser) -> None:
    """The options of the update and of the sampling."""
    add = parser.add_argument
    add("--old", choices=("recorded", "recomputed"), default=PLAIN["old"],
        help="a ratio is to the engine's log-probabilities, or to the trainer's. Default: recorded.")  # fmt: skip
    add("--truncate-ratios", type=float, metavar="C",
        help="with --old recomputed: each token counts by the trainer's probability over the engine's, at most C."
        " Default: none.")  # fmt: skip
    add("--dual-clip", type=float, metavar="C",
        help="a negative advantage counts at most C times, however large the ratio. Default: none.")  # fmt: skip
    add("--max-grad-norm", type=float, metavar="N", help="clip the gradient's norm. Default: none.")
    add("--updates", type=int, default=PLAIN["updates"], metavar="N",
        help="deal a step's rows out to N updates. Default: 1.")  # fmt: skip
    add("--stale", type=int, default=PLAIN["stale"], metavar="N",
        help="sample with the weights of N steps before. Default: 0.")  # fmt: skip
    add("--engine-weights", choices=("float32", "bfloat16"), default=PLAIN["engine_weights"],
        help="bfloat16: the engine's copy is rounded to it; it computes in float32. Default: float32.")  # fmt: skip
    add("--temperature", type=float, default=PLAIN["temperature"], help="of the sampling. Default: 1.0.")
    add("--forced-calls", action="store_true", help="an episode's first turn must call a tool, under a grammar")


def check_teacher(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Its scores are raw, of the sampled tokens, for our own step."""
    others = {"trainer": "grpo", "drift": "none", "temperature": 1.0, "stale": 0}
    if options.teacher is not None and (wrong := [name for name in others if getattr(options, name) != others[name]]):
        parser.error(f"--teacher scores what the newest weights sampled, for our own step: without --{wrong[0]}")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, of the command line by default. Ends the program if they do not fit together."""
    parser = argparse.ArgumentParser(
        prog="scripts/rl", description=MANUAL, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a model that the embedded engine reads. Default: smollm2-135m.")
    add("--family", default="auto", help="as of `stenograph serve`")
    add("--out", type=Path, default=Path("out/rl"), help="folder for results and weights. Default: out/rl.")
    add(
        "--task",
        choices=TASKS,
        default="price",
        help="price: one tool, two turns; errand: three, four. Default: price.",
    )
    add(
        "--trainer",
        choices=("grpo", "trl"),
        default="grpo",
        help="trl: TRL's GRPOTrainer. Default: grpo, in policy.py.",
    )
    add("--seed", type=int, default=0, help="of the questions, the demonstrations and the sampling. Default: 0.")
    add("--steps", type=int, default=40, help="Default: 40.")
    add("--prompts", type=int, default=6, help="items of a step. Default: 6.")
    add("--group-size", type=int, default=6, help="episodes of an item. Default: 6.")
    add("--episodes", type=int, default=96, help="held-out episodes, before and after. Default: 96.")
    add("--lr", type=float, default=2e-5, help="Default: 2e-5.")
    add("--cold-steps", type=int, help="steps on demonstrations. Default: 7 for price, 14 for errand.")
    add("--cold-lr", type=float, default=1e-5, help="Default: 1e-5.")
    of_update(parser)
    add("--drift", choices=KINDS, default="none", help="the fault to inject (examples/rl/drift.py). Default: none.")
    add(
        "--teacher",
        type=Path,
        metavar="FOLDER",
        help="a run of the same model that is over: its policy's scores of each token, in the place of rewards"
        " (examples/rl/teacher.py)",
    )
    add(
        "--checkpoint-every",
        type=int,
        default=10,
        metavar="STEPS",
        help="0: never. Default: 10; 1.6 GB, until the end.",
    )
    add(
        "--threads",
        type=int,
        default=min(os.cpu_count() or 1, 8),
        help="of the update, and of the engine, which take turns; 1 where other work runs beside. Default: as many as"
        " processors, at most 8.",
    )
    add("--fresh", action="store_true", help="begin anew, whatever the folder has")
    options = parser.parse_args(arguments)
    if options.cold_steps is None:
        options.cold_steps = TASKS[options.task].cold_steps
    if (
        min(options.steps, options.cold_steps, options.checkpoint_every) < 0
        or min(options.prompts, options.episodes) < 1
    ):
        parser.error("--steps, --cold-steps and --checkpoint-every are at least 0, --prompts and --episodes at least 1")
    if options.prompts > len(TRAINED):
        parser.error(f"--prompts is at most {len(TRAINED)}, as many items as are trained")
    if options.threads < 1:
        parser.error("--threads is at least 1")
    if options.group_size < 2:
        parser.error("--group-size is at least 2: an advantage is a reward less its group's mean")
    if options.truncate_ratios is not None and options.old == "recorded":
        parser.error(
            "--truncate-ratios corrects a ratio to the trainer's own log-probabilities: it needs --old recomputed"
        )
    if options.updates < 1 or options.stale < 0 or options.temperature <= 0:
        parser.error("--updates is at least 1, --stale at least 0, --temperature above 0")
    bounds = {"--truncate-ratios": options.truncate_ratios, "--dual-clip": options.dual_clip}
    if wrong := [name for name, bound in bounds.items() if bound is not None and bound <= 1]:
        parser.error(f"{wrong[0]} is above 1")
    if options.max_grad_norm is not None and options.max_grad_norm <= 0:
        parser.error("--max-grad-norm is above 0")
    if options.trainer == "trl" and (others := [name for name in OURS if getattr(options, name) != PLAIN[name]]):
        parser.error(f"--trainer trl has an update of its own: --{others[0].replace('_', '-')} is of --trainer grpo")
    check_teacher(parser, options)
    if options.trainer == "trl" and options.drift in NATS_ALONE:
        parser.error(
            f"--trainer trl cannot show {options.drift}: without vLLM it does not read recorded log-probabilities"
        )
    return options
