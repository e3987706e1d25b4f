"""The time in which a whole batch decodes: what `stenograph bench engine` counts decode by. Pure; instants are given.

Requests of a batch start one after the other, since their prompts come first, and end so. Counted is from the first
token of the last one to start, to its last token before any request has all of its own: both edges are events of that
one request, so that each step between them is in it whole, with a token of every request. No prompt is in it, and
nothing has to be subtracted.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """CPU time that a process has had so far, and the monotonic clock."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time between two instants."""

    num_tokens: int
    cpu_s: float
    wall_s: float


class WholeBatch:
    """Watches a batch of `num_requests`, each of which draws `num_tokens`."""

    def __init__(self, *, num_requests: int, num_tokens: int, now: Callable[[], Instant]) -> None:
        self._num_tokens = num_tokens
        self._now = now
        self._drawn = [0] * num_requests
        self._last_to_start: int | None = None
        self._begin: tuple[Instant, int] | None = None
        self._end: tuple[Instant, int] | None = None
        self._is_over = False

    @property
    def num_drawn(self) -> int:
        """Tokens of all requests so far."""
        return sum(self._drawn)

    def drew(self, request: int, num_new: int) -> None:
        """Request number `request` has so many more tokens, now."""
        self._drawn[request] += num_new
        if self._is_over:
            return
        if self._last_to_start is None and all(self._drawn):
            self._last_to_start = request
            self._begin = self._now(), self.num_drawn
        elif request == self._last_to_start:
            self._end = self._now(), self.num_drawn
        self._is_over = self._drawn[request] >= self._num_tokens

    def window(self) -> Window | None:
        """The counts; None where the batch was not whole for a step, or for none that a clock saw."""
        if self._begin is None or self._end is None:
            return None
        (begin, num_before), (end, num_after) = self._begin, self._end
        if end.cpu_s <= begin.cpu_s or end.wall_s <= begin.wall_s:
            return None
        return Window(
            num_tokens=num_after - num_before, cpu_s=end.cpu_s - begin.cpu_s, wall_s=end.wall_s - begin.wall_s
        )
