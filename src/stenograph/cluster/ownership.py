"""The owner of a session, where servers share a store: this one, another, or nobody, and then this one takes it.

Routes know `SharedOwnership` alone. Sessions in one process's files have none.
"""

from collections.abc import Sequence

from stenograph.cluster.postgres.owner_name import OwnerName
from stenograph.cluster.postgres.shared_rows import HeldBy
from stenograph.cluster.postgres.store import PostgresStore, held_elsewhere
from stenograph.core.errors import SessionElsewhere, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.session.manager import SessionManager

LOST = (
    "This node could not renew its lease in time, so another one may have the session by now; nothing of this turn was"
    " kept. Send the same request again."
)
MOVED = "Another node has taken the session over; nothing of this turn was kept. Send the same request again."


class SharedOwnership:
    """The ownership of a store in a database, by leases. Tells the manager what it has lost."""

    def __init__(self, manager: SessionManager, store: PostgresStore) -> None:
        self._manager = manager
        self._store = store
        store.on_lost = self._lost
        store.on_moved = self._moved

    def __repr__(self) -> str:
        return f"<SharedOwnership of {self._store!r}>"

    def settle(self) -> None:
        """Let go of the sessions in memory if they may be another's by now. Called before a request is looked at."""
        self._store.owner.held()

    async def elsewhere(self, session_id: str) -> SessionElsewhere | None:
        """The refusal of a session that another process has, which says where; None if this one has it, or may take it.

        Raises StorageUnavailable while that cannot be known.
        """
        if self._manager.sessions.has(session_id):
            return None
        held = await self._store.holder(SessionId(session_id))
        return None if held is None else held_elsewhere(session_id, held)

    async def owners(self) -> Sequence[str]:
        """The names of all owners whose leases run. Raises StorageUnavailable."""
        return await self._store.owners()

    @property
    def name(self) -> str:
        """The name of this process as an owner."""
        return self._store.owner.name

    @property
    def server(self) -> str:
        """The address of this server."""
        return OwnerName.of(self._store.owner.name).server

    def has(self, session_id: str) -> bool:
        """Whether the session is in this process's memory."""
        return self._manager.sessions.has(session_id)

    async def holder(self, session_id: str) -> HeldBy | None:
        """The other process that has a session; None if none has. Raises StorageUnavailable."""
        return await self._store.holder(SessionId(session_id))

    def _lost(self) -> None:
        self._manager.let_go_of(None, StorageUnavailable(LOST, is_full=False, retry_after_s=1.0))

    def _moved(self, session_id: SessionId) -> None:
        self._manager.let_go_of(session_id, StorageUnavailable(MOVED, is_full=False, retry_after_s=1.0))
