"""A policy that learns from what was recorded: cold start, GRPO, weights swapped into the running engine.

The options are in options.py, with the manual.
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

import torch
from checkpoint import commit, forget_checkpoint, known_by, load_checkpoint, note_commit, save_checkpoint
from options import TASKS, parsed
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
    (options.out / "run.json").write_text(
        json.dumps({**known_by(options), "commits": [commit()], "before": before}, indent=1)
    )
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
            note_commit(options.out)
            print(f"goes on after {len(run.steps)} steps that are done", flush=True)
        if options.trainer == "trl":
            await importlib.import_module("trl_steps").steps_by_trl(run)
        else:
            await steps_by_grpo(run, before)
        if options.stale:
            await run.swap(len(run.steps), is_last=True)
        after = await run.held_out("after", options.episodes)
    return summary(options, run.steps, before, after, peak_gib(pid))


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
