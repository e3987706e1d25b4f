"""Samples as one safetensors payload, in the format that the miles session server's clients decode. Pure.

Such a client pops the tensors that it knows by name, refuses what is left over, wants every field that it knows under
`_samples_meta`, and a tensor that is missing named in the sample's `nulls`; more fields in the JSON it ignores. So only
its tensors are tensors, and everything else stands in the JSON.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from stenograph.export.samples import Sample, describe

META = "_samples_meta"
"""The uint8 tensor that holds the rest, as compact UTF-8 JSON."""


def to_safetensors(
    samples: Sequence[Sample], *, session_metadata: Mapping[str, object], empty_reason: str | None
) -> bytes:
    """`tokens.i` int64 [T], `loss_mask.i` uint8 [R], `rollout_log_probs.i` float64 [R] of sample i; `_samples_meta`.

    Where there is something to replay, `rollout_routed_experts.i` and `rollout_indexer_topk.i` int32 [T - 1, …] too.
    """
    tensors: dict[str, NDArray[np.generic]] = {}
    metas: list[dict[str, object]] = []
    for index, sample in enumerate(samples):
        tensors[f"tokens.{index}"] = np.array(sample.tokens, dtype=np.int64)
        tensors[f"loss_mask.{index}"] = np.frombuffer(sample.loss_mask, dtype=np.uint8)
        tensors[f"rollout_log_probs.{index}"] = np.array(sample.rollout_log_probs, dtype=np.float64)
        nulls: list[str] = []
        for name, replay in (
            ("rollout_routed_experts", sample.routed_experts),
            ("rollout_indexer_topk", sample.indexer_topk),
        ):
            if replay is None:
                nulls.append(name)
            else:
                tensors[f"{name}.{index}"] = np.ascontiguousarray(replay)
        metas.append(_meta(sample, nulls))
    meta = {"samples": metas, "session_metadata": session_metadata, "empty_reason": empty_reason}
    tensors[META] = np.frombuffer(msgspec.json.encode(meta), dtype=np.uint8)
    return save(tensors)


def _meta(sample: Sample, nulls: list[str]) -> dict[str, object]:
    """A sample's part of the JSON. `reward` null leaves the client's own; `spec_info` empty is not measured."""
    sampling = sample.sampling_log_probs
    return {
        **describe(sample),
        "response_length": sample.response_length,
        "sampling_log_probs": None if sampling is None else sampling.tolist(),
        "spec_info": {},
        "reward": None,
        "nulls": nulls,
    }
