"""The progress of a batch, as a value, and as a line for a person."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from stenograph.client.batch import RolloutError

TERMINAL_S = 0.2
LOG_S = 30.0
"""Seconds between two lines where standard error is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """The state of a batch after a change. Every ended rollout is in one of the four counts of ends.

    `first_error` is the first failure of a rollout, `num_distinct_errors` how many there are by class and line.
    """

    num_wanted_groups: int
    num_whole_groups: int
    num_running: int
    num_ok: int
    num_agent_failed: int
    num_infra_failed: int
    num_aborted: int
    num_distinct_errors: int = 0
    first_error: RolloutError | None = None
    is_over: bool = False

    def __str__(self) -> str:
        failed = f", {self.num_agent_failed} failed" if self.num_agent_failed else ""
        broken = f", {self.num_infra_failed} lost by infrastructure" if self.num_infra_failed else ""
        aborted = f", {self.num_aborted} aborted" if self.num_aborted else ""
        return (
            f"rollouts: {self.num_whole_groups} of {self.num_wanted_groups} groups, {self.num_ok} ok{failed}{broken}"
            f"{aborted}, {self.num_running} running"
        )


ProgressSink = Callable[[BatchProgress], None]
"""Called on the event loop at each change; it should return at once."""


MOST_LINES = 40
"""Lines of a traceback to print, the last ones."""


class PrintedProgress:
    """Writes a line to standard error: in place on a terminal, else one each half a minute, and one at the end.

    The first failure is written when it happens, with its traceback; at the end, how many others there were.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._due = time.monotonic() + (0.0 if self._is_terminal else LOG_S)
        self._has_shown_error = False

    def __call__(self, progress: BatchProgress) -> None:
        """Write the line if it is due, and the first error."""
        now = time.monotonic()
        if progress.first_error is not None and not self._has_shown_error:
            self._has_shown_error = True
            lines = progress.first_error.traceback.splitlines()
            cut = ["  …"] if len(lines) > MOST_LINES else []
            shown = "\n".join(["the first rollout that failed:", *cut, *lines[-MOST_LINES:]])
            self._stream.write(f"\r\x1b[K{shown}\n" if self._is_terminal else f"{shown}\n")
        if now < self._due and not progress.is_over:
            return
        self._due = now + (TERMINAL_S if self._is_terminal else LOG_S)
        end = "\n" if progress.is_over or not self._is_terminal else ""
        self._stream.write(f"\r\x1b[K{progress}{end}" if self._is_terminal else f"{progress}{end}")
        if progress.is_over and progress.num_distinct_errors > 1:
            self._stream.write(f"{progress.num_distinct_errors} distinct errors: batch.errors() has them all\n")
        self._stream.flush()


def silent(progress: BatchProgress) -> None:
    """Show nothing."""
