"""The server of `stenograph run` and `chat`: a running one, or `stenograph serve` as a child, outside of the terminal's
reach.

The child is in a process group of its own, so Ctrl-C does not end it. Its log is shown before and after the command,
and kept meanwhile: the terminal is the command's.
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
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from stenograph.cli.run_report import say
from stenograph.cli.session_calls import ServerCalls
from stenograph.cli.settings_table import SETTINGS, CommandSettings, load_settings
from stenograph.core.errors import StartupError

STOP_S = 40.0
"""Longest time for a server to stop; then it is killed."""

MAX_KEPT_LINES = 1000
"""Lines of the server's log kept while the command runs; the last ones."""

LAST_LINES_S = 5.0
"""Longest wait for an ended server's last lines."""

_READY = re.compile(r"stenograph ready at (http://\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWish:
    """The server of a command: a running one at `url`, or one to be started with these flags of `serve`."""

    url: str | None
    flags: Sequence[str]
    settings: CommandSettings

    @classmethod
    def of(cls, options: dict[str, Any]) -> "ServerWish":
        """Of a command's options, without their `url`, `config` and settings from then on.

        The settings are checked here, and read again by a started server. Of a running one only the key is wanted.
        Raises StartupError for a bad setting or address, and for a setting beside an address.
        """
        url, config = options.pop("url"), options.pop("config")
        typed = {row: options.pop(row.name) for row in SETTINGS}
        settings = load_settings({row.name: value for row, value in typed.items()}, os.environ, config)
        given = {row.flag: value for row, value in typed.items() if value is not None}
        if url is not None:
            given.pop("--api-key", None)
        flags = [text for flag, value in given.items() for one in _listed(value) for text in (flag, one)]
        if config is not None and url is None:
            flags = ["--config", str(config), *flags]
        _check_url(url, flags)
        return cls(url=url, flags=flags, settings=settings)

    @contextlib.contextmanager
    def reached(self) -> Generator["UsedServer"]:
        """The server, until the end where it is started here. Raises StartupError if it does not start."""
        api_key = self.settings.api_key[0] if self.settings.api_key else None
        if self.url is not None:
            yield UsedServer(ServerCalls(self.url, api_key))
            return
        port = () if "--port" in self.flags else ("--port", "0")
        began = time.monotonic()
        say("starting a server ...")
        process = subprocess.Popen(
            [sys.executable, "-m", "stenograph.cli.main", "serve", *port, *self.flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=_environment(self.flags),
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
            yield UsedServer(ServerCalls(found[1], api_key), process, log)
        finally:
            _stop(process)
            log.join()


def _check_url(url: str | None, serve_flags: Sequence[str]) -> None:
    """Raise StartupError for a text other than a server's address, and for one beside flags of a server to be
    started."""
    if url is None:
        return
    if serve_flags:
        raise StartupError(
            f"--url names a running server, and {serve_flags[0]} is for one that is started here: leave one out"
        )
    path = urlsplit(url).path.rstrip("/") if url.startswith(("http://", "https://")) else None
    if path is None:
        raise StartupError(f"--url: {url!r} is no address: write it as http://HOST:PORT")
    if path.endswith("/v1") or "/sessions/" in path:
        raise StartupError(f"--url: {url!r} is more than the server's address: leave out {path}")


def _listed(value: object) -> list[str]:
    """A flag's value or values, as they were typed."""
    return [str(one) for one in cast("list[object]", value)] if isinstance(value, list) else [str(value)]


class UsedServer:
    """A running server, by its `calls`; with its process where that was started here."""

    def __init__(
        self, calls: ServerCalls, process: "subprocess.Popen[str] | None" = None, log: "_Log | None" = None
    ) -> None:
        self.calls = calls
        self._process = process
        self._log = log

    def __repr__(self) -> str:
        return f"<UsedServer {self.calls!r}>"

    @property
    def has_ended(self) -> bool:
        """Whether one that was started here has ended already, and its memory with it."""
        return self._process is not None and self._process.poll() is not None

    @contextlib.contextmanager
    def quiet(self) -> Generator[None]:
        """While inside, the log of one that was started here is kept, and shown afterwards."""
        if self._log is None:
            yield
            return
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
