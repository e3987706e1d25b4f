"""A teacher-forced pass as a request to an engine, and its result: log-probabilities of given tokens. Pure."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.types import RequestId, TopLogprob

MAX_TOP = 20
"""Most alternatives of a position: vLLM's limit where it is started without `--max-logprobs`."""
_ROUNDED_NATS = 1e-4
"""A rounding above 0 taken as 0, as for sampled tokens."""

Tops = tuple[tuple[TopLogprob, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """`logprobs[i]` is ln p(ids[start + i]) in nats under the model alone, each after all ids before it. `top` [N] has
    the likeliest ids of the same positions; None if none were asked for. `version` names the weights, None if the
    engine does not."""

    logprobs: "array[float]"
    top: Tops | None = None
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

    def answered(self, logprobs: Sequence[float], top: Tops | None = None, *, version: str | None = None) -> Scores:
        """The result, held to the request. Raises UpstreamInvalid, naming the broken law."""
        if len(logprobs) != self.num_scored or (top is not None and len(top) != self.num_scored):
            told = f"{self.num_scored} tokens were to be scored, and {len(logprobs)} were"
            raise UpstreamInvalid("has_logprobs", told)
        for value in logprobs:
            if not (math.isfinite(value) and value <= _ROUNDED_NATS):
                raise UpstreamInvalid("logprob_finite", f"{value!r} is no log-probability")
        return Scores(
            logprobs=array("d", [min(0.0, value) for value in logprobs]),
            top=top if self.num_top else None,
            version=version,
        )
