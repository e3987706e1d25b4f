"""Samples for miles and slime (2026-08): their `Sample`, made of a rollout's input sample. Pure.

Both pad their rows over the response by `(prompt length - 1, 1)` before they compare them with the logits. Sources:
miles/utils/types.py and slime/utils/types.py `Sample`; miles/ray/rollout/train_data_conversion.py;
slime/ray/rollout.py `_convert_samples_to_train_data`; slime/backends/megatron_utils/loss.py `_build_topp_keep_mask`.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.samples import DecodedSample, Reward
from stenograph.trainers.rows import WrongRows, WrongTrainer, check_trainable, first_routes, replay_as, support_rows

Made = TypeVar("Made")

WRITTEN_AGAINST = "miles 31f1ca96 and slime 624b824a, both of 2026-08-21"

ROLLOUT_ID = "rollout_id"
TOP_P_IDS, TOP_P_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
INDEXER = "rollout_indexer_topk"


def rollout_samples(
    samples: Sequence[DecodedSample] | None,
    input_sample: Made,
    *,
    rollout_id: int | None = None,
    reward: Reward | None = None,
    replays_top_p: bool | None = None,
    experts_shape: tuple[int, int] | None = None,
    indexer_shape: tuple[int, int] | None = None,
    filler_id: int = 0,
) -> list[Made]:
    """Deep copies of `input_sample`, a `Sample` of miles or slime, one for each decoded sample of its rollout.

    Prompt, label, group and index stay the input's. Siblings share `rollout_id`, so a rollout counts once: a field
    where the class has it, and in `metadata` always. `reward` None leaves the samples' own, from the outcome.

    Without samples there is one, ABORTED, of two `filler_id` with nothing trained. Where the trainer replays, it needs
    `experts_shape` and `indexer_shape`, layers and top_k; an engine's flat indexer ids get this shape.

    `replays_top_p`: whether slime's `--rollout-top-p` is below 1; it then replays: each sample has the ids open to
    sampling, and log-probabilities over them. None: where a turn was sampled with top_p. Raises WrongRows,
    WrongTrainer.
    """
    names = {one.name for one in dataclasses.fields(input_sample)}  # type: ignore[arg-type]
    missing = sorted(set(_FIELDS) - names)
    if missing:
        raise WrongTrainer(
            f"{type(input_sample).__qualname__} has no {', '.join(missing)}: these rows are written against"
            f" {WRITTEN_AGAINST}."
        )
    if not samples:
        aborted = _aborted(input_sample, names, rollout_id, filler_id)
        _set_fillers(aborted, names, reward, experts_shape, indexer_shape)
        return [aborted]
    if replays_top_p is None:
        replays_top_p = TOP_P_IDS in names and any("top_p" in turn for sample in samples for turn in sample.turns)
    kind: Any = type(input_sample)
    made: list[Made] = []
    for sample in samples:
        one: Any = copy.deepcopy(input_sample)
        one.tokens = sample.tokens.tolist()
        one.response = sample.response
        one.response_length = sample.response_length
        one.loss_mask = sample.loss_mask.tolist()
        one.weight_versions = list(sample.weight_versions)
        one.rollout_routed_experts = replay_as(np.int32, sample.routed_experts)
        if INDEXER in names:
            one.rollout_indexer_topk = _by_layer(replay_as(np.int32, sample.indexer_topk), indexer_shape)
        _set_log_probs(one, sample, replays_top_p)
        one.prefix_cache_info = kind.PrefixCacheInfo(
            cached_tokens=sample.num_cached_tokens, total_prompt_tokens=sample.num_prompt_tokens
        )
        one.status = kind.Status(sample.status)
        one.reward = copy.deepcopy(sample.reward if reward is None else reward)
        one.metadata = {**(one.metadata or {}), **copy.deepcopy(dict(sample.metadata))}
        made.append(_identified(one, names, rollout_id))
    return made


_FIELDS = (
    "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions",
    "rollout_routed_experts", "status", "reward", "metadata", "prefix_cache_info", "remove_sample",
)  # fmt: skip


def _identified(one: Any, names: set[str], rollout_id: int | None) -> Any:
    one.metadata[ROLLOUT_ID] = rollout_id
    if ROLLOUT_ID in names:
        one.rollout_id = rollout_id
    return one


def _set_log_probs(one: Any, sample: DecodedSample, replays_top_p: bool) -> None:
    """Tempered ones; where slime replays top_p, those over the ids open to sampling, and these ids."""
    if not replays_top_p:
        check_trainable(sample)
        one.rollout_log_probs = sample.log_probs.tolist()
        return
    support = support_rows(sample)
    one.rollout_log_probs = support.log_probs.tolist()
    setattr(one, TOP_P_IDS, support.ids.tolist())
    setattr(one, TOP_P_OFFSETS, support.offsets.tolist())


def _by_layer(indexer: NDArray[np.int32] | None, shape: tuple[int, int] | None) -> NDArray[np.int32] | None:
    """Indexer ids [T - 1, layers, top_k], as miles has them."""
    if indexer is None or indexer.ndim == 3:
        return indexer
    if shape is None or min(shape) < 1 or indexer.shape[1] != shape[0] * shape[1]:
        raise WrongRows(
            f"a sample has {indexer.shape[1]} indexer ids for each token, and miles wants them by layer: pass"
            f" indexer_shape=(layers, top_k), got {shape}"
        )
    return indexer.reshape(len(indexer), *shape)


def _aborted(input_sample: Made, names: set[str], rollout_id: int | None, filler_id: int) -> Made:
    """A sample with nothing trained, accepted wherever a trained one is."""
    kind: Any = type(input_sample)
    one: Any = copy.deepcopy(input_sample)
    one.tokens, one.response, one.response_length = [filler_id, filler_id], "", 1
    one.loss_mask, one.rollout_log_probs, one.weight_versions = [0], [0.0], []
    one.status, one.remove_sample = kind.Status.ABORTED, True
    one.prefix_cache_info = kind.PrefixCacheInfo()
    one.metadata = dict(one.metadata or {})
    return cast("Made", _identified(one, names, rollout_id))


def _set_fillers(
    one: Any,
    names: set[str],
    reward: Reward | None,
    experts_shape: tuple[int, int] | None,
    indexer_shape: tuple[int, int] | None,
) -> None:
    """The rest of an aborted sample. Its routes are the first experts of each layer: slime refuses zeros alone."""
    one.rollout_routed_experts = None if experts_shape is None else first_routes(*experts_shape)
    if INDEXER in names:
        one.rollout_indexer_topk = None if indexer_shape is None else first_routes(*indexer_shape)
    if TOP_P_IDS in names:
        setattr(one, TOP_P_IDS, [])
        setattr(one, TOP_P_OFFSETS, [0, 0])
    if reward is not None:
        one.reward = copy.deepcopy(reward)
