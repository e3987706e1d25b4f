"""A sampling profiler: a program's main thread's Python stack, looked at after each few milliseconds of CPU time.

    python -m benchmarks.kit.sampler OUT.txt stenograph.cli.main serve …

Costs a few percent, and distorts little: cProfile, which sees every call, doubles the cost of small functions. The
kernel samples no oftener than it ticks (often 4 ms), so that a profile needs some seconds of load. Time in C code
counts for the Python function that called it; that of the event loop between callbacks, for the next one. `OUT.txt` is
in collapsed stacks, `a;b;c microseconds`, as flame graphs take them. SIGUSR2 starts sampling, and ends it.
"""

import argparse
import runpy
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

PERIOD_S = 0.001
MOST_FRAMES = 60


class StackSampler:
    """Counts CPU time by stack from `start` to `stop`. One a process: it owns SIGPROF and its timer."""

    def __init__(self) -> None:
        self.by_stack_s: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._seen_s = 0.0
        self._begun_s = (0.0, 0.0)
        self._runs = False

    def toggle(self, number: int, frame: FrameType | None) -> None:
        """Start, or stop; a signal's handler."""
        (self.stop if self._runs else self.start)()

    def start(self) -> None:
        """Begin. In the main thread."""
        self._runs = True
        self._begun_s = (time.process_time(), time.thread_time())
        self._seen_s = time.thread_time()
        signal.signal(signal.SIGPROF, self._look)
        signal.siginterrupt(signal.SIGPROF, False)  # system calls go on
        signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)

    def stop(self) -> None:
        """End, and count what the other threads took as a stack of its own."""
        if not self._runs:
            return
        self._runs = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        process_s, thread_s = time.process_time() - self._begun_s[0], time.thread_time() - self._begun_s[1]
        self.by_stack_s["(other threads)",] += max(0.0, process_s - thread_s)

    def _look(self, number: int, frame: FrameType | None) -> None:
        # The timer counts all threads' time; the sample weighs what this one took since the last.
        now_s = time.thread_time()
        spent_s, self._seen_s = now_s - self._seen_s, now_s
        if spent_s > 0 and frame is not None:
            self.by_stack_s[stack_of(frame)] += spent_s


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Functions from the outermost to the innermost, as `module.function`."""
    names: list[str] = []
    while frame is not None and len(names) < MOST_FRAMES:
        names.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(names))


def collapsed(by_stack_s: Mapping[tuple[str, ...], float]) -> str:
    """Stacks and their microseconds, a line each."""
    return "".join(f"{';'.join(stack)} {round(spent * 1e6)}\n" for stack, spent in sorted(by_stack_s.items()))


def read_collapsed(text: str) -> dict[tuple[str, ...], float]:
    """The stacks that `collapsed` wrote, in seconds."""
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for line in text.splitlines():
        stack, _, spent = line.rpartition(" ")
        found[tuple(stack.split(";"))] += int(spent) / 1e6
    return found


def main() -> None:
    """Run a module with its arguments under the sampler; write what was seen, however it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kit.sampler", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.argv = [options.module, *options.arguments]
    sampler = StackSampler()
    signal.signal(signal.SIGUSR2, sampler.toggle)
    try:
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
    finally:
        sampler.stop()
        options.out.write_text(collapsed(sampler.by_stack_s))


if __name__ == "__main__":
    main()
