"""Time that stands still until a test moves it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class ManualTimer:
    """A call that `ManualClock.advance` makes."""

    at: float
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Make it no more."""
        self.is_cancelled = True


class ManualClock:
    """A `Clock` for tests: both hands move together, by `advance`."""

    def __init__(self, *, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._timers: list[ManualTimer] = []

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def call_later(self, delay_s: float, call: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(at=self._monotonic + delay_s, call=call)
        self._timers.append(timer)
        return timer

    @property
    def num_timers(self) -> int:
        """Calls that are to be made."""
        return sum(not timer.is_cancelled for timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Move both hands forward, and make the calls that are due, in their order."""
        self._monotonic += seconds
        self._wall += seconds
        due = sorted((timer for timer in self._timers if timer.at <= self._monotonic), key=lambda timer: timer.at)
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            if not timer.is_cancelled:
                timer.call()
