"""The progress of a batch, as a value, and as a line for a person."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

TERMINAL_S = 0.2
LOG_S = 30.0
"""Seconds between two lines where standard error is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """The state of a batch after a change. Every rollout that has ended is in one of the last four counts."""

    num_wanted_groups: int
    num_whole_groups: int
    num_running: int
    num_ok: int
    num_agent_failed: int
    num_infra_failed: int
    num_aborted: int
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


class PrintedProgress:
    """Writes a line to standard error: in place on a terminal, else one each half a minute, and one at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._due = time.monotonic() + (0.0 if self._is_terminal else LOG_S)

    def __call__(self, progress: BatchProgress) -> None:
        """Write the line if it is due."""
        now = time.monotonic()
        if now < self._due and not progress.is_over:
            return
        self._due = now + (TERMINAL_S if self._is_terminal else LOG_S)
        end = "\n" if progress.is_over or not self._is_terminal else ""
        self._stream.write(f"\r\x1b[K{progress}{end}" if self._is_terminal else f"{progress}{end}")
        self._stream.flush()


def silent(progress: BatchProgress) -> None:
    """Show nothing."""
