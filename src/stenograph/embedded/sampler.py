"""Samples one token from a row of logits. Owns a request's random generator and its token counts; knows no batch.

The logits are processed in vLLM's order: penalties, bias, grammar, temperature, min-p, top-k, top-p. Raw logprobs are
taken before any of it. Everything is float64 and over the whole vocabulary; only values are sorted, as sorting indices
takes ten times as long.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.core.logprobs import GREEDY_BELOW, separates_tempered
from stenograph.core.support import Ids
from stenograph.core.types import SamplingParams, TopLogprob
from stenograph.embedded.forward.weights import F32Array

Doubles = NDArray[np.float64]
Allowed = NDArray[np.bool_]
Places = NDArray[np.intp]


class DeadEnd(Exception):
    """The grammar allows no token of the vocabulary."""


class BadLogits(Exception):
    """The model's logits are NaN or infinite; the request is not to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token, ln p of it in nats under the raw and under the sampling distribution, and the likeliest (raw).

    `tempered_logprob` is given if it differs from both: `core.logprobs.separates_tempered`. `support` [N]: the ids open
    to sampling, ascending; None if every id is, or if it was not asked for.
    """

    id: int
    logprob: float
    tempered_logprob: float | None
    sampling_logprob: float
    top: tuple[TopLogprob, ...]
    support: Ids | None


class TokenSampler:
    """Samples the tokens of one request. The same seed samples the same tokens, whatever else runs."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.PCG64(None if params.seed is None else params.seed % 2**64))
        self._prompt = np.unique(np.asarray(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else None
        self._separates_tempered = separates_tempered(params)
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.array([id_ for id_, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float64)

    def sample(self, logits: F32Array, allowed: Allowed | None) -> SampledToken:
        """Sample from `logits` [V] among the ids `allowed` [V] (None: all). Raises DeadEnd and BadLogits."""
        exact = logits.astype(np.float64)
        ln_total = log_sum_exp(exact)
        if not math.isfinite(ln_total):
            raise BadLogits
        scores = self._penalized(exact)
        ids = None if allowed is None else np.flatnonzero(allowed)
        if ids is not None:
            scores = scores[ids]
        if not len(scores):
            raise DeadEnd
        best = int(np.argmax(scores))
        if not np.isfinite(scores[best]):
            raise BadLogits
        place, sampling, kept = (best, 0.0, None)
        if self._params.temperature >= GREEDY_BELOW:
            place, sampling, kept = self._place(scores)
        chosen = place if ids is None else int(ids[place])
        self._counts[chosen] += 1
        tempered: float | None = None
        if self._separates_tempered:
            scaled = exact / self._params.temperature
            tempered = float(scaled[chosen]) - log_sum_exp(scaled)
        return SampledToken(
            id=chosen,
            logprob=float(exact[chosen]) - ln_total,
            tempered_logprob=tempered,
            sampling_logprob=sampling,
            top=top_logprobs(exact, ln_total, self._params.num_top_logprobs),
            support=_support(ids, kept) if self._params.support else None,
        )

    def _penalized(self, logits: Doubles) -> Doubles:
        """Logits with penalties and bias. Source of the penalties: vLLM's and OpenAI's API references."""
        params = self._params
        if self._prompt is None and not (params.presence_penalty or params.frequency_penalty or params.logit_bias):
            return logits
        scores = logits.copy()
        sampled = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if self._prompt is not None:
            seen = np.union1d(self._prompt, sampled)
            factor = params.repetition_penalty
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        if len(sampled) and (params.presence_penalty or params.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            scores[sampled] -= params.presence_penalty + params.frequency_penalty * counts
        np.add.at(scores, self._bias_ids, self._biases)  # an id that is there twice gets both
        return scores

    def _place(self, scores: Doubles) -> tuple[int, float, Places | None]:
        """A place in `scores` [N], ln p of it under the sampling distribution, and the places left (None: all) when the
        unlikely ones are cut off."""
        scaled = scores / self._params.temperature
        kept = kept_places(scaled, self._params)
        if kept is not None:
            scaled = scaled[kept]
        scaled -= scaled.max()
        cumulative: Doubles = np.exp(scaled).cumsum()
        total = float(cumulative[-1])
        place = int(cumulative.searchsorted(self._random.random() * total, side="right"))
        if place >= len(scaled) or scaled[place] == -np.inf:  # the random number fell on the rounding of the last step
            place = int(np.argmax(scaled))
        logprob = min(0.0, float(scaled[place]) - math.log(total))
        return place if kept is None else int(kept[place]), logprob, kept


def _support(allowed: Ids | None, kept: Places | None) -> Ids | None:
    """The ids left by truncation: of the `allowed` (None: all), the ones at its places."""
    if allowed is None or kept is None:
        return kept if allowed is None else allowed
    left: Ids = allowed[kept]
    return left


def log_sum_exp(scores: Doubles) -> float:
    """ln of the sum of exp(scores), over [V]; NaN and infinity stay so."""
    highest = scores.max()
    if not np.isfinite(highest):
        return float(highest)
    return float(highest + np.log(np.exp(scores - highest).sum()))


def kept_places(scores: Doubles, params: SamplingParams) -> Places | None:
    """The places in `scores` [N] left by min-p, then top-k, then top-p, ascending; None: all.

    The likeliest always stays; of equal ones, the first.
    """
    has_top_k = 0 < params.top_k < len(scores)
    if params.min_p <= 0.0 and params.top_p >= 1.0 and not has_top_k:
        return None
    places = np.flatnonzero(scores >= scores.max() + np.log(params.min_p) if params.min_p > 0.0 else scores > -np.inf)
    if has_top_k:
        places = places[highest_places(scores[places], params.top_k)]
    if params.top_p < 1.0:
        places = places[_nucleus(scores[places], params.top_p)]
    return places


def highest_places(scores: Doubles, num: int) -> Places:
    """Places of the `num` highest in `scores` [N], ascending; of equal ones, the first."""
    if num >= len(scores):
        return np.arange(len(scores))
    lowest = np.partition(scores, -num)[-num]
    above = np.flatnonzero(scores > lowest)
    level = np.flatnonzero(scores == lowest)[: num - len(above)]
    return np.sort(np.concatenate((above, level)))


def _nucleus(scores: Doubles, top_p: float) -> Places:
    """The fewest places with a share of `top_p` or more, ascending.

    Only heavy ones are sorted. Each light one is lighter than an N-th of the share to leave out, so all of them
    together are lighter than it: none is needed.
    """
    weights: Doubles = np.exp(scores - scores.max())
    total = float(weights.sum())
    heavy = np.flatnonzero(weights >= total * (1.0 - top_p) / len(weights))
    cumulative: Doubles = np.cumsum(np.sort(weights[heavy])[::-1])
    num_needed = int(cumulative.searchsorted(total * top_p, side="left")) + 1
    return heavy[highest_places(scores[heavy], num_needed)]


def top_logprobs(logits: Doubles, ln_total: float, num_top: int) -> tuple[TopLogprob, ...]:
    """The `num_top` likeliest ids, the likeliest first; `ln_total` is the log_sum_exp of `logits` [V]."""
    if num_top == 0:
        return ()
    ids = highest_places(logits, num_top)
    ordered = ids[np.argsort(-logits[ids], kind="stable")]
    return tuple(TopLogprob(id=int(id_), logprob=float(logits[id_]) - ln_total) for id_ in ordered)
