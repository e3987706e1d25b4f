"""Child processes of a benchmark: started, spoken to by lines of JSON, measured, and ended, each by its handle.

Children run in a session of their own, so that Ctrl-C reaches the benchmark alone, and it ends them. A signal is held
back while one is started or ended: none is ever without an owner.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import msgspec

ROOT = Path(__file__).parents[2]
"""The checkout, by which children find `benchmarks` whatever folder they run in."""
END_GRACE_S = 10.0
"""Time that a child has to end when it is asked to."""


class CannotMeasure(Exception):
    """A run cannot go on; `str()` says why, in a line."""


class ChildFailed(CannotMeasure):
    """A child ended, or said what was not expected; `str()` has the end of its stderr."""


class Interrupts:
    """SIGINT and SIGTERM alike: a KeyboardInterrupt, and remembered, since one that hits a destructor is lost there."""

    def __init__(self) -> None:
        self.came = False

    def take(self) -> None:
        """From now on both signals end the benchmark as Ctrl-C does: the processes that it started go first."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    @contextlib.contextmanager
    def held_back(self) -> Generator[None]:
        """Let neither in while inside; raises KeyboardInterrupt at the end if one came, now or unseen before."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.came:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()
"""The process's own: signals are the process's."""


def cpu_s_of(pid: int) -> float:
    """CPU time, user and system, of all threads of a process so far, in steps of a nanosecond (/proc has 10 ms).

    Raises OSError where it is gone. Source of the clock's number: `MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED)`, Linux
    include/linux/posix-timers.h.
    """
    return time.clock_gettime((~pid << 3) | 2)


def rss_kib_of(pid: int) -> int:
    """Memory of a process that is in RAM now, in KiB. Raises OSError where it is gone."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True, repr=False)
class Child:
    """A process of ours, started by `Children`; its stderr goes to a file without a name."""

    name: str
    _process: "subprocess.Popen[bytes]"
    _errors: IO[bytes]

    def __repr__(self) -> str:
        return f"<Child {self.name} {self._process.pid}>"

    def line(self) -> str:
        """The next line that it says. Raises ChildFailed where it ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line:
            raise ChildFailed(f"{self.name} ended with status {self._process.wait()}: {self.stderr_tail()}")
        return line

    def event(self) -> dict[str, Any]:
        """The next line, as a JSON object."""
        decoded: dict[str, Any] = msgspec.json.decode(self.line(), type=dict[str, Any])
        return decoded

    def tell(self, line: str) -> None:
        """Write it a line. Raises ChildFailed where it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildFailed(f"{self.name} is gone: {self.stderr_tail()}") from error

    def step(self, line: str, note: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Ask for a step; `note` takes what it says of its progress. Returns the step's report. Raises ChildFailed."""
        self.tell(line)
        while "progress" in (event := self.event()):
            if note is not None:
                note(event)
        return event

    def written(self) -> bytes:
        """All that it wrote to stderr so far."""
        # Not by `read`: the child writes where the file's one offset is.
        return os.pread(self._errors.fileno(), os.fstat(self._errors.fileno()).st_size, 0)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stderr_tail(self) -> str:
        """The last of what it wrote to stderr."""
        return self.written()[-2000:].decode(errors="replace").strip() or "it wrote nothing"

    def cpu_s(self) -> float:
        """CPU time, user and system, of all its threads so far."""
        return cpu_s_of(self._process.pid)

    def rss_kib(self) -> int:
        """Memory that is in RAM now, in KiB."""
        return rss_kib_of(self._process.pid)

    def num_open_files(self) -> int:
        """File descriptors that it has open now."""
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def end(self) -> int:
        """Close its stdin and ask it to end; kill it where it does not. Returns its exit status."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            self._errors.close()
            if process.stdout is not None:
                process.stdout.close()


class Children:
    """The processes of one measurement. However a `with` of it is left, they have ended by then."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with INTERRUPTS.held_back():
            for child in reversed(self._children):
                child.end()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable, "-P"),
    ) -> Child:
        """Start a Python module by its name and arguments, with an interpreter that may be another than ours.

        With -P: the folder that the benchmark runs in may have modules of these names.
        """
        variables = dict(os.environ if environment is None else environment)
        variables["PYTHONPATH"] = os.pathsep.join([*filter(None, [variables.get("PYTHONPATH")]), str(ROOT)])
        with INTERRUPTS.held_back():
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child ends
            process = subprocess.Popen(
                [*python, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=variables,
            )
            self._children.append(child := Child(name, process, errors))
        return child

    def start_planned(
        self, name: str, module: str, plan: object, *, environment: Mapping[str, str] | None = None
    ) -> tuple[Child, dict[str, Any]]:
        """Start a module whose one argument is its plan as JSON; returns it, and what it says when it is ready."""
        child = self.start(name, [module, msgspec.json.encode(plan).decode()], environment=environment)
        return child, child.event()
