"""A teacher-forced pass as a request to an engine, and its result: log-probabilities of given tokens. Pure."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stenograph.core.errors import EngineUnavailable, UpstreamInvalid
from stenograph.core.types import RequestId, TopLogprob, token_ids

MAX_TOP = 20
"""Most alternatives of a position: vLLM's limit where it is started without `--max-logprobs`."""
_ROUNDED_NATS = 1e-4
"""A rounding above 0 taken as 0, as for sampled tokens."""

ENTRIES_AT_ONCE = 4096
"""Numbers read between two event-loop iterations: about three milliseconds of an engine's JSON."""
_ENTRIES_OF_A_PART = 2**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The likeliest ids at each of N places, row by row, each row as long as was asked for: `ids` int32 and `logprobs`
    float64 [N * K]. Empty where none were asked for. Two arrays, because objects for them would hold the loop."""

    ids: "array[int]" = field(default_factory=token_ids)
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, row: Sequence[tuple[int, float]], num_top: int) -> None:
        """Append the first `num_top` ids of a row with their log-probabilities. Raises UpstreamInvalid for too few."""
        if len(row) < num_top:
            raise UpstreamInvalid("has_logprobs", f"{num_top} alternatives were asked for, and {len(row)} reported")
        self.ids.extend([id_ for id_, _ in row[:num_top]])
        self.logprobs.extend([logprob for _, logprob in row[:num_top]])

    def rows(self, num_top: int) -> tuple[tuple[TopLogprob, ...], ...] | None:
        """The alternatives as a turn has them; None where none were asked for."""
        if not num_top:
            return None
        told = [TopLogprob(id=id_, logprob=logprob) for id_, logprob in zip(self.ids, self.logprobs, strict=True)]
        return tuple(tuple(told[start : start + num_top]) for start in range(0, len(told), num_top))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """`logprobs[i]` is ln p(ids[start + i]) in nats under the model alone, each after all ids before it. `top` has
    the likeliest ids of the same positions. `version` names the weights, None if the engine does not."""

    logprobs: "array[float]"
    top: Alternatives = field(default_factory=Alternatives)
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A pass over `ids` [T]: those from `start` on, at least the second, are scored. `num_top` likeliest ids are wanted
    at each position, at most MAX_TOP. `policy` is the engine's name of a model or LoRA; None: the one that samples."""

    request_id: RequestId
    ids: "array[int]"
    start: int
    num_top: int = 0
    policy: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.start < len(self.ids):
            raise ValueError(f"tokens from {self.start} on of {len(self.ids)} cannot be scored: the first has no score")
        if not 0 <= self.num_top <= MAX_TOP:
            raise ValueError(f"at most {MAX_TOP} alternatives of a position, not {self.num_top}")

    @property
    def num_scored(self) -> int:
        """Tokens to be scored."""
        return len(self.ids) - self.start

    def parts(self) -> "list[ScoreRequest]":
        """Passes over the same tokens, one after the other, each with a result small enough to be read at once."""
        num_tokens = _ENTRIES_OF_A_PART // (1 + self.num_top)
        starts = range(self.start, len(self.ids), num_tokens)
        return [replace(self, ids=self.ids[: start + num_tokens], start=start) for start in starts]

    def joined(self, results: Sequence[Scores]) -> Scores:
        """The result of the parts, by theirs. Raises EngineUnavailable if the weights changed between them."""
        if len({scores.version for scores in results}) > 1:
            raise EngineUnavailable("Other weights came while tokens were scored: ask again.", retry_after_s=1.0)
        logprobs, top = array("d"), Alternatives()
        for scores in results:
            logprobs.extend(scores.logprobs)
            top.ids.extend(scores.top.ids)
            top.logprobs.extend(scores.top.logprobs)
        return Scores(logprobs=logprobs, top=top, version=results[0].version)

    def answered_in_rows(
        self, logprobs: Sequence[float], rows: Iterable[Sequence[TopLogprob]] | None, *, version: str | None
    ) -> Scores:
        """The same as `answered`, of alternatives as a turn has them."""
        top = Alternatives()
        for row in rows or ():
            top.add([(one.id, one.logprob) for one in row], self.num_top)
        return self.answered(logprobs, top, version=version)

    def answered(
        self, logprobs: Sequence[float], top: Alternatives | None = None, *, version: str | None = None
    ) -> Scores:
        """The result, held to the request. Raises UpstreamInvalid, naming the broken law."""
        top = top or Alternatives()
        if len(logprobs) != self.num_scored or len(top.ids) != self.num_scored * self.num_top:
            told = f"{self.num_scored} tokens were to be scored, and {len(logprobs)} were"
            raise UpstreamInvalid("has_logprobs", told)
        for value in logprobs:
            if not (math.isfinite(value) and value <= _ROUNDED_NATS):
                raise UpstreamInvalid("logprob_finite", f"{value!r} is no log-probability")
        return Scores(
            logprobs=array("d", [min(0.0, value) for value in logprobs]),
            top=top,
            version=version,
        )
