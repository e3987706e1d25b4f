"""The embedded engine's process where a server has several workers: started by their parent, and again when it dies.

Its listening socket is the parent's too: workers connecting during a restart wait there. It begins with the
weights it had last.
"""

import contextlib
import dataclasses
import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from socket import AF_UNIX, socket

from stenograph.core.errors import StartupError
from stenograph.embedded.engine import FIRST_PAUSE_S, LONGEST_PAUSE_S, STOP_GRACE_S
from stenograph.embedded.part import embedded_options
from stenograph.embedded.wire import EVENTS, LoadFailed, read_frame
from stenograph.http.loaded_model import LoadedModel
from stenograph.http.processes import EngineProcess
from stenograph.http.settings import Settings
from stenograph.session.weights import SyncState

log = logging.getLogger(__name__)

LONG_LIFE_S = 10.0
"""After a life of so many seconds the next death is a new one."""


class SharedEngineProcess(EngineProcess):
    """The one process, and its socket in `folder`. `last_state` is the last of the weights; None: none were taken."""

    def __init__(
        self, settings: Settings, loaded: LoadedModel, folder: Path, last_state: Callable[[], SyncState | None]
    ) -> None:
        self.socket = folder / "engine.sock"
        self._last_state = last_state
        self._listener = socket(AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen(128)
        self._model = loaded.path
        self._options = embedded_options(settings, loaded.renderer.tokenizer)
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._pause_s = FIRST_PAUSE_S
        self.due: float | None = None

    def __repr__(self) -> str:
        return f"<SharedEngineProcess at {self.socket}>"

    def start(self) -> None:
        self._spawn()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        payload = read_frame(process.stdout)
        if payload is None:
            raise StartupError(f"the embedded engine ended with exit code {process.wait()} while it loaded its model")
        event = EVENTS.decode(payload)
        if isinstance(event, LoadFailed):
            raise StartupError(event.message)

    def start_if_due(self) -> None:
        if self.due is not None and self.due <= time.monotonic():
            self.due = None
            self._spawn()

    def take_end(self) -> None:
        process = self._process
        if process is None or process.poll() is None:
            return
        self._close_pipes(process)
        self._process = None
        if time.monotonic() - self._began > LONG_LIFE_S:
            self._pause_s = FIRST_PAUSE_S
        self.due = time.monotonic() + self._pause_s
        log.error(
            "the embedded engine's process has ended (%d); starting it again in %g s", process.returncode, self._pause_s
        )
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def let_go(self) -> None:
        if self._process is not None:
            self._close_pipes(self._process)
        self._listener.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._close_pipes(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_S)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._listener.close()

    def _spawn(self) -> None:
        number = self._listener.fileno()
        state, options = self._last_state(), self._options
        if state is not None and state.num_taken:
            weights, version = state.path or options.weights, state.version or options.weight_version
            options = dataclasses.replace(options, weights=weights, weight_version=version)
        self._process = subprocess.Popen(
            [*options.command(self._model), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=options.environment(),
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which drains first
        )
        self._began = time.monotonic()

    @staticmethod
    def _close_pipes(process: "subprocess.Popen[bytes]") -> None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
