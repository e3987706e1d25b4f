"""The owner of a session, where servers share a database: by its lease. This process takes a session without one.

A worker of this server is remembered for as long as it is the same owner: a session goes to another only when an
owner ends, and each owner's number stands on the page of the workers' counts. Other servers are asked for each time.
"""

from collections import OrderedDict

from stenograph.cluster.owners import Owner
from stenograph.cluster.peers import Peer
from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.postgres.shared_rows import OwnerName
from stenograph.cluster.postgres.store import PostgresStore, held_elsewhere
from stenograph.core.errors import SessionElsewhere, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.http.auth import SESSION_ID
from stenograph.session.manager import SessionManager

MAX_KNOWN = 20_000
"""Sessions with a remembered worker; those asked for longest ago are forgotten first."""

LOST = (
    "This node could not renew its lease in time, so another one may have the session by now; nothing of this turn was"
    " kept. Send the same request again."
)
MOVED = "Another node has taken the session over; nothing of this turn was kept. Send the same request again."


class LeasedOwners:
    """The owners in the database of `store`; the manager is told of its losses. `place` is this process's among
    several of its server."""

    def __init__(self, manager: SessionManager, store: PostgresStore, place: WorkerPlace | None) -> None:
        self._manager = manager
        self._store = store
        self._place = place
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Sessions of other workers: the worker, and its number as an owner."""
        store.on_lost = self._lost
        store.on_moved = self._moved

    def __repr__(self) -> str:
        return f"<LeasedOwners of {self._store!r}, {len(self._known)} sessions known>"

    @property
    def server(self) -> str:
        """The address of this server."""
        return OwnerName.of(self._store.owner.name).server

    def settle(self) -> None:
        """Let go of the sessions in memory if they may be another's by now. Called before a request is looked at."""
        self._store.owner.held()

    async def owner_of(self, session_id: str) -> Owner | None:
        self.settle()
        if self._manager.sessions.has(session_id):
            return None
        known = self._known.get(session_id)
        if known is None or self._place is None or self._place.page.owner(known[0]) != known[1]:
            return await self._found(session_id)
        self._known.move_to_end(session_id)
        return self._place.owners.worker(known[0])

    def opener_of(self, key: bytes) -> Owner | None:
        return None if self._place is None else self._place.owners.opener_of(key)

    def first(self) -> Owner | None:
        return None if self._place is None else self._place.owners.first()

    async def _found(self, session_id: str) -> Owner | None:
        """The other process with a session, as the database says."""
        self._known.pop(session_id, None)
        try:
            held = await self._store.holder(SessionId(session_id))
        except StorageUnavailable:
            return None  # it is refused where it is served
        if held is None or not held.name:
            return None
        name = OwnerName.of(held.name)
        if name.server != self.server:
            return Owner(name=name.server, refusal=held_elsewhere(session_id, held))
        if self._place is None or name.worker is None or name.worker >= self._place.owners.num:
            return None
        if self._place.page.owner(name.worker) == held.owner:
            self._known[session_id] = (name.worker, held.owner)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return self._place.owners.worker(name.worker)

    async def elsewhere(self, session_id: str) -> SessionElsewhere | None:
        """The refusal of another process's session, with its place; None if this one has it, or may take it.

        Raises StorageUnavailable while the owner cannot be known.
        """
        if self._manager.sessions.has(session_id):
            return None
        held = await self._store.holder(SessionId(session_id))
        return None if held is None else held_elsewhere(session_id, held)

    async def peer_of(self, session_id: str) -> Peer | None:
        """The other process with a session; None if none has. Raises StorageUnavailable, and SessionElsewhere if
        the process was one of this server's and has ended."""
        if SESSION_ID.fullmatch(session_id) is None or self._manager.sessions.has(session_id):
            return None
        if (held := await self._store.holder(SessionId(session_id))) is None:
            return None
        name = OwnerName.of(held.name)
        if name.server != self.server:
            return name.server
        num = 0 if self._place is None else self._place.owners.num
        if held.name == self._store.owner.name or name.worker is None or name.worker >= num:
            raise held_elsewhere(session_id, held)
        return name.worker

    async def servers(self) -> list[str]:
        """The addresses of the other servers with running leases. Raises StorageUnavailable."""
        return sorted({OwnerName.of(name).server for name in await self._store.owners()} - {self.server})

    def _lost(self) -> None:
        self._manager.let_go_of(None, StorageUnavailable(LOST, is_full=False, retry_after_s=1.0))

    def _moved(self, session_id: SessionId) -> None:
        self._manager.let_go_of(session_id, StorageUnavailable(MOVED, is_full=False, retry_after_s=1.0))
