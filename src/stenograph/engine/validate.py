"""Chunks of an engine to a `SampledTurn`, or which law they broke. Pure. An engine's word is not trusted."""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    SampledTurn,
    TopLogprob,
    WeightSpan,
    all_finite,
    token_ids,
)


class TurnCollector:
    """Gathers the chunks of one generation and checks each as it comes."""

    def __init__(self, *, vocab_size: int, max_tokens: int | None) -> None:
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._ids = token_ids()
        self._logprobs = array("d")
        self._sampling_logprobs: array[float] | None = array("d")
        self._top_logprobs: list[tuple[TopLogprob, ...]] = []
        self._weights: list[WeightSpan] = []
        self._last: Chunk | None = None

    def __repr__(self) -> str:
        return f"<TurnCollector {len(self._ids)} ids>"

    @property
    def finish(self) -> Finish | None:
        """Why the generation ended; None while it runs."""
        return None if self._last is None else self._last.finish

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk. Raises UpstreamInvalid, naming the law, and keeps nothing of a bad chunk."""
        if self.finish is not None:
            raise UpstreamInvalid("finish_is_last", "the engine went on after the chunk that ended the generation")
        self._check_ids(chunk.ids)
        _check_logprobs(chunk.logprobs)
        _check_logprobs(chunk.sampling_logprobs or ())
        if self._max_tokens is not None and len(self._ids) + len(chunk.ids) > self._max_tokens:
            raise UpstreamInvalid("max_tokens", f"the engine drew more than the {self._max_tokens} tokens asked for")
        self._take(chunk)

    def result(self) -> SampledTurn:
        """The whole turn. Raises UpstreamInvalid if the generation has no end, or no token where it needs one."""
        if self._last is None or self._last.finish is None:
            raise UpstreamInvalid("has_finish", "the engine's reply ended without a finish reason")
        if not self._ids and self._last.finish.reason is not FinishReason.ABORT:
            raise UpstreamInvalid("has_tokens", "the engine drew no token, and does not say that it was aborted")
        weights = tuple(self._weights) if self._last.weights is None else self._last.weights
        _check_spans(weights, len(self._ids))
        top = tuple(self._top_logprobs) if len(self._top_logprobs) == len(self._ids) else None
        return SampledTurn(
            ids=self._ids,
            logprobs=self._logprobs,
            sampling_logprobs=self._sampling_logprobs,
            top_logprobs=top or None,
            finish=self._last.finish,
            weights=weights,
            num_cached_tokens=self._last.num_cached_tokens,
            times=self._last.times,
            replay=self._last.replay,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if isinstance(ids, array) and self._are_in_vocab(ids):
            return
        for id_ in ids:
            if type(id_) is not int or not 0 <= id_ < self._vocab_size:
                raise UpstreamInvalid("id_in_vocab", f"{id_!r} is no token id of a vocabulary of {self._vocab_size}")

    def _are_in_vocab(self, ids: "array[int]") -> bool:
        """The same for C integers, looked at as they lie in memory."""
        found = np.frombuffer(ids, dtype=np.int32)
        return not len(found) or bool(found.min() >= 0 and found.max() < self._vocab_size)

    def _take(self, chunk: Chunk) -> None:
        start = len(self._ids)
        self._ids.extend(chunk.ids)
        self._logprobs.extend(chunk.logprobs)
        if chunk.sampling_logprobs is None:
            self._sampling_logprobs = None if chunk.ids else self._sampling_logprobs
        elif self._sampling_logprobs is not None:
            self._sampling_logprobs.extend(chunk.sampling_logprobs)
        self._top_logprobs.extend(chunk.top_logprobs or ())
        self._add_weights(chunk, start)
        self._last = chunk

    def _add_weights(self, chunk: Chunk, start: int) -> None:
        if chunk.weight_version is None or not chunk.ids:
            return
        last = self._weights[-1] if self._weights else None
        if last is not None and last.version == chunk.weight_version and last.end == start:
            start = self._weights.pop().start
        self._weights.append(WeightSpan(version=chunk.weight_version, start=start, end=len(self._ids)))


def _check_spans(weights: Sequence[WeightSpan], num_ids: int) -> None:
    end = 0
    for span in weights:
        if not end <= span.start < span.end <= num_ids:
            told = f"[{span.start}, {span.end}) after {end}"
            raise UpstreamInvalid("weight_spans", f"the spans do not ascend within {num_ids} ids: {told}")
        end = span.end


def _check_logprobs(logprobs: Sequence[float]) -> None:
    if isinstance(logprobs, array) and all_finite(logprobs):
        return
    for logprob in logprobs:
        if type(logprob) is not float or not math.isfinite(logprob):
            raise UpstreamInvalid("logprob_is_finite", f"{logprob!r} is not a finite number")
