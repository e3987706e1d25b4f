"""The embedded engine's process where a server has several workers: started by their parent, and again when it dies.

Its listening socket is the parent's too: workers connecting during a restart wait there. It begins with the
weights it had last.
"""

import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.state_file import StateFile
from stenograph.core.errors import StartupError
from stenograph.embedded.part import embedded_options
from stenograph.embedded.wire import EVENTS, LoadFailed, read_frame
from stenograph.http.loaded_model import LoadedModel
from stenograph.http.settings import Settings

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
LONG_LIFE_S = 10.0
"""After a life of so many seconds the next death is a new one."""
STOP_GRACE_S = 5.0


class SharedEngineProcess:
    """The one process, and its socket in `folder`."""

    def __init__(self, settings: Settings, loaded: LoadedModel, folder: Path) -> None:
        self._path = folder / "engine.sock"
        self._state = StateFile(folder)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._threads = settings.engine_threads
        self._model = loaded.path
        self._options = embedded_options(settings, loaded.renderer.tokenizer)
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._pause_s = FIRST_PAUSE_S
        self.due: float | None = None
        """The time to start it again; None while it runs."""

    def __repr__(self) -> str:
        return f"<SharedEngineProcess at {self._path}>"

    def at(self, place: WorkerPlace) -> WorkerPlace:
        """The place of a worker using it."""
        return dataclasses.replace(place, engine=self._path)

    def start(self) -> None:
        """Start it, and wait until its model is loaded. Raises StartupError."""
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
        """Start it again once its pause is over."""
        if self.due is not None and self.due <= time.monotonic():
            self.due = None
            self._spawn()

    def take_end(self) -> None:
        """Note its end, if it has ended."""
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
        """In a worker: close the parent's files, above all the input: its end ends the process."""
        if self._process is not None:
            self._close_pipes(self._process)
        self._listener.close()

    def close(self) -> None:
        """End it: by closing its input, and after a while by force."""
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
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(self._threads))
        number = self._listener.fileno()
        state, options = self._state.read(), self._options
        if state is not None and state.num_taken:
            weights, version = state.path or options.weights, state.version or options.weight_version
            options = dataclasses.replace(options, weights=weights, weight_version=version)
        command = (sys.executable, "-m", "stenograph.embedded.child")
        self._process = subprocess.Popen(
            [*command, str(self._model), options.to_json(), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
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
