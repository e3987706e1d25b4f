"""Samples for miles and slime (2026-08): their `Sample`, made of the input sample that a rollout was asked for. Pure.

Both pad their rows over the response by `(prompt length - 1, 1)` before they compare them with the logits. Sources:
miles/utils/types.py and slime/utils/types.py `Sample`; slime/backends/megatron_utils/data.py.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np

from stenograph.client.samples import DecodedSample, Reward
from stenograph.trainers.rows import WrongTrainer, check_tempered, replay_as

Made = TypeVar("Made")

WRITTEN_AGAINST = "miles and slime of 2026-08"

ROLLOUT_ID = "rollout_id"


def rollout_samples(
    samples: Sequence[DecodedSample],
    input_sample: Made,
    *,
    rollout_id: int | str | None = None,
    reward: Reward | None = None,
) -> list[Made]:
    """Copies of `input_sample`, a `Sample` of miles or slime, one for each decoded sample of its rollout.

    Prompt, label, group and index stay the input's. Siblings share `rollout_id`, so that a rollout counts once: a field
    where the class has it, and in `metadata` always. `reward` None leaves the samples' own, which is the outcome's.
    """
    names = {one.name for one in dataclasses.fields(input_sample)}  # type: ignore[arg-type]
    missing = sorted(set(_FIELDS) - names)
    if missing:
        raise WrongTrainer(
            f"{type(input_sample).__qualname__} has no {', '.join(missing)}: these rows are written against"
            f" {WRITTEN_AGAINST}."
        )
    statuses: Any = cast("Any", type(input_sample)).Status
    made: list[Made] = []
    for sample in samples:
        check_tempered(sample)
        one: Any = copy.copy(input_sample)
        one.tokens = sample.tokens.tolist()
        one.response = sample.response
        one.response_length = sample.response_length
        one.loss_mask = sample.loss_mask.tolist()
        one.rollout_log_probs = sample.log_probs.tolist()
        one.weight_versions = list(sample.weight_versions)
        one.rollout_routed_experts = replay_as(np.int32, sample.routed_experts)
        one.status = statuses(sample.status)
        one.reward = sample.reward if reward is None else reward
        one.metadata = {**(one.metadata or {}), **sample.metadata, ROLLOUT_ID: rollout_id}
        if ROLLOUT_ID in names:
            one.rollout_id = rollout_id
        made.append(one)
    return made


_FIELDS = (
    "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions",
    "rollout_routed_experts", "status", "reward", "metadata",
)  # fmt: skip
