"""A policy that learns from what was recorded: cold start, GRPO, weights swapped into the running engine.

    scripts/rl [--seed 0] [--steps 40] [--drift KIND] [--out FOLDER]

Prints a line a step, writes FOLDER/steps.jsonl, ends with a table, and draws FOLDER/curve.png if there is matplotlib.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agent import HELD_OUT, TOOL, TRAINED, Episode, PriceAgent
from drift import KINDS, TrainedRow, with_drift
from openai import AsyncOpenAI
from policy import Policy, written_folder
from report import show, step_line, summary

from stenograph.bench.kit.runner import cached_model
from stenograph.client import Client, Rollout, RolloutBatch, silent
from stenograph.families.load import load_renderer
from stenograph.model.files import load_model_files
from stenograph.render.renderer import Renderer
from stenograph.trainers.rows import advantages


@contextmanager
def served(folder: Path, weights: Path, family: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server of the policy, with its embedded engine: its address, and its process."""
    flags = ["--model", str(folder), "--weights-dir", str(weights), "--family", family, "--max-batch", "48"]
    command = [sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"ready at (http://\S+)", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit(f"the server did not start: exit code {process.wait()}")
            yield found[1], process
        finally:
            process.terminate()
            process.wait(60)


class Run:
    """One run: a policy, a server, and what each step came to."""

    def __init__(
        self, options: argparse.Namespace, policy: Policy, renderer: Renderer, client: Client, url: str
    ) -> None:
        self.options, self.policy, self.renderer, self.client, self.url = options, policy, renderer, client, url
        self.chance = random.Random(options.seed)
        self.steps: list[dict[str, Any]] = []

    async def rollouts(self, items: Sequence[str], group_size: int) -> tuple[RolloutBatch[Episode], PriceAgent]:
        """A group of episodes for each item."""
        episodes = [Episode.drawn(item, self.chance) for item in items]
        # One pool of connections; each session has its own address and key.
        async with AsyncOpenAI(base_url=self.url, api_key="none", timeout=600.0, max_retries=2) as chat:
            agent = PriceAgent(chat, keeps_views=self.options.drift == "re-render")
            sampling: Any = {"force": {"temperature": 1.0, "top_p": 1.0}}
            batch = await self.client.rollouts(
                agent, episodes, group_size=group_size, session={"sampling": sampling}, progress=silent
            )
        return batch, agent

    async def held_out(self, num_episodes: int) -> dict[str, float]:
        """Full success over episodes of items that are never trained, with a 95 % interval (Wilson)."""
        items = [HELD_OUT[index % len(HELD_OUT)] for index in range(num_episodes)]
        batch, _ = await self.rollouts(items, 1)
        num = len(batch.rollouts)
        share, z = sum(rollout.reward == 1.0 for rollout in batch.rollouts) / num, 1.96
        middle, width = share + z * z / (2 * num), z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
        scale = 1 + z * z / num
        return {"success": share, "low": (middle - width) / scale, "high": (middle + width) / scale, "episodes": num}

    async def swap(self, version: int) -> float:
        """Weights into the running engine; returns the seconds that it took."""
        began = time.monotonic()
        folder = self.options.out / "weights" / "policy"
        self.policy.save(folder)
        await self.client.update_weights(str(folder.resolve()), version=str(version))
        return time.monotonic() - began

    async def step(self, number: int) -> None:
        """Rollouts, one update, the swap; strictly in turns, because both take all of a small machine."""
        began = time.monotonic()
        items = self.chance.sample(TRAINED, self.options.prompts)
        batch, agent = await self.rollouts(items, self.options.group_size)
        rollout_s = time.monotonic() - began
        pairs = [
            (rollout, sample, advantage)
            for rollout, advantage in advantages(batch.groups)
            for sample in rollout.samples or ()
            if sample.num_trained
        ]
        rows = [self.row(rollout, sample, agent) for rollout, sample, _ in pairs]
        exact = [TrainedRow.exact(sample) for _, sample, _ in pairs]
        drifted = [
            len(a.tokens) != len(b.tokens) or (a.tokens != b.tokens).any() for a, b in zip(rows, exact, strict=True)
        ]
        versions = {span.version for _, sample, _ in pairs for span in sample.weight_spans}
        began = time.monotonic()
        figures = await asyncio.to_thread(self.policy.step, rows, [advantage for _, _, advantage in pairs])
        update_s = time.monotonic() - began
        rewards = np.array([rollout.reward for rollout in batch.rollouts], float)
        record = {
            "step": number,
            "reward": float(rewards.mean()),
            "success": float((rewards == 1.0).mean()),
            **dataclasses.asdict(figures),
            "drifted_samples": float(np.mean(drifted)),
            "versions": sorted(versions),
            "rollout_s": rollout_s,
            "update_s": update_s,
            "sync_s": await self.swap(number + 1),
        }
        self.steps.append(record)
        with (self.options.out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(step_line(record), flush=True)

    def row(self, rollout: Rollout[Episode], sample: Any, agent: PriceAgent) -> TrainedRow:
        """The sample as the trainer gets it, with the fault that was asked for."""
        return with_drift(self.options.drift, sample, self.renderer, agent.views.get(rollout.session_id or ""), TOOL)


async def trained(options: argparse.Namespace, policy: Policy, renderer: Renderer, url: str) -> dict[str, Any]:
    """The whole run; returns its summary."""
    async with Client(url) as client:
        run = Run(options, policy, renderer, client, url)
        losses = policy.demonstrate(renderer, steps=options.cold_steps, lr=options.cold_lr, chance=run.chance)
        print("cold start: loss " + ", ".join(f"{loss:.2f}" for loss in losses), flush=True)
        await run.swap(0)
        before = await run.held_out(options.episodes)
        print(f"held out before: {before['success']:.2f} ({before['low']:.2f} to {before['high']:.2f})", flush=True)
        for number in range(options.steps):
            await run.step(number)
        after = await run.held_out(options.episodes)
    return summary(options, run.steps, before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a model that the embedded engine reads. Default: smollm2-135m.")
    add("--family", default="auto", help="as of `stenograph serve`")
    add("--out", type=Path, default=Path("out/rl"), help="folder for results and weights. Default: out/rl.")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=40)
    add("--prompts", type=int, default=6, help="items of a step. Default: 6.")
    add("--group-size", type=int, default=6, help="episodes of an item. Default: 6.")
    add("--episodes", type=int, default=96, help="held-out episodes, before and after. Default: 96.")
    add("--lr", type=float, default=2e-5)
    add("--cold-steps", type=int, default=7)
    add("--cold-lr", type=float, default=1e-5)
    add("--drift", choices=KINDS, default="none", help="the fault to inject (examples/rl/drift.py). Default: none.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    (options.out / "weights").mkdir(parents=True, exist_ok=True)
    (options.out / "steps.jsonl").unlink(missing_ok=True)
    folder = options.out / "model"
    policy = Policy(written_folder(cached_model(options.model), folder), lr=options.lr)
    renderer = load_renderer(load_model_files(folder), options.family).renderer
    with served(folder, options.out / "weights", options.family) as (url, _):
        show(asyncio.run(trained(options, policy, renderer, url)), options.out)


if __name__ == "__main__":
    main()
