"""The connections of an engine shared by several processes: commands from each, to each the events of its own.

A generation is named by its connection and its name there, so no two processes name each other's. One thread a
connection reads and only submits, one writes: a process that reads nothing holds up nobody else. The generations of a
departed process are aborted.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from stenograph.core.types import RequestId
from stenograph.embedded.wire import (
    COMMANDS,
    Abort,
    Command,
    Controlled,
    Event,
    Failed,
    GrammarTook,
    LoadFailed,
    Ready,
    Sampled,
    TokenizedText,
    frame,
    read_frame,
)


class SendEvents(Protocol):
    """Takes events from any thread, in order."""

    def __call__(self, *events: Event) -> None: ...


class ConnectionDesk:
    """All connections. `obey` takes commands; `ready`, called on a thread, waits until the engine is loaded."""

    def __init__(self, obey: Callable[[Command], None], ready: Callable[[], Ready]) -> None:
        self._obey = obey
        self._ready = ready
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}

    def __repr__(self) -> str:
        return f"<ConnectionDesk of {len(self._connections)}>"

    def listen(self, listener: socket.socket) -> None:
        """Take connections from now on, on a thread."""
        threading.Thread(target=self._accept, args=(listener,), name="accept", daemon=True).start()

    def send(self, *events: Event) -> None:
        """Give each connection its events. Those of nobody, and of a closed one, are dropped."""
        for event in events:
            if isinstance(event, GrammarTook):
                with self._lock:
                    first = next(iter(self._connections.values()), None)
                if first is not None:
                    first.put(event)
            elif isinstance(event, Sampled | Failed | TokenizedText | Controlled):
                number, _, name = event.request_id.partition(":")
                with self._lock:
                    connection = self._connections.get(int(number))
                if connection is not None:
                    connection.put(msgspec.structs.replace(event, request_id=RequestId(name)))
            else:
                assert isinstance(event, Ready | LoadFailed), "these are the parent's"

    def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(True)
        number = 0
        while True:
            accepted, _ = listener.accept()
            connection = _Connection(accepted)
            with self._lock:
                self._connections[number] = connection
            threading.Thread(target=self._serve, args=(number, connection), name="commands", daemon=True).start()
            number += 1

    def _serve(self, number: int, connection: "_Connection") -> None:
        names: set[RequestId] = set()
        try:
            connection.put(self._ready())
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                self._take_commands(number, connection, names)
        finally:
            with self._lock:
                del self._connections[number]
            connection.close()
            for name in names - connection.take_ended(number):
                self._obey(Abort(request_id=name))

    def _take_commands(self, number: int, connection: "_Connection", names: set[RequestId]) -> None:
        """Obey commands until there are no more. `names` has their unended generations."""
        while (payload := read_frame(connection.commands)) is not None:
            command = COMMANDS.decode(payload)
            name = RequestId(f"{number}:{command.request_id}")
            if not isinstance(command, Abort):
                names.add(name)
            self._obey(msgspec.structs.replace(command, request_id=name))
            names -= connection.take_ended(number)


class _Connection:
    """One process's connection, and the events waiting to be written to it."""

    def __init__(self, accepted: socket.socket) -> None:
        self.commands = accepted.makefile("rb")
        self._socket = accepted
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[RequestId] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="events", daemon=True).start()

    def put(self, event: Event) -> None:
        """Write an event, after those before it."""
        is_last = event.chunk.finish is not None if isinstance(event, Sampled) else True
        if is_last and isinstance(event, Sampled | TokenizedText | Failed | Controlled):
            self._ended.put(event.request_id)
        self._events.put(event)

    def take_ended(self, number: int) -> set[RequestId]:
        """Names of the generations ended since the last call."""
        ended: set[RequestId] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                ended.add(RequestId(f"{number}:{self._ended.get_nowait()}"))
        return ended

    def close(self) -> None:
        self._events.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (event := self._events.get()) is not None:
                self._socket.sendall(frame(event))
