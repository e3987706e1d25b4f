"""`stenograph serve` as a child process: started with settings, watched, and ended when this process ends, however.

Knows nothing of why somebody wants one.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from stenograph.core.errors import StartupError
from stenograph.core.settings import ENV_PREFIX

STOP_S = 60.0
"""Longest time for a server to stop; then it is killed."""

LAST_LINES_S = 5.0
"""Longest wait for an ended server's last lines."""

_READY = re.compile(r"stenograph ready at http")


class ServerProcess:
    """A server, started and ready. `on_end` is called on another thread if it ends without `stop`."""

    def __init__(self, settings: Mapping[str, str], *, on_end: Callable[[int], None]) -> None:
        """Start it with `settings`, variables of its environment. Raises StartupError if it does not come up."""
        self._is_stopping = False
        self._on_end = on_end
        self._last_line = ""
        serve = ["-m", "stenograph.cli.main", "serve"]
        others = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self._process = subprocess.Popen(
            [sys.executable, *serve],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**others, f"{ENV_PREFIX}EXIT_WITH": str(os.getpid()), **settings},
        )
        self._log = threading.Thread(target=self._copy_log, name="server-log", daemon=True)
        self._log.start()
        if not self._is_ready():
            code = self._process.wait()
            self._log.join(LAST_LINES_S)
            said = self._last_line.removeprefix("stenograph: ") or "it said nothing"
            raise StartupError(f"the server did not start, exit code {code}: {said}")
        threading.Thread(target=self._watch, name="server-end", daemon=True).start()

    def __repr__(self) -> str:
        return f"<ServerProcess {self._process.pid}>"

    def stop(self) -> None:
        """End it as SIGTERM does: its turns end first. Waits."""
        self._is_stopping = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        """Whether it reported itself ready; it ended if not."""
        assert self._process.stdout is not None
        return any(_READY.match(line) for line in self._process.stdout)

    def _copy_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_line = line.strip() or self._last_line
            with contextlib.suppress(OSError):  # closed: there is nobody to read it
                sys.stderr.write(line)
                sys.stderr.flush()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._is_stopping:
            self._log.join(LAST_LINES_S)
            self._on_end(code)
