"""Rows for TRL 1.16.0: `GRPOTrainer(rollout_func=…)`, and `RolloutSample` of the experimental `AsyncGRPOTrainer`. Pure.

Sources: trl/trainer/grpo_trainer.py `_generate`; trl/experimental/async_grpo/async_rollout_worker.py `RolloutSample`.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from stenograph.client.batch import Rollout, RolloutBatch, RolloutGroup
from stenograph.client.samples import DecodedSample
from stenograph.trainers.rows import VersionNumber, advantages, built, check_trainable, number_of, version_range, whole

T = TypeVar("T")
Made = TypeVar("Made")

WRITTEN_AGAINST = "trl 1.16.0"

REWARD_KEY = "rollout_reward"
"""The name under which `rollout_rows` passes each rollout's reward to the reward functions."""


def rollout_rows(batch: RolloutBatch[T], *, num_prompts: int, filler_id: int) -> dict[str, list[object]]:
    """The rows of `rollout_func(prompts, trainer)`: one for each prompt, in order.

    Run the prompts as the tasks of a batch with `group_size` 1. `env_mask` is 1 on trained tokens. A rollout of several
    samples gives the one with most trained tokens, and `num_left_out` counts the others'; one without any gives a row
    of two `filler_id` with nothing trained, because TRL takes no empty completion, and its reward counts all the same.
    `rollout_reward` is None for a rollout without one, or a lost one.
    """
    rows: dict[str, list[object]] = {
        name: []
        for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", REWARD_KEY, "num_left_out", "rollout_end")
    }
    by_index: dict[int, Rollout[T]] = {}
    for group in (*batch.groups, *batch.others):
        for rollout in (*group.others, *group.rollouts):
            by_index[group.index] = rollout
    for index in range(num_prompts):
        _add(rows, by_index.get(index), filler_id)
    return rows


def _add(rows: dict[str, list[object]], rollout: Rollout[T] | None, filler_id: int) -> None:
    samples = [] if rollout is None else [one for one in rollout.samples or () if len(one.log_probs)]
    kept = max(samples, key=lambda sample: sample.num_trained, default=None)
    if kept is None or rollout is None:
        prompt, completion, nats, mask = [filler_id], [filler_id], [0.0], [0]
    else:
        check_trainable(kept)
        prompt, completion = _halves(kept)
        nats, mask = kept.log_probs.tolist(), kept.loss_mask.tolist()
    rows["prompt_ids"].append(prompt)
    rows["completion_ids"].append(completion)
    rows["logprobs"].append(nats)
    rows["env_mask"].append(mask)
    rows[REWARD_KEY].append(None if rollout is None else number_of(rollout.reward))
    rows["num_left_out"].append(sum(sample.num_trained for sample in samples if sample is not kept))
    rows["rollout_end"].append(None if rollout is None else rollout.end)


def rollout_reward(**columns: Sequence[object]) -> list[float | None]:
    """The reward function for `rollout_rows`: `GRPOTrainer(reward_funcs=[rollout_reward], …)`."""
    return [None if reward is None else float(str(reward)) for reward in columns[REWARD_KEY]]


def rollout_samples(
    groups: Sequence[RolloutGroup[T]],
    make: Callable[..., Made],
    *,
    model_version: int | None = None,
    version: VersionNumber | None = None,
    scaled: bool = True,
) -> list[Made]:
    """`RolloutSample`s, one for each sample with a trained token, with its rollout's advantage within its group.

    `make` is TRL's class. `model_version` is the oldest version of the sample's tokens, or, where the engine told none,
    the given one.
    """
    made: list[Made] = []
    numbers = {id(rollout): group.index for group in groups for rollout in group.rollouts}
    for rollout, advantage in advantages(groups, scaled=scaled):
        for sample in rollout.samples or ():
            if sample.num_trained:
                fields = _fields(sample, advantage, model_version, version)
                fields["group_id"] = numbers[id(rollout)]
                fields["metrics"] = {"reward": number_of(rollout.reward), "rollout_s": rollout.seconds}
                made.append(built(make, fields, written_against=WRITTEN_AGAINST))
    return made


def _fields(
    sample: DecodedSample, advantage: float, model_version: int | None, version: VersionNumber | None
) -> dict[str, object]:
    rows = whole(sample)
    oldest, _ = version_range(sample, version)
    return {
        "prompt": [],
        "completion": [{"role": "assistant", "content": sample.response}],
        "input_ids": rows.tokens,
        "completion_mask": rows.mask.astype(np.int64),
        "old_log_probs": rows.log_probs.astype(np.float32),
        "advantage": advantage,
        "model_version": (model_version or 0) if oldest is None else oldest,
    }


def _halves(sample: DecodedSample) -> tuple[list[int], list[int]]:
    tokens: list[int] = sample.tokens.tolist()
    return tokens[: sample.prompt_length], tokens[sample.prompt_length :]
