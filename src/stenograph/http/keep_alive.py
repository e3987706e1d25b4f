"""Calls the sender of a long silent stream, to give its client a sign of life.

Clients give up on a silent stream: Claude Code after 300 s, Codex after its user's setting, and proxies on the way
after a minute or so.
"""

from collections.abc import Callable
from typing import Self

from stenograph.core.clock import Clock

BEGIN_S = 10.0
"""Longest time until a stream begins."""

SILENCE_S = 15.0
"""Longest time between two events of it."""


class Pulse:
    """The times of one stream. `is_due`: it has been silent too long; `call` was called when it became so.

    A stream has one timer, set anew when it runs out, not with each event: a stream with events in time pays only for
    noting when each was sent.
    """

    def __init__(self, clock: Clock, call: Callable[[], None]) -> None:
        self.is_due = False
        self._clock = clock
        self._call = call
        self._limit_s = BEGIN_S
        self._last = clock.monotonic()
        self._timer = clock.call_later(BEGIN_S, self._look)

    def __repr__(self) -> str:
        return f"<Pulse limit {self._limit_s} s, due={self.is_due}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def sent(self) -> None:
        """Something was sent just now."""
        self.is_due = False
        self._limit_s = SILENCE_S
        self._last = self._clock.monotonic()

    def _look(self) -> None:
        silent_s = self._clock.monotonic() - self._last
        if silent_s >= self._limit_s:
            self.is_due = True
            self._timer = self._clock.call_later(self._limit_s, self._look)
            self._call()
        else:
            self._timer = self._clock.call_later(self._limit_s - silent_s, self._look)
