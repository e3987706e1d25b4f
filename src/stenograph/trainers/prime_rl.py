"""Rows for prime-rl (2026-08): `TrainingSample`, a msgspec struct that its orchestrator hands to the trainer. Pure.

Its trainer shifts all arrays by itself. Source: src/prime_rl/transports/rollouts/types.py.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from stenograph.client.samples import DecodedSample
from stenograph.trainers.rows import WrongRows, built, replay_as, whole, with_zero_row

Made = TypeVar("Made")

WRITTEN_AGAINST = "prime-rl of 2026-08"


def training_samples(
    samples: Sequence[DecodedSample],
    make: Callable[..., Made],
    *,
    env_name: str,
    advantage: float | None,
    routed_experts: Callable[..., object] | None = None,
) -> list[Made]:
    """`TrainingSample`s, one for each sample that trains a token; `make` is prime-rl's class.

    All arrays are over T. `advantage` stands where the mask is set, else 0.0; None leaves the advantages to its
    orchestrator. Samples with routed experts need `routed_experts`, its class `RoutedExperts`.
    """
    made: list[Made] = []
    for sample in samples:
        if not sample.num_trained:
            continue
        rows = whole(sample)
        fields: dict[str, object] = {
            "token_ids": rows.tokens.tolist(),
            "mask": rows.mask.tolist(),
            "logprobs": rows.log_probs.tolist(),
            "temperatures": rows.temperatures.tolist(),
            "env_name": env_name,
        }
        if advantage is not None:
            fields["advantages"] = np.where(rows.mask, advantage, 0.0).tolist()
        experts = with_zero_row(sample.routed_experts)
        if experts is not None and experts.dtype != np.uint8:
            experts = replay_as(np.int32, experts)  # PyTorch computes little with wider unsigned types
        if experts is not None:
            if routed_experts is None:
                raise WrongRows("a sample has routed experts: pass routed_experts=RoutedExperts, prime-rl's class")
            fields["routed_experts"] = built(
                routed_experts,
                {"data": experts.tobytes(), "shape": list(experts.shape), "dtype": str(experts.dtype)},
                written_against=WRITTEN_AGAINST,
            )
        made.append(built(make, fields, written_against=WRITTEN_AGAINST))
    return made
