"""The process of a session: its requests go there. Pure; knows no socket and no request.

With `--workers` it is seen from the id. `LeasedOwners`, of a database, are another implementation of `Owners`.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stenograph.core.errors import StenographError, WorkerUnavailable

FIRST = 0
"""The number of the worker speaking for all to the engines."""

RETRY_S = 1.0

_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Another process: a worker of this server at its `socket`, or another server, named by its address.

    `refusal` is the error for a request it leaves unanswered.
    """

    name: str
    socket: Path | None = None
    refusal: StenographError | None = field(default=None, compare=False)

    @property
    def is_server(self) -> bool:
        """Whether it is another server."""
        return self.socket is None

    def away(self) -> StenographError:
        """The error for a request it leaves unanswered."""
        return self.refusal or WorkerUnavailable(
            f"The process that has this session ({self.name}) has ended, and is being started again: ask again.",
            retry_after_s=RETRY_S,
        )


class Owners(Protocol):
    """Knows the process of each session. None: this process, or none; the request is served here."""

    async def owner_of(self, session_id: str) -> Owner | None:
        """The other process with the session of this id."""
        ...

    def opener_of(self, key: bytes) -> Owner | None:
        """The other process to open the session of an `Idempotency-Key`."""
        ...

    def first(self) -> Owner | None:
        """The other process to speak for the server to its engines: of pauses, of weights, of the engines in use."""
        ...


def number_of(session_id: str, num_workers: int) -> int | None:
    """The worker with the session of an id; None for an invalid id."""
    return int(session_id[:2], 16) % num_workers if _ID.fullmatch(session_id) else None


class FileOwners:
    """The first two digits of an id name its file, and worker `file mod N` has it. `sockets` are those of all workers,
    in order."""

    def __init__(self, sockets: Sequence[Path], *, own: int) -> None:
        self._owners = [
            None if number == own else Owner(name=f"worker {number}", socket=socket)
            for number, socket in enumerate(sockets)
        ]

    def __repr__(self) -> str:
        return f"<FileOwners of {len(self._owners)} workers>"

    @property
    def num(self) -> int:
        """Number of workers."""
        return len(self._owners)

    def worker(self, number: int) -> Owner | None:
        """A worker; None: this process."""
        return self._owners[number]

    async def owner_of(self, session_id: str) -> Owner | None:
        return self._owners[int(session_id[:2], 16) % len(self._owners)]

    def opener_of(self, key: bytes) -> Owner | None:
        return self._owners[zlib.crc32(key) % len(self._owners)]

    def first(self) -> Owner | None:
        return self._owners[FIRST]
