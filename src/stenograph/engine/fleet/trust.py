"""Trust in an engine by its outcomes: trusted, in doubt, or on trial. Pure: the caller gives the time.

An unreachable engine is in doubt at once, and gets nothing for a while. Then one request is let through; if it is
answered the engine is trusted again, and if not the while is twice as long. A trial without a failure for `trial_s`
counts as passed: a reply may take minutes, but an absent engine is known sooner.
"""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Trust:
    """One engine's standing."""

    def __init__(self, *, trial_s: float) -> None:
        self._trial_s = trial_s
        self._pause_s = FIRST_PAUSE_S
        self._retry_at: float | None = None
        self._on_trial_since: float | None = None
        self.why = ""

    def __repr__(self) -> str:
        return f"<Trust {'in doubt: ' + self.why if self.in_doubt else 'whole'}>"

    @property
    def in_doubt(self) -> bool:
        """Whether it failed last, and nothing has come of it since."""
        return self._retry_at is not None

    def admits(self, now: float) -> bool:
        """Whether a request may go there: always, or as the one trial."""
        if self._on_trial_since is not None and now - self._on_trial_since >= self._trial_s:
            self.worked()
        return self._retry_at is None or (now >= self._retry_at and self._on_trial_since is None)

    def began(self, now: float) -> bool:
        """Note a request to the engine; returns whether it is a trial."""
        if self._retry_at is None or self._on_trial_since is not None:
            return False
        self._on_trial_since = now
        return True

    def worked(self) -> None:
        """Note an answer, even an error."""
        self._pause_s, self._retry_at, self._on_trial_since, self.why = FIRST_PAUSE_S, None, None, ""

    def failed(self, now: float, why: str, *, was_trial: bool) -> None:
        """Note a failure to reach it. Many requests may find out at once; only a trial lengthens the pause."""
        self.why = why
        if was_trial:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._on_trial_since = None
        elif self._retry_at is not None:
            return
        self._retry_at = now + self._pause_s

    def left(self, *, was_trial: bool) -> None:
        """A request ended before anything came of it; after a trial, the next one is let through."""
        if was_trial:
            self._on_trial_since = None

    def retry_in_s(self, now: float) -> float:
        """Seconds until a trial; 0 where there is no doubt."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)
