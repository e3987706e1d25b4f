"""Rows as plain dicts: SkyRL, AReaL, OpenRLHF, NeMo RL, rLLM, and a padded batch for a loop of one's own. Pure.

Arrays are NumPy; `torch.from_numpy` takes them as they are. Sources, read in 2026-08 (AReaL 2026-05): skyrl
a9564572 train/generators/base.py `GeneratorOutput`, train/trainer.py; areal experimental/openai/types.py; openrlhf
trainer/ppo_utils/samples_generator.py; nemo_rl environments/nemo_gym.py; rllm/types.py `Step`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.batch import Rollout, RolloutGroup
from stenograph.client.samples import DecodedSample
from stenograph.trainers.rows import (
    NO_VERSION,
    VersionNumber,
    WrongRows,
    check_trainable,
    first_routes,
    image_tensors,
    number_of,
    runs,
    version_range,
    versions,
    whole,
)

T = TypeVar("T")

_SKYRL_STOPS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def skyrl(
    groups: Sequence[RolloutGroup[T]],
    *,
    trajectory_id: Callable[[str, int], object] | None = None,
    filler_id: int = 0,
    images: Mapping[str, Mapping[str, NDArray[np.generic]]] | None = None,
    tensor: Callable[[NDArray[np.generic]], object] = np.asarray,
) -> dict[str, object]:
    """SkyRL's `GeneratorOutput`, step-wise: one row for each sample, `is_last_step` at each rollout's last.

    `trajectory_id(instance_id, repetition_id)` is its class `TrajectoryID`; None leaves pairs. The last row of a
    rollout has its reward, the others 0.0; SkyRL copies it by the trajectory. A rollout without a trained token is one
    row with nothing trained, of its prompt or of `filler_id`, so it counts in its group. `rollout_metrics` are under
    SkyRL's names; `rollout_expert_indices` are the samples' own arrays, None where no sample has experts. Samples with
    images need `images`, the processor's tensors of each by SHA-256 (`rows.image_tensors`), and `tensor` as
    `torch.from_numpy`; then every row has to have images.
    """
    rows = [
        row
        for group in groups
        for number, rollout in enumerate(group.rollouts)
        for row in _skyrl_rows(rollout, _trajectory(group.name, number, trajectory_id), filler_id)
    ]
    shown = _shown([cast("DecodedSample | None", row["sample"]) for row in rows], images or {}, tensor)
    out = {name: [row[name] for row in rows] for name in _SKYRL_COLUMNS}
    return {**out, "rollout_expert_indices": _experts(out), "rollout_metrics": _skyrl_metrics(out), **shown}


_SKYRL_COLUMNS = (
    "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids",
    "trajectory_generation_times", "rollout_expert_indices", "is_last_step",
)  # fmt: skip


def _trajectory(group: str, number: int, make: Callable[[str, int], object] | None) -> object:
    return (group, number) if make is None else make(group, number)


def _skyrl_rows(rollout: Rollout[T], trajectory: object, filler_id: int) -> list[dict[str, object]]:
    """The rows of a rollout, at least one; the last has its reward. Where turns or tokens have some, all rows have one
    for each token, the rollout's on the last."""
    samples = [sample for sample in rollout.samples or () if sample.num_trained]
    rows = [_skyrl_row(sample) for sample in samples] or [_untrained(rollout, filler_id)]
    shared = {"trajectory_ids": trajectory, "trajectory_generation_times": rollout.seconds}
    rewards: list[object] = [*[0.0] * (len(rows) - 1), number_of(rollout.reward) or 0.0]
    if any(sample.token_rewards is not None for sample in samples):
        by_token = [
            np.zeros(one.response_length) if one.token_rewards is None else one.token_rewards for one in samples
        ]
        by_token[-1] = by_token[-1] + np.eye(1, len(by_token[-1]), len(by_token[-1]) - 1)[0] * rewards[-1]
        rewards = [row.tolist() for row in by_token]
    return [
        {**row, **shared, "rewards": reward, "is_last_step": row is rows[-1]}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def _skyrl_row(sample: DecodedSample) -> dict[str, object]:
    check_trainable(sample, shows_images=True, places_rewards=True)
    return {
        "sample": sample,
        "prompt_token_ids": sample.tokens[: sample.prompt_length].tolist(),
        "response_ids": sample.tokens[sample.prompt_length :].tolist(),
        "loss_masks": sample.loss_mask.tolist(),
        "stop_reasons": _SKYRL_STOPS[sample.status],
        "rollout_logprobs": sample.log_probs.tolist(),
        "rollout_expert_indices": sample.routed_experts,
    }


def _untrained(rollout: Rollout[T], filler_id: int) -> dict[str, object]:
    """The row of a rollout without a trained token; its response is one token, because SkyRL takes none without."""
    first = next(iter(rollout.samples or ()), None)
    if first is not None:
        prompt = tuple(one for one in first.media if one.start < first.prompt_length)
        first = replace(first, media=prompt)
    return {
        "sample": first,
        "prompt_token_ids": [filler_id] if first is None else first.tokens[: first.prompt_length].tolist(),
        "response_ids": [filler_id],
        "loss_masks": [0],
        "stop_reasons": "abort",
        "rollout_logprobs": [0.0],
        "rollout_expert_indices": None,
    }


def _shown(
    samples: Sequence[DecodedSample | None],
    images: Mapping[str, Mapping[str, NDArray[np.generic]]],
    tensor: Callable[[NDArray[np.generic]], object],
) -> dict[str, list[object]]:
    """The columns of a batch with images. Raises WrongRows if some rows lack them: SkyRL's model takes no row without
    beside rows with them."""
    if not any(sample is not None and sample.media for sample in samples):
        return {}
    if any(sample is None or not sample.media for sample in samples):
        raise WrongRows("some rows have images and others have none: SkyRL takes batches of one sort; make two")
    columns = [image_tensors(sample, images) for sample in samples if sample is not None]
    return {name: [tensor(row[name]) for row in columns] for name in ("pixel_values", "image_grid_thw")}


def _experts(out: Mapping[str, Sequence[object]]) -> list[object] | None:
    """The experts of every row; untrained ones have one route. Raises WrongRows if others lack them."""
    column, masks = out["rollout_expert_indices"], cast("Sequence[Sequence[int]]", out["loss_masks"])
    found = next((row for row in column if row is not None), None)
    if found is None:
        return None
    if any(row is None and any(mask) for row, mask in zip(column, masks, strict=True)):
        raise WrongRows("some samples have routed experts and others have none: SkyRL replays all or nothing")
    _, layers, top_k = cast("NDArray[np.int32]", found).shape
    return [first_routes(layers, top_k) if row is None else row for row in column]


def _skyrl_metrics(out: Mapping[str, Sequence[object]]) -> dict[str, float]:
    """The figures of SkyRL's own generators for a batch. Source: its train/generators/utils.py."""
    if not out["response_ids"]:
        return {}
    lengths = np.array([len(cast("Sequence[int]", row)) for row in out["response_ids"]])
    trained = np.array([sum(cast("Sequence[int]", row)) for row in out["loss_masks"]])
    rewards = np.array([np.sum(cast("Sequence[float]", row)) for row in out["rewards"]], float)
    by_name = {"num_tokens": lengths, "assistant_tokens": trained}
    figures = {
        f"generate/{how}_{name}": float(getattr(np, numpy_name)(values))
        for name, values in by_name.items()
        for how, numpy_name in (("min", "min"), ("max", "max"), ("avg", "mean"), ("std", "std"))
    }
    for name, chosen in (("non_zero", rewards > 0), ("zero", rewards == 0)):
        figures[f"generate/avg_tokens_{name}_rewards"] = float(lengths[chosen].mean()) if chosen.any() else 0.0
    return figures


def areal(
    sample: DecodedSample, *, reward: float, version: VersionNumber | None = None
) -> dict[str, NDArray[np.generic]]:
    """AReaL's dict of one row each, [1, T]; its trainer rolls by -1 itself. Prompts have the version -1."""
    rows = whole(sample)
    by_token: dict[str, NDArray[np.generic]] = {
        "input_ids": rows.tokens,
        "loss_mask": rows.mask.astype(np.int32),
        "logprobs": rows.log_probs.astype(np.float32),
        "versions": versions(sample, version).astype(np.int32),
        "attention_mask": np.ones(len(rows.tokens), np.bool_),
    }
    batched = {name: row[None] for name, row in by_token.items()}
    return {**batched, "rewards": np.array([reward], np.float32)}


def openrlhf(sample: DecodedSample, *, reward: float) -> dict[str, object]:
    """A value for OpenRLHF's agent to return: tokens, `action_ranges` of the trained ones, own log-probabilities.

    The ranges are half-open. Its samples generator makes the rows of an `Experience` of it, without the first token.
    """
    rows = whole(sample)
    return {
        "observation_tokens": rows.tokens.tolist(),
        "action_ranges": runs(rows.mask),
        "rollout_log_probs": rows.log_probs.tolist(),
        "reward": reward,
        "scores": reward,
    }


def nemo_rl(sample: DecodedSample) -> list[dict[str, object]]:
    """NeMo RL's `message_log`: a message for each run of tokens; its mask is where `generation_logprobs` stand.

    Tokens trained by another sample are a `user`'s here, whoever wrote them.
    """
    rows = whole(sample)
    log: list[dict[str, object]] = []
    at = 0
    for start, end in runs(rows.mask):
        if at < start:
            log.append({"role": "user", "token_ids": rows.tokens[at:start]})
        nats = rows.log_probs[start:end].astype(np.float32)
        log.append({"role": "assistant", "token_ids": rows.tokens[start:end], "generation_logprobs": nats})
        at = end
    if at < len(rows.tokens):
        log.append({"role": "user", "token_ids": rows.tokens[at:]})
    return log


class RllmStep(TypedDict):
    """A step of rLLM: one call, with the whole prompt before it."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    weight_version: int | None


def rllm(sample: DecodedSample, *, version: VersionNumber | None = None) -> list[RllmStep]:
    """rLLM's steps: one for each turn with a token trained by the sample. Its transform merges those with one
    prefix."""
    rows, sampled_by = whole(sample), versions(sample, version)
    steps: list[RllmStep] = []
    for turn in sample.turns:
        start, end = cast("int", turn["start"]), cast("int", turn["end"])
        if rows.mask[start:end].any():
            known = sampled_by[start:end][sampled_by[start:end] != NO_VERSION]
            steps.append(
                {
                    "prompt_ids": rows.tokens[:start].tolist(),
                    "response_ids": rows.tokens[start:end].tolist(),
                    "logprobs": rows.log_probs[start:end].tolist(),
                    "weight_version": int(known.min()) if len(known) else None,
                }
            )
    return steps


def padded(
    samples: Sequence[DecodedSample], advantages: Sequence[float], *, pad_id: int
) -> dict[str, NDArray[np.generic]]:
    """A batch for a loop of one's own, padded on the right: `input_ids` and `attention_mask` [B, T], and, aligned with
    the logits of `input_ids[:, :-1]`, `targets`, `mask`, `log_probs`, `advantages`, `temperatures` [B, T - 1]."""
    all_rows = [whole(sample) for sample in samples]
    longest = max(len(rows.tokens) for rows in all_rows)
    size = (len(samples), longest)
    input_ids, attended = np.full(size, pad_id, np.int64), np.zeros(size, np.int64)
    mask, nats, temperatures = np.zeros(size, np.bool_), np.zeros(size, np.float32), np.ones(size, np.float32)
    for index, rows in enumerate(all_rows):
        place = (index, slice(len(rows.tokens)))
        input_ids[place], attended[place], mask[place] = rows.tokens, 1, rows.mask
        nats[place], temperatures[place] = rows.log_probs, rows.temperatures
    weights = mask * np.array(advantages, np.float32)[:, None]
    return {
        "input_ids": input_ids,
        "attention_mask": attended,
        "targets": input_ids[:, 1:],
        "mask": mask[:, 1:],
        "log_probs": nats[:, 1:],
        "advantages": weights[:, 1:],
        "temperatures": temperatures[:, 1:],
    }


def staleness(sample: DecodedSample, *, newest: int, version: VersionNumber | None = None) -> int | None:
    """Versions between the newest and the oldest of a trained token; None where none is known."""
    oldest, _ = version_range(sample, version)
    return None if oldest is None else newest - oldest
