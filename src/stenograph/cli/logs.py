"""Writes the log to stderr, as text or as one JSON object a line, on a thread of its own.

Logging only puts a line into a queue, because an unread pipe must not block the event loop. A full queue drops lines,
and reports later how many. Knows nothing of the lines' content.
"""

import contextlib
import copy
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any

from stenograph.cli.settings_table import CommandSettings, LogFormat, LogSettings, kubernetes_variables, load_settings
from stenograph.core.errors import StartupError
from stenograph.core.log_line import LogLine
from stenograph.model.progress import Progress, StreamProgress

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""The most lines waiting to be written."""
WRITTEN_AT_ONCE = 256
"""The most lines in one write."""
REST_S = 0.02
"""Seconds for lines to gather after a write: to wake the thread for each costs more than the line itself."""
CLOSE_GRACE_S = 1.0
"""Seconds for the end of the process to wait for the last lines to be written."""


class TextFormatter(logging.Formatter):
    """A line as text: time, level, logger and message, then the traceback where there is one."""

    def __init__(self, worker: int | None = None) -> None:
        """`worker` is the number of this process, where the server has several."""
        super().__init__()
        self._by = "" if worker is None else f"[worker {worker}] "
        self._second: int | None = None
        self._second_text = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:  # most lines are of the same second as the one before
            self._second, self._second_text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        head = f"{self._second_text},{record.msecs:03.0f} {record.levelname} {self._by}{record.name}"
        text = f"{head}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """A line as a JSON object: `time`, `level`, `logger`, `event`; then a `LogLine`'s facts, or `message`; `traceback`
    where there is one, and `worker`. docs/operations.md lists the keys."""

    def __init__(self, worker: int | None = None) -> None:
        """`worker` is the number of this process, where the server has several."""
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line = record.msg if isinstance(record.msg, LogLine) else None
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "message" if line is None else line.event,
        }
        if self._worker is not None:
            fields["worker"] = self._worker
        fields |= {"message": record.getMessage()} if line is None else line.fields()
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)  # ASCII: no text of a client's has to be UTF-8


class LogWriter(logging.Handler):
    """Takes lines on any thread, and writes them on its own to the file descriptor `fd`, until it is closed."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._waiting: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= MAX_WAITING:
            self._num_dropped += 1
            return
        if record.args:  # what it is made of may change until it is written
            record = copy.copy(record)
            record.msg, record.args = record.getMessage(), None
        self._waiting.put(record)

    def close(self) -> None:
        """Write the waiting lines, for at most `CLOSE_GRACE_S`."""
        if self._thread.is_alive():
            self._is_closed.set()
            self._waiting.put(None)
            self._thread.join(CLOSE_GRACE_S)
        super().close()

    def _write_all(self) -> None:
        record = self._waiting.get()
        while record is not None:
            lines = [self._line(record)]
            while len(lines) < WRITTEN_AT_ONCE and not self._waiting.empty():
                record = self._waiting.get()
                if record is None:
                    break
                lines.append(self._line(record))
            if self._num_dropped and self._waiting.empty():
                num, self._num_dropped = self._num_dropped, 0
                message = f"{num} log lines were dropped, because the log was not read fast enough"
                lines.append(self._line(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None)))
            self._write(b"".join(lines))
            if record is not None:
                self._is_closed.wait(REST_S)
                record = self._waiting.get()

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            return self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # noqa: BLE001 - one bad line must not end the log
            self.handleError(record)
            return b""

    def _write(self, text: bytes) -> None:
        # Not by sys.stderr: a thread that is stopped within it would hold its lock at the end of the process.
        with contextlib.suppress(OSError):  # closed: there is nowhere to report it
            while text:
                text = text[os.write(self._fd, text) :]


class LogProgress:
    """Long work as lines of the log, for a log read by machines: at the start, every 20 %, and at the end."""

    def __init__(self) -> None:
        self._said: tuple[str, int] = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        fifths = min(5, 5 * done // max(1, total))
        if what != self._said[0] or fifths > self._said[1]:
            log.info("%s: %d %%", what, 20 * fifths)
            self._said = (what, fifths)


@contextlib.contextmanager
def logging_to_stderr(settings: LogSettings, *, worker: int | None = None) -> Generator[None]:
    """While inside, log lines go to stderr, as the settings say; without one they go nowhere.

    `worker` is the number of this process, where the server has several: each line has it, and the log of the process
    it was forked from is left alone.
    """
    if sys.stderr is None:
        yield
        return
    writer = LogWriter(sys.stderr.fileno())
    is_json = settings.log_format is LogFormat.JSON
    writer.setFormatter(JsonFormatter(worker) if is_json else TextFormatter(worker))
    root = logging.getLogger()
    if worker is not None:
        root.handlers.clear()  # the thread that wrote for them is the parent's
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line of ours shows them
    root.setLevel(str(settings.log_level).upper())
    root.addHandler(writer)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop lines say nothing that ours do not
    try:
        yield
    finally:
        root.removeHandler(writer)
        writer.close()


def logged(options: dict[str, Any], work: Callable[[CommandSettings], int]) -> int:
    """Read the settings of a command and do its work with the log open; returns the exit code.

    Raises StartupError, but for a log in JSON: there the error is a line of the log.
    """
    settings = load_settings(options, os.environ, options.pop("config"))
    with logging_to_stderr(settings):
        if ignored := kubernetes_variables(os.environ):
            log.info(
                "ignored %d environment variables such as %s: Kubernetes sets them for a Service",
                len(ignored),
                ignored[0],
            )
        try:
            return work(settings)
        except StartupError as error:
            if settings.log_format is not LogFormat.JSON:
                raise
            log.error("%s", error)
            return error.exit_code


def progress_of(settings: LogSettings) -> Progress:
    """Long work, told as the log is: by lines of it, or on the terminal."""
    return LogProgress() if settings.log_format is LogFormat.JSON else StreamProgress(sys.stderr)
