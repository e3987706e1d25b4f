"""Teacher-forced logprobs of recorded ids, to check an engine's own logprobs against."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stenograph.embedded.forward.base import Forward, LogitsFor, RowSpan, Segment
from stenograph.embedded.sampler import Doubles

CHUNK_TOKENS = 128
"""Tokens with logits held at once."""


def log_softmax(scores: Doubles) -> Doubles:
    """ln softmax over the last axis of [V]; -inf stays -inf."""
    shifted: Doubles = scores - scores.max()
    normal: Doubles = shifted - np.log(np.exp(shifted).sum())
    return normal


def line_logprobs(
    model: Forward,
    ids: Sequence[int],
    num_given: int,
    temperature: float = 1.0,
    *,
    routes: NDArray[np.integer] | None = None,
) -> list[float]:
    """ln p of `ids[num_given:]` in nats, each after all before it; `num_given` is at least 1.

    p is the softmax of the logits divided by the temperature, with nothing cut off. `routes` [T - 1, layers, top_k] are
    the experts of the tokens, a row for each but the last; -1: the router's own. Overwrites rows [0, len(ids)) of the
    model's store: give it a model not in use by an engine.
    """
    if num_given < 1:
        raise ValueError("the first token comes after nothing, and has no probability")
    line = np.array(ids, np.intc)
    if routes is not None:
        routes = np.concatenate([routes, np.full_like(routes[:1], -1, np.intc)])
    logprobs: list[float] = []
    for start in range(0, len(line), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(line))
        wanted = LogitsFor.ALL if end >= num_given else LogitsFor.NONE
        given = None if routes is None else routes[start:end].astype(np.intc)
        chunk = Segment(ids=line[start:end], start=start, spans=(RowSpan(0, end),), logits_for=wanted, routes=given)
        for at, row in enumerate(model.forward([chunk]), start=start + 1):
            if num_given <= at < len(line):
                logprobs.append(float(log_softmax(row.astype(np.float64) / temperature)[line[at]]))
    return logprobs
