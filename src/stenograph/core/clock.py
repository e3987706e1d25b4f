"""The only reader of time. Everything else is given a `Clock`, so a test can turn it by hand."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call to be made later."""

    def cancel(self) -> None:
        """Make it no more. Harmless when it was made, or when repeated."""
        ...


class Clock(Protocol):
    """Two clocks, one to measure with, one to date with, and an alarm."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back. One zero for all processes of a machine."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; for records read by people, never for durations."""
        ...

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call on this task's event loop, once so many seconds have passed."""
        ...


class SystemClock:
    """The machine's clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    @staticmethod
    def call_later(delay_s: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, call)
