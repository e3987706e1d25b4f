"""Draws one token from a row of logits. Owns a request's random generator and its token counts; knows no batch.

The order of what is done to the logits is vLLM's: penalties, bias, grammar, temperature, min-p, top-k, top-p. Raw
logprobs are taken before any of it. Everything is float64 and over the whole vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.core.types import SamplingParams, TopLogprob
from stenograph.embedded.weights import F32Array

Doubles = NDArray[np.float64]
Allowed = NDArray[np.bool_]


GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow."""


class DeadEnd(Exception):
    """No token has a probability above zero: grammar, bias and logits exclude each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A token, ln p of it in nats under the raw and under the sampling distribution, and the likeliest (raw)."""

    id: int
    logprob: float
    sampling_logprob: float
    top: tuple[TopLogprob, ...]


class Sampler:
    """Draws the tokens of one request. The same seed draws the same, whatever else runs."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.PCG64(None if params.seed is None else params.seed % 2**64))
        self._prompt = np.unique(np.asarray(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else None
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.array([id_ for id_, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float64)

    def draw(self, logits: F32Array, allowed: Allowed | None) -> Drawn:
        """Draw from `logits` [V] among the ids `allowed` [V] (None: all). Raises DeadEnd."""
        exact = logits.astype(np.float64)
        raw = log_softmax(exact)
        scores = self._penalized(exact)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        best = int(np.argmax(scores))
        if not np.isfinite(scores[best]):
            raise DeadEnd
        chosen, sampling = (best, 0.0) if self._params.temperature < GREEDY_BELOW else self._draw(scores)
        self._counts[chosen] += 1
        return Drawn(
            id=chosen,
            logprob=float(raw[chosen]),
            sampling_logprob=sampling,
            top=top_logprobs(raw, self._params.num_top_logprobs),
        )

    def _penalized(self, logits: Doubles) -> Doubles:
        """Logits with penalties and bias. Source of the penalties: vLLM's and OpenAI's API references."""
        params = self._params
        scores = logits.copy()
        drawn = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if self._prompt is not None:
            seen = np.union1d(self._prompt, drawn)
            factor = params.repetition_penalty
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        if len(drawn) and (params.presence_penalty or params.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            scores[drawn] -= params.presence_penalty + params.frequency_penalty * counts
        scores[self._bias_ids] += self._biases
        return scores

    def _draw(self, scores: Doubles) -> tuple[int, float]:
        logprobs = log_softmax(truncated(scores / self._params.temperature, self._params))
        cumulative: Doubles = np.exp(logprobs).cumsum()
        chosen = int(cumulative.searchsorted(self._random.random() * float(cumulative[-1]), side="right"))
        if chosen >= len(logprobs) or logprobs[chosen] == -np.inf:  # the draw fell on the rounding of the last step
            chosen = int(np.argmax(logprobs))
        return chosen, min(0.0, float(logprobs[chosen]))


def log_softmax(scores: Doubles) -> Doubles:
    """ln softmax over the last axis of [V]; -inf stays -inf."""
    shifted: Doubles = scores - scores.max()
    normal: Doubles = shifted - np.log(np.exp(shifted).sum())
    return normal


def truncated(scores: Doubles, params: SamplingParams) -> Doubles:
    """Scores [V] with -inf where min-p, top-k or top-p exclude an id. The likeliest id always stays."""
    kept = scores
    if params.min_p > 0.0:
        kept = np.where(kept >= kept.max() + np.log(params.min_p), kept, -np.inf)
    if not (0 < params.top_k < len(kept) or params.top_p < 1.0):
        return kept
    order = np.argsort(-kept, kind="stable")
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if params.top_p < 1.0:
        probabilities = np.exp(kept[order] - kept[order[0]])
        cumulative = np.cumsum(probabilities / probabilities.sum())
        order = order[: int(np.searchsorted(cumulative, params.top_p, side="left")) + 1]
    only = np.full_like(kept, -np.inf)
    only[order] = kept[order]
    return only


def top_logprobs(raw: Doubles, num_top: int) -> tuple[TopLogprob, ...]:
    """The `num_top` likeliest ids, the likeliest first."""
    if num_top == 0:
        return ()
    likeliest = np.argpartition(-raw, num_top)[:num_top] if num_top < len(raw) else np.arange(len(raw))
    ordered = likeliest[np.lexsort((likeliest, -raw[likeliest]))]
    return tuple(TopLogprob(id=int(id_), logprob=float(raw[id_])) for id_ in ordered)
