"""The only reader of time. Everything else is given a `Clock`, so that a test can turn it by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one to measure with, one to date with."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back. One zero for all processes of a machine."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; for records that people read, never for durations."""
        ...


class SystemClock:
    """The machine's clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
