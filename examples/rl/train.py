"""A policy that learns from what was recorded: cold start, GRPO, weights swapped into the running engine.

    scripts/rl [--task price] [--trainer grpo] [--seed 0] [--steps 40] [--drift KIND] [--teacher FOLDER] [--out FOLDER]
    scripts/rl compare FOLDER… [--plot FILE.svg] [--table FILE.md]

Prints a line a step, writes FOLDER/steps.jsonl, ends with a table, summary.json and curve.svg. Started again with the
same options, a run that was interrupted goes on. Exits with 1 if something was not as promised (docs/science.md).
"""

import argparse
import asyncio
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import errand
import price
import torch
from checkpoint import forget_checkpoint, known_by, load_checkpoint, save_checkpoint
from compare import PLAIN
from drift import KINDS
from items import TRAINED
from policy import Objective, Policy, written_folder
from report import peak_gib, show, summary
from run import Run, served
from teacher import TaughtClient, Teacher

from stenograph.families.load import load_renderer
from stenograph.model.fetch import resolve_model
from stenograph.model.files import load_model_files
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir
from stenograph.text.renderer import Renderer

TASKS = {"price": price.TASK, "errand": errand.TASK}
NATS_ALONE = ("retokenize-recorded", "compact-json", "shift")
"""Faults in recorded log-probabilities, which TRL without vLLM does not read."""

OURS = ("old", "truncate_ratios", "dual_clip", "max_grad_norm", "updates")
"""Options of our update."""


async def steps_by_grpo(run: Run, before: Any) -> None:
    """Rollouts, one update, the swap; strictly in turns, because both take all of a small machine."""
    options = run.options
    for number in range(len(run.steps), options.steps):
        step = await run.sampled(number, run.asked(), options.group_size)
        began = time.monotonic()
        figures = await asyncio.to_thread(run.policy.step, step.rows, step.advantages)
        await run.over(step, figures, time.monotonic() - began)
        if options.checkpoint_every and (number + 1) % options.checkpoint_every == 0:
            state = {"num_steps": number + 1, "chance": run.chance.getstate(), "before": before}
            await asyncio.to_thread(save_checkpoint, options, {**state, **run.policy.state()})


async def begun(run: Run, renderer: Renderer) -> Any:
    """The cold start, and the measure before the steps."""
    options = run.options
    losses: list[str] = []
    for loss in run.policy.demonstrate(
        renderer, run.task, steps=options.cold_steps, lr=options.cold_lr, chance=run.chance
    ):
        losses.append(f"{loss:.2f}")
        print(f"\rcold start: {len(losses)} of {options.cold_steps}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("cold start: loss " + ", ".join(losses), flush=True)
    await run.swap(0)
    before = await run.held_out("before", options.episodes)
    print(f"held out before: {before['success']:.2f} ({before['low']:.2f} to {before['high']:.2f})", flush=True)
    (options.out / "run.json").write_text(json.dumps({**known_by(options), "before": before}, indent=1))
    return before


async def trained(
    options: argparse.Namespace,
    policy: Policy,
    renderer: Renderer,
    address: tuple[str, int],
    found: Any,
    teacher: Teacher | None,
) -> dict[str, Any]:
    """The whole run, or what is left of it; returns its summary."""
    url, pid = address
    async with TaughtClient(url) as client:
        run = Run(options, TASKS[options.task], policy, renderer, client, url, teacher)
        if found is None:
            before = await begun(run, renderer)
        else:
            before, run.steps = found["before"], found["steps"]
            run.chance.setstate(found["chance"])
            policy.restore(found)
            await run.swap(len(run.steps))
            print(f"goes on after {len(run.steps)} steps that are done", flush=True)
        if options.trainer == "trl":
            await importlib.import_module("trl_steps").steps_by_trl(run)
        else:
            await steps_by_grpo(run, before)
        if options.stale:
            await run.swap(len(run.steps), is_last=True)
        after = await run.held_out("after", options.episodes)
    return summary(options, run.steps, before, after, peak_gib(pid))


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


def objective(options: argparse.Namespace) -> Objective:
    """What these options maximize."""
    return Objective(
        old=options.old,
        truncate_ratios=options.truncate_ratios,
        dual_clip=options.dual_clip,
        max_grad_norm=options.max_grad_norm,
        num_updates=options.updates,
        temperature=options.temperature,
    )


def check_teacher(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Its scores are raw, of the sampled tokens, for our own step."""
    others = {"trainer": "grpo", "drift": "none", "temperature": 1.0, "stale": 0}
    if options.teacher is not None and (wrong := [name for name in others if getattr(options, name) != others[name]]):
        parser.error(f"--teacher scores what the newest weights sampled, for our own step: without --{wrong[0]}")


def parsed() -> argparse.Namespace:
    """The options. Ends the program if they do not fit together."""
    parser = argparse.ArgumentParser(
        prog="scripts/rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    options = parser.parse_args()
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


def main() -> None:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and its server with it
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    (options.out / "weights").mkdir(parents=True, exist_ok=True)
    teacher = None if options.teacher is None else Teacher.of_run(options.teacher, options.out / "weights")
    found = load_checkpoint(options)
    folder = options.out / "model"
    cache = Path(os.environ.get("STENOGRAPH_CACHE") or default_cache_dir(os.environ))
    model = resolve_model(options.model, cache_dir=cache, progress=StreamProgress(sys.stderr))
    policy = Policy(written_folder(model, folder), lr=options.lr, objective=objective(options))
    renderer = load_renderer(load_model_files(folder), options.family).renderer
    with served(folder, options.out / "weights", options.family, options.threads) as address:
        over = asyncio.run(trained(options, policy, renderer, address, found, teacher))
    show(over, options.out)
    forget_checkpoint(options.out)
    if over["broken_promises"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
