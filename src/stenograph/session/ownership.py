"""The owner of a session, where servers share a store: this one, another, or nobody, and then this one takes it.

`Ownership` is the one interface that the routes know. Sessions in one process's files have none.
"""

from typing import Protocol

from stenograph.core.errors import SessionElsewhere, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.session.manager import SessionManager
from stenograph.store.postgres.store import PostgresStore

LOST = (
    "This node could not renew its lease in time, so another one may have the session by now; nothing of this turn was"
    " kept. Send the same request again."
)
MOVED = "Another node has taken the session over; nothing of this turn was kept. Send the same request again."


class Ownership(Protocol):
    """Knows who has a session."""

    def settle(self) -> None:
        """Let go of the sessions in memory if they may be another's by now. Called before a request is looked at."""
        ...

    async def elsewhere(self, session_id: str) -> SessionElsewhere | None:
        """The refusal of a session that another node has, which says where; None if this one has it, or may take it.

        Raises StorageUnavailable while that cannot be known.
        """
        ...


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
        self._store.owner.held()

    async def elsewhere(self, session_id: str) -> SessionElsewhere | None:
        if self._manager.has(session_id):
            return None
        holder = await self._store.holder(SessionId(session_id))
        if holder is None:
            return None
        return SessionElsewhere(session_id, url=holder.url, retry_after_s=max(0.1, holder.remaining_s))

    def _lost(self) -> None:
        self._manager.let_go_of(None, StorageUnavailable(LOST, is_full=False, retry_after_s=1.0))

    def _moved(self, session_id: SessionId) -> None:
        self._manager.let_go_of(session_id, StorageUnavailable(MOVED, is_full=False, retry_after_s=1.0))
