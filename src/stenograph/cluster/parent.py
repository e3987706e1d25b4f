"""`serve --workers N`: a parent loads the model once, forks the workers, and restarts each dead one.

The parent serves nothing and runs no event loop, so that a fork of it is clean: it waits for signals, for the ends of
its children, and for the workers' messages. It holds everything to outlive a worker: every listening socket, so no
connection is refused while one is started again, the folder of `--data-dir`, the page of counts, and the process of
an engine shared by all workers. If it dies, the workers drain and end.

Each worker has a socket of its own on the one port (SO_REUSEPORT): the kernel spreads connections evenly. Of one
inherited socket the first worker awake takes all waiting connections.
"""

import asyncio
import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import uvloop

from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.shared_capacity import CapacityPage
from stenograph.cluster.shared_store import prepare_database
from stenograph.cluster.state_file import StateFile
from stenograph.cluster.worker import Worker
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StartupError, StorageLost
from stenograph.core.loaded import entry
from stenograph.dialects.settings import DialectKind
from stenograph.http.control_routes import LATE
from stenograph.http.dialects import DIALECTS
from stenograph.http.engines import engine_part, load_engine
from stenograph.http.listen import listen, url_of
from stenograph.http.loaded_model import LoadedModel, load_model
from stenograph.http.part import Part
from stenograph.http.processes import EngineProcess
from stenograph.http.rule_files import check_files
from stenograph.http.server import serve_on
from stenograph.http.settings import Settings
from stenograph.model.progress import Progress
from stenograph.parts import ClusterSettings, TenantSettings, settings_of
from stenograph.store.folder import DataFolder

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5
"""Starts of a worker allowed to fail in a row; then the server ends."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0

InWorker = Callable[[int], AbstractContextManager[None]]
"""Entered in a worker, by its number, before anything else: it opens the log anew."""


def serve_workers(
    settings: Settings,
    parts: tuple[Part, ...],
    *,
    announce: Callable[[str], None],
    progress: Progress,
    in_worker: InWorker,
) -> signal.Signals | None:
    """Run the server until SIGTERM or SIGINT, and return the signal.

    Raises StartupError if the start fails, or a worker for good, and StorageLost if a worker's store failed.
    """
    num = settings_of(ClusterSettings, settings).workers
    with ExitStack() as stack:
        listeners = _listeners(settings, num, stack)
        url = url_of(listeners[0])
        check_files(settings)
        folder = None
        if settings.data_dir is not None:
            folder = DataFolder(settings.data_dir, address=url)
            stack.callback(folder.close)
        places = _places(num, stack)
        asyncio.run(prepare_database(settings))
        loaded = load_model(settings, SystemClock(), progress, weights=settings.loads_weights)
        load_parts(settings, parts)
        engine = None
        if (own := engine_part(settings, parts)) is not None:
            beside = places[0].sockets[0].parent
            made: EngineProcess = entry(own.shared_engine)(settings, loaded, beside, StateFile(beside).read)
            stack.callback(made.close)
            made.start()
            places = [replace(place, engine=made.socket) for place in places]
            engine = made
        parent = _Parent(settings, parts, listeners, places, loaded, folder, engine, in_worker=in_worker)
        about = f"model {settings.model}, engine {settings.engine}, {num} workers"
        return parent.run(lambda: announce(f"stenograph ready at {url} ({about})"))


def load_parts(settings: Settings, parts: tuple[Part, ...]) -> None:
    """Import the modules for each worker of these settings: their parent does it for all, before it forks."""
    for name in (LATE, *(part.groups for part in parts if part.groups)):
        entry(name)
    load_engine(settings, parts)
    for kind in settings.dialects:
        entry(DIALECTS[DialectKind(kind)])


def _listeners(settings: Settings, num: int, stack: ExitStack) -> list[socket.socket]:
    """A socket for each worker on the one port. Raises StartupError if anybody else has it."""
    host, port = settings.host, settings.port
    if port:  # a server of this user that shares its port, too, would not be noticed
        listen(host, port).close()
    listeners: list[socket.socket] = []
    for _ in range(num):
        listener = stack.enter_context(listen(host, port, shares_port=True))
        port = listener.getsockname()[1]
        listeners.append(listener)
    return listeners


def _places(num: int, stack: ExitStack) -> list[WorkerPlace]:
    folder = Path(tempfile.mkdtemp(prefix="stenograph-"))  # which nobody else may enter
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    sockets = tuple(folder / f"worker-{number}.sock" for number in range(num))
    page, instance_id = CapacityPage(num), uuid.uuid4().hex
    places: list[WorkerPlace] = []
    for number, path in enumerate(sockets):
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(2048)
        listener.setblocking(False)
        places.append(
            WorkerPlace(number=number, sockets=sockets, listener=listener, page=page, instance_id=instance_id)
        )
    return places


@dataclass(slots=True)
class _Process:
    """A worker's process. `said` are its messages so far, through a pipe."""

    pid: int
    pipe: int
    said: bytes = b""

    @property
    def is_ready(self) -> bool:
        return self.said.startswith(b"ready\n")

    @property
    def error(self) -> str:
        return self.said.removeprefix(b"ready\n").decode(errors="replace").strip()

    def listen(self) -> None:
        """Take its messages."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 4096):
                self.said += data


@dataclass(slots=True)
class _WorkerSlot:
    """A worker through all of its lives. `due` is when the next begins; None while one runs."""

    process: _Process | None = None
    due: float | None = 0.0
    num_failed_starts: int = 0


@dataclass(slots=True)
class _Signals:
    """Received signals, and a pipe to wake the waiting loop."""

    came: list[signal.Signals] = field(default_factory=list[signal.Signals])

    def note(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number))


class _Parent:
    """The parent of all workers, from the first fork to the last end."""

    def __init__(
        self,
        settings: Settings,
        parts: tuple[Part, ...],
        listeners: list[socket.socket],
        places: list[WorkerPlace],
        loaded: LoadedModel,
        folder: DataFolder | None,
        engine: EngineProcess | None,
        *,
        in_worker: InWorker,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._listeners = listeners
        self._places = places
        self._loaded = loaded
        self._folder = folder
        self._engine = engine
        self._in_worker = in_worker
        self._slots = [_WorkerSlot() for _ in places]
        self._signals = _Signals()
        self._ended_by: signal.Signals | None = None
        self._failure: StartupError | StorageLost | None = None
        self._hears_hangup = settings_of(TenantSettings, settings).tenants is not None
        self._is_ending = False
        self._was_ready = False
        self._life = os.pipe()  # its end tells the workers that the parent is gone
        self._wake = os.pipe()

    def run(self, ready: Callable[[], None]) -> signal.Signals | None:
        """Fork the workers, and keep them running until a signal; `ready` is called when all of them are."""
        for number in (*self._life, *self._wake):
            os.set_blocking(number, False)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        handled = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *([signal.SIGHUP] if self._hears_hangup else [])]
        before = {number: signal.signal(number, self._signals.note) for number in handled}
        gc.collect()
        gc.freeze()  # what is loaded stays in memory that all share
        try:
            while not self._is_ending or any(slot.process is not None for slot in self._slots):
                self._start_due()
                self._wait()
                self._take_signals()
                self._take_ends()
                if not self._was_ready and all(slot.process and slot.process.is_ready for slot in self._slots):
                    self._was_ready = True
                    ready()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for descriptor in (*self._life, *self._wake):
                os.close(descriptor)
        if self._failure is not None:
            raise self._failure
        return self._ended_by

    def _start_due(self) -> None:
        now = time.monotonic()
        for number, slot in enumerate(self._slots):
            if slot.process is None and slot.due is not None and slot.due <= now and not self._is_ending:
                slot.process, slot.due = self._forked(number), None
        if self._engine is not None and not self._is_ending:
            self._engine.start_if_due()

    def _wait(self) -> None:
        dues = [slot.due for slot in self._slots if slot.due is not None and not self._is_ending]
        if self._engine is not None and self._engine.due is not None and not self._is_ending:
            dues.append(self._engine.due)
        pipes = {slot.process.pipe: slot.process for slot in self._slots if slot.process is not None}
        patience_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        # A pipe whose worker has ended stays readable: its end comes with SIGCHLD, at the latest a moment later.
        open_pipes = [pipe for pipe, process in pipes.items() if not process.is_ready]
        readable, _, _ = select.select([self._wake[0], *open_pipes], [], [], patience_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake[0], 4096):
                pass
        for pipe in readable:
            if pipe in pipes:
                pipes[pipe].listen()
                if not pipes[pipe].is_ready:
                    time.sleep(0.001)

    def _take_signals(self) -> None:
        while self._signals.came:
            number = self._signals.came.pop(0)
            if number is signal.SIGCHLD:
                continue
            if number is signal.SIGHUP:
                self._send(number)
                continue
            self._ended_by = self._ended_by or number
            self._end(number)

    def _end(self, number: signal.Signals) -> None:
        """Ask all workers to end."""
        if not self._is_ending:
            self._is_ending = True
            for listener in self._listeners:
                listener.close()
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to all workers."""
        for slot in self._slots:
            if slot.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot.process.pid, number)

    def _take_ends(self) -> None:
        for number, slot in enumerate(self._slots):
            if slot.process is None:
                continue
            pid, status = os.waitpid(slot.process.pid, os.WNOHANG)
            if pid:
                process, slot.process = slot.process, None
                process.listen()
                os.close(process.pipe)
                self._places[number].page.has_ended(number)
                self._has_ended(number, slot, process, os.waitstatus_to_exitcode(status))
        if self._engine is not None:
            self._engine.take_end()

    def _has_ended(self, number: int, slot: _WorkerSlot, process: _Process, code: int) -> None:
        if code == StorageLost.exit_code:
            self._failure = self._failure or StorageLost(process.error)
            if not self._is_ending:
                self._end(signal.SIGTERM)
            return
        if self._is_ending:
            return
        slot.num_failed_starts = 0 if process.is_ready else slot.num_failed_starts + 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not self._was_ready and code == StartupError.exit_code:
            self._failure = StartupError(process.error)
        elif slot.num_failed_starts >= MAX_FAILED_STARTS:
            why = process.error or f"its process {how}"
            self._failure = StartupError(f"worker {number} did not start {MAX_FAILED_STARTS} times in a row: {why}")
        if self._failure is not None:
            self._end(signal.SIGTERM)
            return
        failed = slot.num_failed_starts
        pause_s = 0.0 if not failed else min(FIRST_PAUSE_S * 2 ** (failed - 1), LONGEST_PAUSE_S)
        slot.due = time.monotonic() + pause_s
        log.error("worker %d (process %d) %s; starting it again", number, process.pid, how)

    # --- in the worker

    def _forked(self, number: int) -> _Process:
        """Fork a worker. It never returns from here."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # there is the log's thread, which a worker replaces
            pid = os.fork()
        if pid:
            os.close(writing)
            os.set_blocking(reading, False)
            return _Process(pid=pid, pipe=reading)
        code = 1
        try:
            os.close(reading)
            self._let_go(number)
            with self._in_worker(number):
                code = self._run_worker(number, writing)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)

    def _let_go(self, number: int) -> None:
        """Leave the terminal and the parent's signals, and close everything of the parent's or another worker's."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(handled, signal.SIG_DFL)
        if self._hears_hangup:  # until the worker reads its file anew at one, it has just read it
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for descriptor in (self._life[1], *self._wake):
            os.close(descriptor)
        for slot in self._slots:
            if slot.process is not None:
                os.close(slot.process.pipe)
        for other, (listener, place) in enumerate(zip(self._listeners, self._places, strict=True)):
            if other != number:
                listener.close()
                place.listener.close()
        if self._engine is not None:
            self._engine.let_go()

    def _run_worker(self, number: int, pipe: int) -> int:
        """Serve as a worker; returns its exit code."""

        def say(text: str) -> None:
            with contextlib.suppress(OSError):
                os.write(pipe, text.encode()[:4000])

        async def work() -> None:
            asyncio.get_running_loop().add_reader(self._life[0], self._parent_is_gone)
            await serve_on(
                self._listeners[number],
                self._settings,
                self._given,
                self._folder,
                Worker(self._places[number], self._settings),
                clock=SystemClock(),
                announce=lambda _: say("ready\n"),
                parts=self._parts,
            )

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(work())
        except StartupError as error:
            say(str(error))
            return StartupError.exit_code
        except StorageLost as error:
            say(str(error))
            return StorageLost.exit_code
        except Exception:
            log.exception("worker %d has failed", number)
            return 1
        return 0

    def _parent_is_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._life[0])
        log.error("the parent process has ended: this worker drains and ends")
        os.kill(os.getpid(), signal.SIGTERM)

    async def _given(self) -> LoadedModel:
        return self._loaded
