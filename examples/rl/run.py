"""A run: a server of the policy, and what is the same whoever trains: rollouts, the measure, the swap, the record.

Owns the order of the random draws, so that runs of one seed ask the same questions whatever trains and drifts.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agent import Episode, SeenSession, Task, ToolAgent
from drift import TrainedRow, changed_turns, is_rendered_alike, with_drift
from items import HELD_OUT, TRAINED
from numpy.typing import NDArray
from openai import AsyncOpenAI
from policy import Policy, StepFigures
from report import step_line
from teacher import TaughtClient, Teacher, taught_advantages

from stenograph.client import DecodedSample, PrintedProgress, Rollout, RolloutBatch, silent
from stenograph.text.renderer import Renderer
from stenograph.trainers.rows import advantages, versions

FORBIDDEN = ("special_token_count", "special_token_type", "non_assistant_text")
"""The classes of drift that exact ids never have (docs/drift.md)."""


@contextmanager
def served(folder: Path, weights: Path, family: str, threads: int) -> Iterator[tuple[str, int]]:
    """A server of the policy, with its embedded engine: its address, and its process's id."""
    flags = ["--model", str(folder), "--weights-dir", str(weights), "--family", family, "--max-batch", "48"]
    # However this process ends, the server does: its engine's process ends with it.
    flags += ["--engine-threads", str(threads), "--exit-with", str(os.getpid())]
    command = [sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"ready at (http://\S+)", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit(f"the server did not start: exit code {process.wait()}")
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait(60)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedSample:
    """A sample as the trainer gets it; `exact` without the fault that was asked for. `advantage` is its rollout's, or
    that of each token [T]."""

    rollout: Rollout[Episode]
    sample: DecodedSample
    advantage: float | NDArray[np.float64]
    row: TrainedRow
    exact: TrainedRow


@dataclass(frozen=True, slots=True, eq=False)
class SampledStep:
    """A step's rollouts. `record` is its line so far."""

    batch: RolloutBatch[Episode]
    samples: Sequence[TrainedSample]
    record: dict[str, Any]

    @property
    def rows(self) -> list[TrainedRow]:
        """What is trained."""
        return [one.row for one in self.samples]

    @property
    def advantages(self) -> list[float | NDArray[np.float64]]:
        """Of each row."""
        return [one.advantage for one in self.samples]


def in_order(batch: RolloutBatch[Episode], agent: ToolAgent) -> RolloutBatch[Episode]:
    """The batch with each group's rollouts in the order of their members, whichever ended first."""
    groups = (
        dataclasses.replace(group, rollouts=tuple(sorted(group.rollouts, key=agent.member_of)))
        for group in batch.groups
    )
    return dataclasses.replace(batch, groups=tuple(groups))


def rewarded_samples(
    batch: RolloutBatch[Episode],
) -> list[tuple[Rollout[Episode], DecodedSample, float | NDArray[np.float64]]]:
    """Each sample with the advantage of its rollout's reward in its group."""
    return [
        (rollout, sample, advantage)
        for rollout, advantage in advantages(batch.groups)
        for sample in rollout.samples or ()
        if sample.num_trained
    ]


def tokens_digest(samples: Sequence[TrainedSample]) -> str:
    """A digest of a step's exact tokens, by which two runs are compared."""
    found = hashlib.sha256()
    for one in samples:
        found.update(one.exact.tokens.tobytes() + one.exact.mask.tobytes())
    return found.hexdigest()[:16]


class Run:
    """One run: a policy, a server, and what each step came to."""

    def __init__(
        self,
        options: argparse.Namespace,
        task: Task,
        policy: Policy,
        renderer: Renderer,
        client: TaughtClient,
        url: str,
        teacher: Teacher | None = None,
    ) -> None:
        self.options, self.task, self.policy, self.renderer = options, task, policy, renderer
        self.client, self.url, self.teacher = client, url, teacher
        self.chance = random.Random(options.seed)
        self.steps: list[dict[str, Any]] = []

    def episodes(self, items: Sequence[str]) -> list[Episode]:
        """An episode of each item."""
        return [self.task.drawn(item, self.chance) for item in items]

    async def rollouts(
        self, label: str, episodes: Sequence[Episode], group_size: int, *, keeps_seen: bool = False
    ) -> tuple[RolloutBatch[Episode], ToolAgent]:
        """A group of rollouts for each episode. One whose agent fails has no reward to speak of: 0.

        `label` says which rollouts of the run these are: it and the run's seed decide what is sampled.
        """
        # One pool of connections; each session has its own address and key.
        async with AsyncOpenAI(base_url=self.url, api_key="none", timeout=600.0, max_retries=2) as chat:
            agent = ToolAgent(
                chat, self.task, f"{self.options.seed} {label}", episodes, keeps_seen, self.options.forced_calls
            )
            batch = await self.client.rollouts(
                agent,
                episodes,
                group_size=group_size,
                failed_reward=0.0,
                session={"sampling": {"force": {"temperature": self.options.temperature, "top_p": 1.0}}},
                progress=PrintedProgress() if sys.stderr.isatty() else silent,
            )
        lost = [rollout for group in batch.others for rollout in group.others]
        if lost:
            print(f"{len(batch.others)} groups are left out, for lost rollouts: {lost[0].error}", file=sys.stderr)
        if not batch.rollouts:
            raise SystemExit("no rollout came to an end; the server's lines above say why")
        return in_order(batch, agent), agent

    async def held_out(self, label: str, num_episodes: int) -> dict[str, float]:
        """Full success over episodes of items that are never trained, with a 95 % interval (Wilson)."""
        items = [HELD_OUT[index % len(HELD_OUT)] for index in range(num_episodes)]
        batch, _ = await self.rollouts(label, self.episodes(items), 1)
        rewards = np.array([rollout.reward for rollout in batch.rollouts], float)
        num, share, z = len(rewards), float((rewards == 1.0).mean()), 1.96
        middle, width = share + z * z / (2 * num), z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
        scale = 1 + z * z / num
        low, high = (middle - width) / scale, (middle + width) / scale
        return {"success": share, "low": low, "high": high, "episodes": num, "reward": float(rewards.mean())}

    async def swap(self, version: int, *, is_last: bool = False) -> float:
        """Into the running engine the weights that sample next: these, or with `--stale` those of as many steps before,
        until the last; returns the seconds that it took."""
        began = time.monotonic()
        options = self.options
        served = version if is_last else self.served_version(version)
        self.policy.save(self.weights_of(version), getattr(torch, options.engine_weights))
        if options.stale:  # an interrupted run goes on from its checkpoint, with the weights from before that
            every, done = options.checkpoint_every or 1, max(0, version - 1)
            for old in range(version if is_last else done - done % every - options.stale):
                shutil.rmtree(self.weights_of(old), ignore_errors=True)
        await self.client.update_weights(str(self.weights_of(served).resolve()), version=str(served))
        return time.monotonic() - began

    def weights_of(self, version: int) -> Path:
        """The folder of a version; it is one for all where none is stale."""
        return Path(self.options.out / "weights" / (f"policy-{version}" if self.options.stale else "policy"))

    def served_version(self, version: int) -> int:
        """What samples the step that begins with these weights."""
        return max(0, version - int(self.options.stale))

    def asked(self) -> list[Episode]:
        """The episodes of a step."""
        return self.episodes(self.chance.sample(TRAINED, self.options.prompts))

    async def sampled(self, number: int, episodes: Sequence[Episode], group_size: int) -> SampledStep:
        """A step's rollouts, with the fault that was asked for, and what is known before the update."""
        label, taught, began = f"step {number}", dict[str, float](), time.monotonic()
        if self.teacher is None:
            batch, agent = await self.rollouts(label, episodes, group_size, keeps_seen=True)
            rollout_s = time.monotonic() - began
            pairs = rewarded_samples(batch)
        else:
            async with self.client.kept():
                batch, agent = await self.rollouts(label, episodes, group_size, keeps_seen=True)
                rollout_s = time.monotonic() - began
                batch = await self.teacher.scored(self.client, batch)
            pairs = list(taught_advantages(batch))
            apart, num = sum(float(one.sum()) for *_, one in pairs), sum(one.num_trained for _, one, _ in pairs)
            taught = {"reverse_kl": -apart / max(1, num), "score_s": time.monotonic() - began - rollout_s}
        if not pairs:
            raise SystemExit(f"step {number} sampled no token: {batch.rollouts[0].error}")
        samples = [self.trained_sample(rollout, sample, advantage, agent) for rollout, sample, advantage in pairs]
        rewards = np.array([rollout.reward for rollout in batch.rollouts], float)
        record = {
            "step": number,
            "items": [episode.item for episode in episodes],
            "reward": float(rewards.mean()),
            "success": float((rewards == 1.0).mean()),
            "tokens": tokens_digest(samples),
            **self.exactness(number, samples, agent.seen),
            "rollout_s": rollout_s,
            **taught,
        }
        return SampledStep(batch, samples, record)

    def trained_sample(
        self,
        rollout: Rollout[Episode],
        sample: DecodedSample,
        advantage: float | NDArray[np.float64],
        agent: ToolAgent,
    ) -> TrainedSample:
        """A sample with the fault."""
        view = agent.seen[rollout.session_id or ""].view
        row = with_drift(self.options.drift, sample, self.renderer, view, self.task.tools)
        return TrainedSample(rollout, sample, advantage, row, TrainedRow.exact(sample))

    def exactness(
        self, number: int, samples: Sequence[TrainedSample], seen: dict[str, SeenSession]
    ) -> dict[str, object]:
        """What the server promises, and what a trainer that tokenizes or renders again would have changed."""
        turns = np.array([changed_turns(one.exact, self.renderer) for one in samples])
        alike = [
            is_rendered_alike(one.exact, seen[one.rollout.session_id or ""].view, self.renderer, self.task.tools)
            for one in samples
        ]
        trained_by = np.concatenate([versions(one.sample)[one.exact.mask] for one in samples])
        lines = [line for session in seen.values() for line in session.drift["lines"]]
        return {
            "drifted_samples": float(np.mean([one.row.is_changed for one in samples])),
            "changed_turns": float(turns[:, 0].sum() / turns[:, 1].sum()),
            "changed_renders": 1 - float(np.mean(alike)),
            "versions": sorted({span.version for one in samples for span in one.sample.weight_spans}),
            "other_version_tokens": int((trained_by != self.served_version(number)).sum()),
            "forbidden_drift": sum(line["counts"][kind] for line in lines for kind in FORBIDDEN),
            "uncompared_lines": sum(line["unrenderable"] is not None for line in lines),
        }

    async def over(self, step: SampledStep, figures: StepFigures, update_s: float) -> None:
        """After the update: the swap, and the step's line."""
        record = {**step.record, **dataclasses.asdict(figures), "update_s": update_s}
        record["sync_s"] = await self.swap(record["step"] + 1)
        self.steps.append(record)
        with (self.options.out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(step_line(record, self.steps, self.options.steps), flush=True)
