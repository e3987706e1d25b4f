"""The server's limits where it has several processes: each counts on a page read by all of them.

Owns the page: memory made by a parent before it forks. A worker writes its own row alone, so nothing is locked. A
turn is announced there before the others' rows are read: of two workers taking the last place at once one may be
refused too many, never too few. Where sessions can leave memory, each worker may always use its share of the limits,
and gives back the rest: nobody is refused because another's idle sessions are in memory.
"""

import mmap

from stenograph.core.errors import Limit, LimitExceeded
from stenograph.session.admission import Capacity, Elsewhere, Limits

_SESSIONS, _IN_FLIGHT, _TOKENS, _RESTARTS, _OWNER = range(5)
_NUM_COLUMNS = 5


class CapacityPage:
    """Counts of each worker, shared by its forks: sessions, turns, tokens, how often it was started again; and, where
    servers share a database, its number as an owner, kept after its end."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._counts = memoryview(mmap.mmap(-1, num_workers * _NUM_COLUMNS * 8)).cast("q")

    def __repr__(self) -> str:
        return f"<CapacityPage of {self.num_workers} workers>"

    def put(self, worker: int, column: int, count: int) -> None:
        """Set a count of a worker."""
        self._counts[worker * _NUM_COLUMNS + column] = count

    def sum_without(self, worker: int, column: int) -> int:
        """The sum of a count of all workers but one."""
        column_counts = self._counts[column::_NUM_COLUMNS].tolist()
        return sum(column_counts) - column_counts[worker]

    def has_ended(self, worker: int) -> None:
        """Forget the uses of an ended worker."""
        for column in (_SESSIONS, _IN_FLIGHT, _TOKENS):
            self.put(worker, column, 0)
        self._counts[worker * _NUM_COLUMNS + _RESTARTS] += 1

    def num_restarts(self, worker: int) -> int:
        """Number of times a worker was started again."""
        return self._counts[worker * _NUM_COLUMNS + _RESTARTS]

    def owner(self, worker: int) -> int:
        """A worker's number as an owner, also after its end; 0 if it was none."""
        return self._counts[worker * _NUM_COLUMNS + _OWNER]

    def set_owner(self, worker: int, owner: int) -> None:
        """A worker is this owner now."""
        self.put(worker, _OWNER, owner)


class SharedCapacity(Capacity):
    """One worker's part of the used limits, and a view of the others' uses."""

    def __init__(self, limits: Limits, *, evicts: bool, page: CapacityPage, worker: int) -> None:
        self._page = page
        self._worker = worker
        self._num_sessions = self._num_in_flight = self._num_held_tokens = 0
        self.limits = limits
        self.evicts = evicts
        self.is_draining = False

    @property
    def num_sessions(self) -> int:
        """Sessions of this worker in memory."""
        return self._num_sessions

    @num_sessions.setter
    def num_sessions(self, count: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._num_sessions = count
        self._page.put(self._worker, _SESSIONS, count)

    @property
    def num_in_flight(self) -> int:
        """Turns of this worker."""
        return self._num_in_flight

    @num_in_flight.setter
    def num_in_flight(self, count: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Take or give back places. Raises LimitExceeded if another worker was quicker."""
        before, most = self._num_in_flight, self.limits.max_in_flight
        self._page.put(self._worker, _IN_FLIGHT, count)
        if count > before and count + self._page.sum_without(self._worker, _IN_FLIGHT) > most:
            self._page.put(self._worker, _IN_FLIGHT, before)
            raise LimitExceeded(
                Limit.IN_FLIGHT, f"the server runs {most} of at most {most} turns (--max-in-flight)", retry_after_s=1.0
            )
        self._num_in_flight = count

    @property
    def num_held_tokens(self) -> int:
        """Tokens of this worker's sessions in memory."""
        return self._num_held_tokens

    @num_held_tokens.setter
    def num_held_tokens(self, count: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._num_held_tokens = count
        self._page.put(self._worker, _TOKENS, count)

    @property
    def elsewhere(self) -> Elsewhere:  # type: ignore[override]  # it is only read
        """Uses of the other workers; where sessions can leave memory, without their uses of this one's share."""
        page, worker, limits = self._page, self._worker, self.limits
        num_sessions, num_tokens = page.sum_without(worker, _SESSIONS), page.sum_without(worker, _TOKENS)
        if self.evicts:
            num_sessions = min(num_sessions, limits.max_sessions - self._share(limits.max_sessions))
            num_tokens = min(num_tokens, limits.max_held_tokens - self._share(limits.max_held_tokens))
        return Elsewhere(
            num_sessions=num_sessions,
            num_in_flight=page.sum_without(worker, _IN_FLIGHT),
            num_held_tokens=num_tokens,
        )

    def _share(self, limit: int) -> int:
        return max(1, limit // self._page.num_workers)

    @property
    def num_sessions_lent(self) -> int:
        """Sessions of this worker beyond its share, as far as all together are beyond the limit."""
        most = self.limits.max_sessions
        num_over = self._num_sessions + self._page.sum_without(self._worker, _SESSIONS) - most
        return max(0, min(num_over, self._num_sessions - self._share(most)))

    @property
    def num_tokens_lent(self) -> int:
        """Tokens of this worker beyond its share, as far as all together are beyond the limit."""
        most = self.limits.max_held_tokens
        num_over = self._num_held_tokens + self._page.sum_without(self._worker, _TOKENS) - most
        return max(0, min(num_over, self._num_held_tokens - self._share(most)))
