"""A test's deadline that a busy machine does not move: how long its processes have stood still.

A lost wake-up leaves every process of a test asleep, and a machine that others use leaves them ready to run. So the
seconds of `timeout` count only while the test's processes, and theirs, take less than `LEAST_SHARE` of a core. A test
that is busy to no end is stopped after `MOST_TIMES` that long.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

LEAST_SHARE = 0.01
"""Of one core. Beside a hundred others on each core a process that is ready to run still gets as much."""

MOST_TIMES = 10
LOOKS = 24
"""Looks within one deadline."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class QuietWatch:
    """What the processes of a test have done, look by look. `is_over` takes the seconds of two clocks."""

    def __init__(self, timeout_s: float, *, now_s: float, cpu_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s = self._quiet_since_s = now_s
        self._cpu_s = cpu_s

    def is_over(self, *, now_s: float, cpu_s: float) -> bool:
        """Whether a test has stood still, or has run, for too long."""
        quiet_s = now_s - self._quiet_since_s
        if cpu_s - self._cpu_s >= LEAST_SHARE * max(quiet_s, self._timeout_s / LOOKS):
            self._quiet_since_s, self._cpu_s, quiet_s = now_s, cpu_s, 0.0
        return quiet_s >= self._timeout_s or now_s - self._began_s >= MOST_TIMES * self._timeout_s


def watch_quiet(timeout_s: float, on_over: Callable[[], None]) -> Callable[[], None] | None:
    """Call `on_over` in the main thread once the test that runs there is over its deadline; the function that ends the
    watch. None where that cannot be seen: without `/proc`, or in another thread."""
    if not Path("/proc/self/stat").exists() or threading.current_thread() is not threading.main_thread():
        return None
    # To look costs milliseconds, which most tests take less than. Until its first look a test passes for busy.
    watch = QuietWatch(timeout_s, now_s=time.monotonic(), cpu_s=0.0)

    def look(*_: object) -> None:
        if watch.is_over(now_s=time.monotonic(), cpu_s=cpu_of_tree()):
            end()
            on_over()
        else:
            signal.setitimer(signal.ITIMER_REAL, timeout_s / LOOKS)  # only now: no look interrupts another

    def end() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, timeout_s / LOOKS)
    return end


def cpu_of_tree() -> float:
    """Seconds of CPU that this process and all that it started have taken, those included that have ended.

    Source: proc_pid_stat(5).
    """
    parents: dict[int, int] = {}
    taken: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)], taken[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(taken.get(pid, 0) for pid in own) / _TICKS_PER_S
