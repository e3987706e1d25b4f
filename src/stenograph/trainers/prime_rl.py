"""Rows for prime-rl (2026-08): `TrainingSample`, a msgspec struct from its orchestrator to the trainer. Pure.

Its trainer shifts all arrays by itself. Sources: src/prime_rl/transports/rollouts/types.py; trainer/batch.py
`prepare_sample` (refuses RL tokens without advantages); orchestrator/trajectories.py `_encode_mm_kwargs`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stenograph.client.samples import DecodedSample
from stenograph.trainers.rows import WrongRows, built, image_tensors, replay_as, whole

Made = TypeVar("Made")

WRITTEN_AGAINST = "prime-rl 559b4477 of 2026-08-21"


def training_samples(
    samples: Sequence[DecodedSample],
    make: Callable[..., Made],
    *,
    env_name: str,
    advantage: float | None,
    ce_weight: float = 0.0,
    ref_kl_weight: float = 0.0,
    routed_experts: Callable[..., object] | None = None,
    images: Mapping[str, Mapping[str, NDArray[np.generic]]] | None = None,
    encoded_tensor: Callable[..., object] | None = None,
) -> list[Made]:
    """`TrainingSample`s, one for each sample with a trained token; `make` is prime-rl's class.

    All arrays are over T. `advantage` stands where the mask is set, else 0.0. `ce_weight` and `ref_kl_weight` are the
    weights of the other parts of its loss on trained tokens; 0.0 leaves a part out. With `advantage` None no token
    takes part in the policy gradient (`rl_weights` 0.0), and one of the other weights must be set; reference
    log-probabilities are its orchestrator's to fill. Samples with routed experts need `routed_experts`, its class
    `RoutedExperts`. Those with images need `images`, the processor's tensors of each by SHA-256
    (`rows.image_tensors`), and `encoded_tensor`, its class `EncodedTensor`.
    """
    if advantage is None and not (ce_weight or ref_kl_weight):
        raise WrongRows(
            "prime-rl refuses tokens of the policy gradient without advantages: give each rollout's advantage"
            " (rows.advantages), or, to train by another part of its loss alone, ce_weight or ref_kl_weight"
        )
    made: list[Made] = []
    for sample in samples:
        if not sample.num_trained:
            continue
        rows = whole(sample, shows_images=True)
        fields: dict[str, object] = {
            "token_ids": rows.tokens.tolist(),
            "mask": rows.mask.tolist(),
            "logprobs": rows.log_probs.tolist(),
            "temperatures": rows.temperatures.tolist(),
            "env_name": env_name,
        }
        if advantage is None:
            fields["rl_weights"] = [0.0] * len(rows.tokens)
        else:
            fields["advantages"] = np.where(rows.mask, advantage, 0.0).tolist()
        for name, weight in (("ce_weights", ce_weight), ("ref_kl_weights", ref_kl_weight)):
            if weight:
                fields[name] = np.where(rows.mask, weight, 0.0).tolist()
        experts = replay_as(np.int16, sample.routed_experts, num_zero_rows=1)  # one type: it packs samples together
        if experts is not None:
            if routed_experts is None:
                raise WrongRows("a sample has routed experts: pass routed_experts=RoutedExperts, prime-rl's class")
            fields["routed_experts"] = built(
                routed_experts,
                {"data": experts.tobytes(), "shape": list(experts.shape), "dtype": str(experts.dtype)},
                written_against=WRITTEN_AGAINST,
            )
        if sample.media:
            fields |= _image_fields(sample, images or {}, encoded_tensor)
        made.append(built(make, fields, written_against=WRITTEN_AGAINST))
    return made


def _image_fields(
    sample: DecodedSample,
    images: Mapping[str, Mapping[str, NDArray[np.generic]]],
    encoded_tensor: Callable[..., object] | None,
) -> dict[str, object]:
    """The images' tensors, and 1 for each token that stands for one, else 0."""
    tensors = image_tensors(sample, images)
    if encoded_tensor is None:
        raise WrongRows("a sample has images: pass encoded_tensor=EncodedTensor, prime-rl's class")
    kinds = np.zeros(len(sample.tokens), np.int64)
    for one in sample.media:
        kinds[one.start : one.start + one.length] = 1
    encoded = {
        name: built(
            encoded_tensor,
            {"dtype": str(one.dtype), "shape": list(one.shape), "data": one.tobytes()},
            written_against=WRITTEN_AGAINST,
        )
        for name, one in tensors.items()
    }
    return {"mm_kwargs": encoded, "mm_token_type_ids": kinds.tolist()}
