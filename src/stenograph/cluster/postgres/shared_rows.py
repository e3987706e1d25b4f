"""The questions of a node to the database it shares with other nodes. Each is answered at once, whole or not.

`cluster/postgres/server.py` asks a PostgreSQL, `standins/shared_rows.py` is one in memory, for simulations; one
test holds them to each other. A joining node becomes an *owner*, with a number never used before and a lease
by the database's clock. An expired lease is never renewed: the first node to find it so removes the owner, and
then takes its sessions. Each session has an *epoch*, one more with each new owner.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from stenograph.core.messages import MediaRef
from stenograph.core.types import SessionId
from stenograph.store.base import Ended, StoredSession, StoredSummary, Sums
from stenograph.store.codec.rows import Totals
from stenograph.store.groups import NewRow, NewSession


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerName:
    """An owner's name: `server` is an address, `worker` its number where the server has several: `http://10.0.0.5:8080#1`.

    Every worker passes others' requests on, so other servers need the address alone.
    """

    server: str
    worker: int | None = None

    def __str__(self) -> str:
        return self.server if self.worker is None else f"{self.server}#{self.worker}"

    @classmethod
    def of(cls, text: str) -> "OwnerName":
        """The name written so."""
        server, _, worker = text.partition("#")
        return cls(server=server, worker=int(worker) if worker else None)


class DatabaseAway(Exception):
    """The database has not answered: the request may have been done, may be done yet, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMove:
    """The end of a session's rows, as it was when they were made, and as it is to be. `digest` is the last row's.
    `has_turn`: its idle time begins anew, by the database's clock."""

    session: int
    epoch: int
    before: int
    seq: int
    digest: bytes
    totals: Totals
    head: bytes
    has_turn: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A session of the asking owner, in this epoch. `is_new`: it was another's, or nobody's, before."""

    session: int
    epoch: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBy:
    """A session is another owner's, with this number and name, for so long if the lease is not renewed. The name is
    empty if it is not known."""

    owner: int
    name: str
    remaining_s: float


class Deletion(enum.Enum):
    """The outcome of a deletion."""

    DELETED = enum.auto()
    ABSENT = enum.auto()
    NOT_OWNED = enum.auto()


class SharedRows(Protocol):
    """A shared database. Every method raises DatabaseAway, after a time limit of its own, and StorageUnavailable
    where the database has refused: then nothing of it was done."""

    async def join(self, name: str, *, lease_s: float, instead_of: int | None) -> int:
        """Become an owner: its number. This process's earlier owner, if any, is removed."""
        ...

    async def renew(self, owner: int, *, lease_s: float) -> bool:
        """Let an owner's lease run from now; False if it has run out, or is gone: it stays so."""
        ...

    async def leave(self, owner: int) -> None:
        """End a lease, so others need not wait for its end."""
        ...

    async def owners(self) -> Sequence[str]:
        """The names of all owners with running leases."""
        ...

    async def create(self, new: NewSession, owner: int) -> int | None:
        """Keep a new session of this owner: the number it is given. The same one once more changes nothing, and
        says the same, as long as it is this owner's and has no rows. None otherwise, and if the owner is gone."""
        ...

    async def append(self, moves: Sequence[EndMove], rows: Sequence[NewRow]) -> set[int]:
        """Write rows, durably, of those sessions with the epoch and end of their `moves`; the numbers of the sessions
        with their rows there. The same once more changes nothing, and says the same."""
        ...

    async def claim(self, session_id: SessionId, owner: int) -> Claimed | HeldBy | None:
        """Take a session for this owner, unless another's lease on it runs; None if there is no such session."""
        ...

    async def holder(self, session_id: SessionId, owner: int) -> HeldBy | None:
        """Another owner of a session than this, by a running lease; None if there is none. Changes nothing."""
        ...

    async def read(self, session_id: SessionId) -> StoredSession | None:
        """A session's rows; None if there is none."""
        ...

    async def find(self, key: str) -> StoredSession | None:
        """The opening of the session kept last by a key."""
        ...

    async def delete(self, session_id: SessionId, owner: int, adds: Sums) -> Deletion:
        """Forget a session and all its rows, if it is this owner's, and add to the sums, both or neither."""
        ...

    async def ended(self) -> Ended:
        """As `SessionStore.ended`."""
        ...

    async def media_of(self, session_id: SessionId) -> Collection[str]:
        """The hashes of a session's media."""
        ...

    async def put_media(self, session_id: SessionId, ref: MediaRef, body: bytes) -> None:
        """Keep a medium of a session, if it is there; the content is kept once, until its last session goes."""
        ...

    async def get_media(self, session_id: SessionId, sha256: str) -> tuple[MediaRef, bytes] | None:
        """A medium of a session, and its bytes; None if the session has none with this hash."""
        ...

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        """As `SessionStore.page`."""
        ...

    async def expired(self, *, limit: int, owner: int) -> Sequence[SessionId]:
        """As `SessionStore.expired`, by the database's clock: of this owner and of owners without a lease."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...
