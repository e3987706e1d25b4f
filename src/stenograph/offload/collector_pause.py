"""Holds the garbage collector off while large values are made, worked on and dropped. Knows nothing of the work."""

import gc
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

UNCOLLECTED_FROM_BYTES = 512 * 1024
"""While there is work on this much input or more, no garbage is collected: its values are large, and go with it."""

MOST_JOINED = 32
"""Overlapping uses of one pause: after so many the garbage collector runs, however many more there are."""


class CollectorPause:
    """Holds the garbage collector off while some thread works on large values, which are gone when the work ends.

    It would look through all of them again and again while they are made: a decoder takes four times as long for a list
    of 650,000 lists, and a whole collection takes the GIL for as long again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = self._num_joined = 0

    def __repr__(self) -> str:
        return f"<CollectorPause {self._num_inside} inside>"

    def over(self, work: Callable[[], T], num_bytes: int) -> Callable[[], T]:
        """Work on so much input; it pauses the collector if the input is large."""
        if num_bytes < UNCOLLECTED_FROM_BYTES:
            return work

        def paused() -> T:
            with self.held():
                return work()

        return paused

    @contextmanager
    def held(self) -> Generator[None]:
        """Pause it, or join a pause, unless the pause had its share."""
        has_joined = self._join()
        try:
            yield
        finally:
            if has_joined:
                self._leave()

    def _join(self) -> bool:
        with self._lock:
            if self._num_joined == MOST_JOINED or not (self._num_inside or gc.isenabled()):
                return False
            gc.disable()
            self._num_inside += 1
            self._num_joined += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._num_joined = 0
                gc.enable()
