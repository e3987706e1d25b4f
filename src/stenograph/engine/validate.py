"""Chunks of an engine to a `SampledTurn`, or the broken law. Pure. An engine's word is not trusted."""

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.support import SupportColumns, SupportReader
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    LogprobsKind,
    MixedWeights,
    SampledTurn,
    SupportPiece,
    TopLogprob,
    WeightSpan,
    token_ids,
)

MOST_ROUNDING_NATS = 1e-4
"""An engine's arithmetic may round ln 1 above 0 by this at most; the logprob is taken as 0."""
MOST_TOKENS = 2**31
"""More than any prompt has; for whoever does not know how many were sent."""

new_logprobs = cast("Callable[[], array[float]]", partial(array, "d"))
"""Makes an empty array for log-probabilities."""


def are_in_vocab(ids: "array[int]", vocab_size: int) -> bool:
    """Whether each is an id of a vocabulary of this size. Looks at the array as it lies in memory."""
    if not ids:
        return True
    found = np.frombuffer(ids, dtype=np.uint32)  # as unsigned integers, ids below 0 are the largest
    return found.item(found.argmax()) < vocab_size  # a reduction of few numbers takes twice as long


class TurnCollector(Struct, kw_only=True, eq=False):
    """Gathers the chunks of one generation and checks each as it comes."""

    vocab_size: int
    max_tokens: int | None
    num_prompt: int | None = None
    """The number of ids sent; no more can have been cached. None does not ask."""
    logprobs_kind: LogprobsKind = LogprobsKind.RAW
    """The engine's kind for this generation."""
    weight_version: str | None = None
    """The name of a turn's weights where its engine does not name them; None leaves them unnamed."""
    cached_from: str | None = None
    """The engine caches the turn under the name of these weights."""
    _ids: "array[int]" = field(default_factory=token_ids)
    _logprobs: "array[float]" = field(default_factory=new_logprobs)
    _tempered_logprobs: "array[float] | None" = field(default_factory=new_logprobs)
    _sampling_logprobs: "array[float] | None" = field(default_factory=new_logprobs)
    _forced: bytearray | None = field(default_factory=bytearray)
    _support: "_SupportGatherer | None" = None
    _top_logprobs: list[tuple[TopLogprob, ...]] = []
    _weights: list[WeightSpan] = []
    _tells_versions: bool = True
    _last: Chunk | None = None

    def __repr__(self) -> str:
        return f"<TurnCollector {len(self._ids)} ids>"

    @property
    def finish(self) -> Finish | None:
        """The generation's end; None while it runs."""
        return None if self._last is None else self._last.finish

    def add(self, chunk: Chunk) -> Chunk:
        """Take the next chunk, and return it as it is taken: a logprob rounded to above 0 is 0.

        Raises UpstreamInvalid, naming the law, and keeps nothing of a bad chunk.
        """
        if self._last is not None and self._last.finish is not None:
            raise UpstreamInvalid("finish_is_last", "the engine went on after the chunk that ended the generation")
        if not (isinstance(chunk.ids, array) and are_in_vocab(chunk.ids, self.vocab_size)):
            self._check_ids(chunk.ids)
        chunk = _with_logprobs(chunk)
        most_cached = MOST_TOKENS if self.num_prompt is None else self.num_prompt
        if not 0 <= chunk.num_cached_tokens <= most_cached:
            raise _too_many_cached(chunk.num_cached_tokens, most_cached)
        if self.max_tokens is not None and len(self._ids) + len(chunk.ids) > self.max_tokens:
            raise UpstreamInvalid("max_tokens", f"the engine sampled more than max_tokens, {self.max_tokens}")
        start = len(self._ids)
        if chunk.support is not None:
            self._support = self._support or _SupportGatherer(self.vocab_size)
            self._support.take(chunk.support, chunk.ids)
        self._ids.extend(chunk.ids)
        self._logprobs.extend(chunk.logprobs)
        if chunk.ids:
            if chunk.tempered_logprobs is None:
                self._tempered_logprobs = None
            elif self._tempered_logprobs is not None:
                self._tempered_logprobs.extend(chunk.tempered_logprobs)
            if chunk.sampling_logprobs is None:
                self._sampling_logprobs = None
            elif self._sampling_logprobs is not None:
                self._sampling_logprobs.extend(chunk.sampling_logprobs)
            if chunk.forced is None:
                self._forced = None
            elif self._forced is not None:
                self._forced.extend(chunk.forced)
            self._add_weights(chunk, start)
        self._top_logprobs.extend(chunk.top_logprobs or ())
        self._last = chunk
        return chunk

    def result(self, mixed: MixedWeights | None = None) -> SampledTurn:
        """The whole turn. Raises UpstreamInvalid if the generation has no end, or no token where it needs one.

        `mixed`: other weights came meanwhile, by the server's own knowledge, beside the engine's word (`Chunk.mixed`);
        it is left out where the engine reports the weights of each token.
        """
        if self._last is None or self._last.finish is None:
            raise UpstreamInvalid("has_finish", "the engine's reply ended without a finish reason")
        if not self._ids and self._last.finish.reason is not FinishReason.ABORT:
            raise UpstreamInvalid("has_tokens", "the engine sampled no token, and did not report an abort")
        weights, mixed = self._last.weights, self._last.mixed or mixed
        if weights is None:
            weights = tuple(self._weights)
        else:
            _check_spans(weights, len(self._ids))
        if mixed is not None and (self._last.weights or (weights and self._tells_versions) or not self._ids):
            mixed = None
        if mixed is not None:
            weights = ()
        elif not weights and self.weight_version is not None and self._ids:
            weights = (WeightSpan(version=self.weight_version, start=0, end=len(self._ids)),)
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
            logprobs_kind=self.logprobs_kind,
            tempered_logprobs=self._tempered_logprobs,
            forced=None if self._forced is None else bytes(self._forced),
            support=None if self._support is None else self._support.whole(len(self._ids)),
            mixed=mixed,
            cached_from=self._last.cached_from or self.cached_from,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        for id_ in ids:
            if type(id_) is not int or not 0 <= id_ < self.vocab_size:
                raise UpstreamInvalid(
                    "id_in_vocab", f"{id_!r} is not a token id: the vocabulary has {self.vocab_size} ids"
                )

    def _add_weights(self, chunk: Chunk, start: int) -> None:
        version = chunk.weight_version
        if version is None or chunk.is_version_of_reply:
            self._tells_versions = False
        if version is None:
            return
        last = self._weights[-1] if self._weights else None
        if last is not None and last.version == version and last.end == start:
            start = self._weights.pop().start
        self._weights.append(WeightSpan(version=version, start=start, end=len(self._ids)))


class _SupportGatherer:
    """Gathers the supports of one generation, and holds each to its token."""

    def __init__(self, vocab_size: int) -> None:
        self._reader = SupportReader(vocab_size)
        self._columns = SupportColumns(vocab_size)

    def take(self, piece: SupportPiece, ids: Sequence[int]) -> None:
        """Take those of the next ids. Raises UpstreamInvalid."""
        try:
            self._reader.read(piece, ids)
        except ValueError as error:
            raise UpstreamInvalid("support_of_token", str(error)) from error
        self._columns.extend(piece, len(ids))

    def whole(self, num_ids: int) -> bytes:
        """The turn's supports. Raises UpstreamInvalid where tokens have none."""
        if self._columns.num_tokens != num_ids:
            raise UpstreamInvalid("support_of_token", f"{num_ids} ids, but supports of {self._columns.num_tokens}")
        return self._columns.whole()


def _too_many_cached(num_cached: int, most: int) -> UpstreamInvalid:
    told = num_cached if abs(num_cached) <= MOST_TOKENS else f"a number of {num_cached.bit_length()} bits"
    return UpstreamInvalid("cached_in_prompt", f"{told} cached tokens are reported for a prompt of {most}")


def _check_spans(weights: Sequence[WeightSpan], num_ids: int) -> None:
    end = 0
    for span in weights:
        if not end <= span.start < span.end <= num_ids:
            told = f"[{span.start}, {span.end}) after {end}"
            raise UpstreamInvalid("weight_spans", f"the spans do not ascend within {num_ids} ids: {told}")
        end = span.end


def _with_logprobs(chunk: Chunk) -> Chunk:
    """The chunk with a logprob for each id, all finite and at most 0."""
    for name, row in (
        ("logprobs", chunk.logprobs),
        ("tempered logprobs", chunk.tempered_logprobs),
        ("sampling logprobs", chunk.sampling_logprobs),
        ("rows of top logprobs", chunk.top_logprobs),
        ("marks of forced ids", chunk.forced),
    ):
        if row is not None and len(row) != len(chunk.ids):
            raise UpstreamInvalid("lengths", f"{len(chunk.ids)} ids but {len(row)} {name}")
    logprobs = _checked(chunk.logprobs)
    tempered = None if chunk.tempered_logprobs is None else _checked(chunk.tempered_logprobs)
    sampling = None if chunk.sampling_logprobs is None else _checked(chunk.sampling_logprobs)
    top = None if chunk.top_logprobs is None else _checked_rows(chunk.top_logprobs)
    is_same = logprobs is chunk.logprobs and tempered is chunk.tempered_logprobs
    if is_same and sampling is chunk.sampling_logprobs and top is chunk.top_logprobs:
        return chunk
    return replace(chunk, logprobs=logprobs, tempered_logprobs=tempered, sampling_logprobs=sampling, top_logprobs=top)


def _checked(logprobs: Sequence[float]) -> Sequence[float]:
    """The same logprobs; a copy, where one has to be taken as 0."""
    least = largest = -math.inf
    if isinstance(logprobs, array) and logprobs:
        found = np.frombuffer(logprobs)
        least, largest = found.item(found.argmin()), found.item(found.argmax())  # a NaN is both
    if not (math.isfinite(least) and math.isfinite(largest)):
        for logprob in logprobs:
            if type(logprob) is not float or not math.isfinite(logprob):
                raise UpstreamInvalid("logprob_is_finite", f"{logprob!r} is not a finite number")
        largest = max(logprobs, default=0.0)
    if largest <= 0.0:
        return logprobs
    if largest > MOST_ROUNDING_NATS:
        raise UpstreamInvalid("logprob_not_positive", f"logprob {largest!r} is above 0")
    return array("d", (min(logprob, 0.0) for logprob in logprobs))


def _checked_rows(rows: tuple[tuple[TopLogprob, ...], ...]) -> tuple[tuple[TopLogprob, ...], ...]:
    """The same for alternatives, row by row."""
    told = [top.logprob for row in rows for top in row]
    taken = _checked(told)
    if taken is told:
        return rows
    return tuple(tuple(TopLogprob(id=top.id, logprob=min(top.logprob, 0.0)) for top in row) for row in rows)
