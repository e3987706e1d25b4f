"""The rate at which requests end, and from it a refused request's `Retry-After`. Pure."""

SMOOTHING = 0.8
"""The weight of the old mean when a new interval arrives."""
SHORTEST_S = 1.0
LONGEST_S = 60.0


class Pace:
    """A moving mean of the seconds between two ends."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._mean_s: float | None = None

    def __repr__(self) -> str:
        return f"<Pace one each {self.retry_after_s:.3g} s>"

    def ended(self, now: float) -> None:
        """A request ended at `now`, monotonic seconds."""
        if self._last is not None:
            interval_s = now - self._last
            self._mean_s = (
                interval_s if self._mean_s is None else SMOOTHING * self._mean_s + (1 - SMOOTHING) * interval_s
            )
        self._last = now

    @property
    def retry_after_s(self) -> float:
        """Seconds until a waiting request will probably have begun and freed a place. In [1, 60]."""
        return min(LONGEST_S, max(SHORTEST_S, self._mean_s or SHORTEST_S))
