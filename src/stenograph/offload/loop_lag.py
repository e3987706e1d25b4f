"""Measures how late the event loop is and, if configured, reports the callback that held it.

A heartbeat is due every `PERIOD_S`; its lateness is how long any callback had to wait. A watchdog thread logs the stack
of the loop's thread when the heartbeat is overdue: it names the blocking callback.
"""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from stenograph.core.clock import SystemClock

_CLOCK = SystemClock()

log = logging.getLogger(__name__)

PERIOD_S = 0.01
"""Between two heartbeats; a stall of this length is seen with certainty."""

HELD_S = 0.05
"""The watchdog reports a loop held for longer."""

SHOWN_FRAMES = 12


class LoopLag:
    """The heartbeat of one loop. Start it on the loop, close it there."""

    def __init__(self, observe: Callable[[float], None], *, name_culprits: bool) -> None:
        self._observe = observe
        self._watchdog = Watchdog() if name_culprits else None
        self._beat: asyncio.TimerHandle | None = None
        self._due = 0.0

    def __repr__(self) -> str:
        return f"<LoopLag {'running' if self._beat else 'stopped'}>"

    def start(self) -> None:
        """Start measuring."""
        if self._watchdog is not None:
            self._watchdog.start(threading.get_ident())
        self._schedule()

    def close(self) -> None:
        """Stop measuring."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if self._watchdog is not None:
            self._watchdog.close()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + PERIOD_S
        self._beat = loop.call_later(PERIOD_S, self._come)

    def _come(self) -> None:
        self._observe(max(0.0, asyncio.get_running_loop().time() - self._due))
        if self._watchdog is not None:
            self._watchdog.is_alive()
        self._schedule()


class Watchdog:
    """A thread to log the loop's stack, once for each time the loop is held."""

    def __init__(self, *, held_s: float = HELD_S, report: Callable[[str], None] | None = None) -> None:
        self._held_s = held_s
        self._report = report or log.warning
        self._last_beat = _CLOCK.monotonic()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, loop_thread: int) -> None:
        """Watch the loop of this thread."""
        self.is_alive()
        self._thread = threading.Thread(
            target=self._watch, args=(loop_thread,), name="stenograph-loop-watchdog", daemon=True
        )
        self._thread.start()

    def is_alive(self) -> None:
        """Record that the loop is alive; call it from the loop."""
        self._last_beat = _CLOCK.monotonic()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, loop_thread: int) -> None:
        reported = 0.0
        while not self._closed.wait(self._held_s / 2):
            beat = self._last_beat
            held_s = _CLOCK.monotonic() - beat
            if held_s < self._held_s + PERIOD_S or beat == reported:
                continue
            reported = beat
            frame = sys._current_frames().get(loop_thread)  # pyright: ignore[reportPrivateUsage]  # there is no other
            if frame is not None:
                where = "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:])
                self._report(f"the event loop has been held for {held_s * 1e3:.0f} ms by:\n{where}")
