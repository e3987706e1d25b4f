"""Rows for tinker 0.38.0: `Datum`, with rows aligned with the logits. Pure.

Sources: tinker/types/datum.py; the cookbook's rl/data_processing.py.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from stenograph.client.samples import DecodedSample
from stenograph.trainers.rows import built, shifted, whole

Made = TypeVar("Made")

WRITTEN_AGAINST = "tinker 0.38.0"


def datums(
    samples: Sequence[DecodedSample],
    make: Callable[..., Made],
    model_input: Callable[[list[int]], object],
    *,
    advantage: float,
    with_mask: bool = False,
) -> list[Made]:
    """`Datum`s, one for each sample with a trained token; `make` is `Datum`, `model_input` is `ModelInput.from_ints`.

    The input has no last token, the rows no first: `target_tokens` int64, `logprobs` and `advantages` float32, the last
    two 0 where nothing is trained. `with_mask` adds `mask` float32, as the cookbook keeps it; its losses refuse it.
    """
    made: list[Made] = []
    for sample in samples:
        if not sample.num_trained:
            continue
        rows = whole(sample)
        mask = shifted(rows.mask).astype(np.float32)
        inputs: dict[str, object] = {
            "target_tokens": shifted(rows.tokens).copy(),
            "logprobs": shifted(rows.log_probs).astype(np.float32),
            "advantages": mask * np.float32(advantage),
        }
        if with_mask:
            inputs["mask"] = mask
        fields = {"model_input": model_input(rows.tokens[:-1].tolist()), "loss_fn_inputs": inputs}
        made.append(built(make, fields, written_against=WRITTEN_AGAINST))
    return made
