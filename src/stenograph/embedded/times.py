"""The times of one request at each point on its way: stamped by its owner, read as one frozen view.

Owns the durations between points: TTFT = tokenize + queue + prefill. Reads no clock; all times are seconds of the
machine's monotonic clock. A request is stamped by one thread at a time: it is handed on with its times.
"""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise

TIME_TYPECODE = "d"


def no_tokens() -> "array[float]":
    """The times of no tokens yet."""
    return array(TIME_TYPECODE)


@dataclass(slots=True, kw_only=True)
class Times:
    """A request's stamps so far; 0.0 at each point still ahead.

    `tokens` [T] has the time of each sampled token, the first included. A preempted request keeps the time of its first
    admission.
    """

    submitted: float
    tokenized: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    tokens: "array[float]" = field(default_factory=no_tokens)
    finished: float = 0.0

    def view(self) -> "RequestTimes":
        """The stamps so far, frozen."""
        return RequestTimes(
            submitted=self.submitted,
            tokenized=self.tokenized or None,
            admitted=self.admitted or None,
            first_token=self.first_token or None,
            tokens=tuple(self.tokens),
            finished=self.finished or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """A request's stamps; None at each point never passed. Durations are None where an end of theirs is."""

    submitted: float
    tokenized: float | None
    admitted: float | None
    first_token: float | None
    tokens: tuple[float, ...]
    finished: float | None

    @property
    def tokenize_s(self) -> float | None:
        """From submission until its ids were known, waiting for a worker included."""
        return _between(self.submitted, self.tokenized)

    @property
    def queue_s(self) -> float | None:
        """From then until the scheduler admitted it; its grammar compiles in this time."""
        return _between(self.tokenized, self.admitted)

    @property
    def prefill_s(self) -> float | None:
        """From then until its first token was sampled."""
        return _between(self.admitted, self.first_token)

    @property
    def ttft_s(self) -> float | None:
        """From submission until its first token: tokenize + queue + prefill."""
        return _between(self.submitted, self.first_token)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of fewer than two."""
        if len(self.tokens) < 2:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def itls_s(self) -> tuple[float, ...]:
        """The gaps between tokens."""
        return tuple(after - before for before, after in pairwise(self.tokens))

    @property
    def latency_s(self) -> float | None:
        """From submission until its end."""
        return _between(self.submitted, self.finished)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
