"""Samples as one safetensors payload, in the format that the miles session server's clients decode. Pure.

Decoders of that format refuse tensors that they do not know, so everything that is not `tokens`, `loss_mask` or
`rollout_log_probs` stands in the JSON under `_samples_meta`.
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
    """`tokens.i` int64, `loss_mask.i` uint8, `rollout_log_probs.i` float64 for sample i, and `_samples_meta`."""
    tensors: dict[str, NDArray[np.generic]] = {}
    metas: list[dict[str, object]] = []
    for index, sample in enumerate(samples):
        tensors[f"tokens.{index}"] = np.array(sample.tokens, dtype=np.int64)
        tensors[f"loss_mask.{index}"] = np.frombuffer(sample.loss_mask, dtype=np.uint8)
        tensors[f"rollout_log_probs.{index}"] = np.array(sample.rollout_log_probs, dtype=np.float64)
        sampling = sample.sampling_log_probs
        metas.append(
            {
                **describe(sample),
                "response_length": sample.response_length,
                "sampling_log_probs": None if sampling is None else sampling.tolist(),
                "nulls": [],
            }
        )
    meta = {"samples": metas, "session_metadata": session_metadata, "empty_reason": empty_reason}
    tensors[META] = np.frombuffer(msgspec.json.encode(meta), dtype=np.uint8)
    return save(tensors)
