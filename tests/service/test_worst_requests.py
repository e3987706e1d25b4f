"""No request within the default limits makes the event loop run much Python at a time.

Counted are the lines that one callback of the loop runs, each round of a Python loop anew: as many on a fast machine as
on a slow or a busy one. What a call into C takes is not seen here; `test_held_loop.py` measures it.
"""

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest
import uvloop

from .worst_requests import TABLE, Worst, large_renderer, send_all

MAX_LINES = 100_000
"""Some 10 ms on the machine that docs/performance.md measures on. An ordinary chat runs 1,340, a first one 2,130."""

RUN = asyncio.Runner.run.__code__
"""The code below which a loop calls back."""


class LineCount:
    """The most lines that one callback of the loop ran, and where it was then. Made on the loop's thread."""

    def __init__(self) -> None:
        self.most, self.where = 0, ""
        self._num = 0
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and frame.f_back is not None and frame.f_back.f_code is RUN:
            self._num = 0
        self._num += 1
        if self._num > self.most:
            self.most, self.where = self._num, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._trace

    def close(self) -> "LineCount":
        sys.settrace(None)
        return self


@pytest.mark.parametrize("worst", TABLE, ids=lambda worst: worst.name.replace(" ", "_"))
def test_no_request_makes_the_loop_run_much_python_at_a_time(worst: Worst) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        count = runner.run(send_all(worst, large_renderer(worst.pattern), LineCount))
    assert 0 < count.most < MAX_LINES, count.where


def test_a_python_loop_on_the_event_loop_is_counted() -> None:
    async def most() -> int:
        count = LineCount()
        await asyncio.sleep(0)  # to the first callback
        values = [value * value for value in range(MAX_LINES)]
        assert len(values) == MAX_LINES
        return count.close().most

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(most()) > MAX_LINES
