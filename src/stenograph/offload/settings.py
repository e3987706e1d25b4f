"""The settings of work off the event loop: threads, large bodies, and the watchdog."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

import os
from dataclasses import dataclass

from stenograph.core.settings import Section, Switch, choice, computed, setting, whole_number


def _default_cpu_workers() -> int:
    return min(16, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Settings to keep work off the event loop."""

    cpu_workers: int = computed(
        _default_cpu_workers,
        whole_number(1, 1024),
        "Threads for CPU work off the event loop.",
        unit="threads",
        shown="min(16, CPUs)",
        section=Section.CPU_WORK,
    )
    body_slots: int = setting(
        2,
        whole_number(1, 1024),
        "Large bodies of clients, and as many of engines, read at a time; the others wait in their sockets.",
        unit="bodies",
    )
    loop_watchdog: Switch = setting(
        Switch.OFF, choice(Switch), "Log what holds the event loop whenever it is held for 50 ms."
    )
