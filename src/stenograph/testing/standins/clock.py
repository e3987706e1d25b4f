"""Time that stands still until a test moves it."""


class ManualClock:
    """A `Clock` for tests: both hands move together, by `advance`."""

    def __init__(self, *, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both hands forward."""
        self._monotonic += seconds
        self._wall += seconds
