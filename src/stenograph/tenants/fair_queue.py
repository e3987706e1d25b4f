"""Waiting requests of several tenants, served by deficit round robin. Pure.

Each tenant with waiting requests gets credit round after round, in proportion to its share, and its first request goes
once the credit covers its cost. Source: Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, 1995.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """The waiting requests of one tenant. `cost` is of each of them, in the unit of all."""

    share: float
    cost: float
    credit: float = 0.0
    has_had_round: bool = False
    waiting: deque[T] = field(default_factory=deque[T])

    def is_served(self, quantum: float) -> bool:
        """Whether its turn of the round brings it a request."""
        if not self.has_had_round:
            self.credit += quantum * self.share
        self.has_had_round = self.credit >= self.cost
        return self.has_had_round


class FairQueue(Generic[T]):
    """The lines of all waiting tenants."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        """Those with somebody in them, in the order of their turns: the first has it."""

    def __repr__(self) -> str:
        return f"<FairQueue {self.num_waiting} of {len(self._lines)} tenants>"

    @property
    def num_waiting(self) -> int:
        """Requests of all."""
        return sum(len(line.waiting) for line in self._lines.values())

    def num_of(self, name: str) -> int:
        """Waiting requests of one tenant."""
        line = self._lines.get(name)
        return 0 if line is None else len(line.waiting)

    def push(self, name: str, item: T, *, share: float, cost: float, is_behind: bool) -> None:
        """Let a request wait. `is_behind`: its tenant has less than its share now; it does not wait for credit."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(share=share, cost=cost, credit=cost if is_behind else 0.0)
        line.share, line.cost = share, cost
        line.waiting.append(item)

    def pop(self, may: Callable[[str], bool]) -> T | None:
        """The next request of the tenants allowed to have one; None if there is none."""
        ready = [line for name, line in self._lines.items() if may(name)]
        if not ready:
            return None
        quantum = min(line.cost / line.share for line in ready)
        while True:
            for name, line in list(self._lines.items()):
                if may(name) and line.is_served(quantum):
                    return self._taken(name, line)
                self._lines[name] = self._lines.pop(name)  # the next one has the turn
            # So many rounds bring nobody there: they are given at once.
            num = min(math.ceil((line.cost - line.credit) / (quantum * line.share)) for line in ready) - 1
            for line in ready:
                line.credit += max(0, num) * quantum * line.share

    def remove(self, name: str, item: T) -> None:
        """A request waits no more. Harmless where it does not wait."""
        line = self._lines.get(name)
        if line is not None and item in line.waiting:
            line.waiting.remove(item)
            if not line.waiting:
                del self._lines[name]

    def charge(self, name: str, cost: float) -> None:
        """A request has cost so much more than it was given for; less, if it is negative."""
        line = self._lines.get(name)
        if line is not None:
            line.credit -= cost

    def _taken(self, name: str, line: _Line[T]) -> T:
        line.credit -= line.cost
        item = line.waiting.popleft()
        if not line.waiting:
            del self._lines[name]  # who waits for nothing collects no credit
        return item
