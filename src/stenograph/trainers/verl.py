"""Rows for verl 0.9.1: `AgentLoopOutput` of an agent loop, and the padded batch of a `DataProto`. Pure.

Source: verl/experimental/agent_loop/agent_loop.py, `AgentLoopOutput` and `_postprocess`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.samples import DecodedSample, Reward
from stenograph.trainers.rows import (
    VersionNumber,
    WrongRows,
    built,
    first_routes,
    number_of,
    of_images,
    replay_as,
    version_range,
    whole,
)

Made = TypeVar("Made")

WRITTEN_AGAINST = "verl 0.9.1"


def agent_loop_outputs(
    samples: Sequence[DecodedSample] | None,
    make: Callable[..., Made],
    metrics: object,
    *,
    reward: Reward | None = None,
    version: VersionNumber | None = None,
    filler_id: int = 0,
    experts_shape: tuple[int, int] | None = None,
    images: Mapping[str, object] | None = None,
) -> list[Made]:
    """`AgentLoopOutput`s, one for each sample of a rollout; `make` is verl's class, `metrics` an `AgentLoopMetrics`.

    The last one has the score; verl's trainer copies it to all of a rollout. The sampled tokens' versions are
    `extra_fields.min_global_steps` and `.max_global_steps`. A sample without a response is left out; a rollout without
    others is one output of two `filler_id` with nothing trained, so its score counts in its group; where the batch has
    routed experts, it needs `experts_shape`, layers and top_k. `images` are those of the samples, by SHA-256, as verl's
    processor takes them (PIL's): `multi_modal_data` has them. Raises WrongRows where one is missing.
    """
    rows = [
        agent_loop_fields(sample, version=version, images=images) for sample in samples or () if len(sample.log_probs)
    ]
    rows = rows or [_filler(filler_id, experts_shape)]
    rows[-1]["reward_score"] = number_of(reward)
    if isinstance(reward, Mapping):
        extra = cast("Mapping[str, object]", rows[-1]["extra_fields"])
        rows[-1]["extra_fields"] = {**extra, "reward_extra_info": dict(reward)}
    return [built(make, {**row, "metrics": metrics}, written_against=WRITTEN_AGAINST) for row in rows]


def _filler(filler_id: int, experts_shape: tuple[int, int] | None) -> dict[str, object]:
    return {
        "prompt_ids": [filler_id],
        "response_ids": [filler_id],
        "response_mask": [0],
        "response_logprobs": [0.0],
        "routed_experts": None if experts_shape is None else first_routes(*experts_shape).astype(np.int16),
        "num_turns": 0,
        "extra_fields": {"min_global_steps": None, "max_global_steps": None},
    }


def agent_loop_fields(
    sample: DecodedSample, *, version: VersionNumber | None = None, images: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The fields of an `AgentLoopOutput`, but `metrics` and the score. `num_turns` counts prompts and replies."""
    rows, start = whole(sample, shows_images=True), sample.prompt_length
    shown = {"multi_modal_data": {"images": of_images(sample, images or {})}} if sample.media else {}
    return {
        **shown,
        "prompt_ids": rows.tokens[:start].tolist(),
        "response_ids": rows.tokens[start:].tolist(),
        "response_mask": sample.loss_mask.tolist(),
        "response_logprobs": sample.log_probs.tolist(),
        "routed_experts": replay_as(np.int16, sample.routed_experts, num_zero_rows=1),
        "num_turns": 2 * len(sample.turns),
        "extra_fields": _versions(sample, version),
    }


def padded_batch(
    samples: Sequence[DecodedSample],
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    rewards: Sequence[float | None] = (),
) -> dict[str, NDArray[np.generic]]:
    """The tensors of a `DataProto` as NumPy: prompts padded on the left, responses on the right, to the lengths given
    or the longest. `DataProto.from_dict(tensors={name: torch.from_numpy(row) for name, row in batch.items()})`.

    `rewards`, one for each sample, are `rm_scores` on the last token of its response, and those of turns and tokens on
    theirs. Raises WrongRows if a sample is
    longer than the lengths, or has no response.
    """
    prompts = max(sample.prompt_length for sample in samples) if prompt_length is None else prompt_length
    responses = max(sample.response_length for sample in samples) if response_length is None else response_length
    size = (len(samples), prompts + responses)
    input_ids, attended = np.full(size, pad_id, np.int64), np.zeros(size, np.int64)
    mask, nats = np.zeros((len(samples), responses), np.int64), np.zeros((len(samples), responses), np.float32)
    scores = np.zeros_like(nats)
    for index, sample in enumerate(samples):
        begin, end = prompts - sample.prompt_length, prompts + sample.response_length
        if begin < 0 or end > size[1] or end == prompts:
            raise WrongRows(
                f"sample {index} has {sample.prompt_length} prompt and {sample.response_length} response tokens; the"
                f" batch has room for {prompts} and {responses}, and no sample is without a response: pass max_seq_len"
                " to session.samples"
            )
        rows = whole(sample, places_rewards=True)
        input_ids[index, begin:end], attended[index, begin:end] = rows.tokens, 1
        mask[index, : sample.response_length] = sample.loss_mask
        nats[index, : sample.response_length] = sample.log_probs
        if index < len(rewards):
            scores[index, sample.response_length - 1] = rewards[index] or 0.0
        if sample.token_rewards is not None:
            scores[index, : sample.response_length] += sample.token_rewards
    batch: dict[str, NDArray[np.generic]] = {
        "prompts": input_ids[:, :prompts],
        "responses": input_ids[:, prompts:],
        "response_mask": mask,
        "input_ids": input_ids,
        "attention_mask": attended,
        "position_ids": np.maximum(np.cumsum(attended, axis=1) - 1, 0),
        "rollout_log_probs": nats,
    }
    has_scores = rewards or any(sample.token_rewards is not None for sample in samples)
    return batch | ({"rm_scores": scores} if has_scores else {})


def _versions(sample: DecodedSample, version: VersionNumber | None) -> dict[str, object]:
    oldest, newest = version_range(sample, version)
    return {"min_global_steps": oldest, "max_global_steps": newest}
