"""A server of one's own for `stenograph run`: `stenograph serve` as a child, outside of the terminal's reach.

It is in a process group of its own, so Ctrl-C does not end it. Its log is shown before and after the command, and kept
meanwhile: the terminal is the command's.
"""

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

from stenograph.cli.settings_table import SETTINGS, CommandSettings, load_settings
from stenograph.core.errors import StartupError

STOP_S = 40.0
"""Longest time for a server to stop; then it is killed."""

MAX_KEPT_LINES = 1000
"""Lines of the server's log kept while the command runs; the last ones."""

LAST_LINES_S = 5.0
"""Longest wait for an ended server's last lines."""

_READY = re.compile(r"stenograph ready at (http://\S+)")


def serve_flags(options: dict[str, Any], *, is_started: bool) -> tuple[list[str], CommandSettings]:
    """The flags of a server started by another command, and the settings from them.

    The settings are checked here, and read again by the server. Of a running one only the key is wanted. Raises
    StartupError for a bad setting.
    """
    config = options.pop("config")
    settings = load_settings(options, os.environ, config)
    given = {setting.flag: options[setting.name] for setting in SETTINGS if options[setting.name] is not None}
    if not is_started:
        given.pop("--api-key", None)
    flags = [text for flag, value in given.items() for one in _listed(value) for text in (flag, one)]
    if config is not None and is_started:
        flags = ["--config", str(config), *flags]
    return flags, settings


def _listed(value: object) -> list[str]:
    """A flag's value or values, as they were typed."""
    return [str(one) for one in cast("list[object]", value)] if isinstance(value, list) else [str(value)]


class OwnServer:
    """A running server, at `url`."""

    def __init__(self, process: "subprocess.Popen[str]", log: "_Log", url: str) -> None:
        self._process = process
        self._log = log
        self.url = url

    def __repr__(self) -> str:
        return f"<OwnServer {self._process.pid} at {self.url}>"

    @classmethod
    @contextlib.contextmanager
    def started(cls, flags: Sequence[str], say: Callable[[str], None]) -> Generator["OwnServer"]:
        """A server with these flags of `serve`, until the end. Raises StartupError if it does not start."""
        port = () if "--port" in flags else ("--port", "0")
        began = time.monotonic()
        say("starting a server ...")
        process = subprocess.Popen(
            [sys.executable, "-m", "stenograph.cli.main", "serve", *port, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=_environment(flags),
        )
        log = _Log(process)
        try:
            line = _ready_line(process)
            if line is None:
                log.join()  # its last lines come first
                raise StartupError(f"the server did not start: exit code {process.wait()}; its last lines say why")
            say(f"{line.removeprefix('stenograph ')}, after {time.monotonic() - began:.1f} s")
            found = _READY.search(line)
            assert found is not None, "a ready line has an address"
            yield cls(process, log, found[1])
        finally:
            _stop(process)
            log.join()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended already, and its memory with it."""
        return self._process.poll() is not None

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """While inside, the log is kept, and shown afterwards."""
        self._log.hold()
        try:
            yield
        finally:
            self._log.show()


class _Log:
    """Shows a server's lines on stderr, or keeps them."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lock = threading.Lock()
        self._kept: collections.deque[str] | None = None
        self._thread = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        with self._lock:
            self._kept = collections.deque(maxlen=MAX_KEPT_LINES)

    def show(self) -> None:
        with self._lock:
            kept, self._kept = self._kept or (), None
        for text in kept:
            _write(text)

    def join(self) -> None:
        """Wait until all of an ended server's lines are shown."""
        self._thread.join(LAST_LINES_S)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for text in self._process.stderr:
            with self._lock:
                if self._kept is not None:
                    self._kept.append(text)
                    continue
            _write(text)


def _environment(flags: Sequence[str]) -> dict[str, str]:
    """The server's environment: it ends with this process, however it ends, and logs warnings alone, unless its
    settings say something else."""
    environment = {**os.environ, "STENOGRAPH_EXIT_WITH": str(os.getpid())}
    if "--config" not in flags:
        environment.setdefault("STENOGRAPH_LOG_LEVEL", "warning")
    return environment


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # closed: there is nobody to read it
        sys.stderr.write(text)
        sys.stderr.flush()


def _ready_line(process: "subprocess.Popen[str]") -> str | None:
    """A server's ready line; None if it ends without one."""
    assert process.stdout is not None
    for line in process.stdout:
        if _READY.search(line):
            return line.strip()
    return None


def _stop(process: "subprocess.Popen[str]") -> None:
    """End a server, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
