"""An event loop whose time passes at once: with nothing left to do it goes to the next timer. For simulations.

It has no sockets and no threads: whatever a task waits for must be another task, or a timer.
"""

import asyncio
from typing import Any, NoReturn


class _NoFiles:
    """A selector of nothing: waiting is moving the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise AssertionError("every task waits, and no timer is set: nothing can happen any more")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> dict[int, Any]:
        return {}


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `time` is in virtual seconds, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoFiles()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._selector.now

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> NoReturn:
        raise AssertionError("nothing comes from another thread")
