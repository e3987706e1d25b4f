"""Sessions opened with an `Idempotency-Key`: a client asking again with it gets the same session.

Owns the keys of sessions in memory alone; a store finds its sessions by their keys itself.
"""

import asyncio
from collections.abc import Awaitable, Callable

from stenograph.core.errors import IdempotencyMismatch, SessionNotFound
from stenograph.core.types import SessionId
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.sessions import Begin
from stenograph.trajectory.commits import SessionOptions

OpenedElsewhere = Callable[[str, bytes], Awaitable[SessionId | None]]

MAX_KEYS = 1024
"""Number of keys kept before those of ended sessions are looked for."""


class KeyedSessions:
    """Opens the sessions of a manager, each key once."""

    def __init__(self, manager: SessionManager, elsewhere: OpenedElsewhere | None = None) -> None:
        """`elsewhere` finds a session opened with a key and body by another process of the server; it raises as
        `find`."""
        self._manager = manager
        self._elsewhere = elsewhere
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._ids: dict[str, SessionId] = {}
        self._num_checked = MAX_KEYS

    def __repr__(self) -> str:
        return f"<KeyedSessions {len(self._pending)} under way>"

    @property
    def num_keys(self) -> int:
        """Keys of sessions in memory alone, including those of ended sessions."""
        return len(self._ids)

    async def open(self, options: SessionOptions, *, key: str | None, body: bytes, begin: Begin = None) -> SessionId:
        """A new session, or the one opened with this key and body before, if there still is one. `begin` is as
        `Sessions.open` has it.

        Raises as `Sessions.open` and `find`.
        """
        if key is None:
            return (await self._manager.sessions.open(options, begin=begin)).id
        while (before := self._pending.get(key)) is not None:
            await asyncio.wait({before})
        pending = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            session_id = await self.find(key, body)
            if session_id is None and self._elsewhere is not None:
                session_id = await self._elsewhere(key, body)
            if session_id is None:
                opened_by = RequestIdentity(route="/sessions", body=body, key=key).mark()
                session_id = (await self._manager.sessions.open(options, opened_by, begin)).id
                self._note(key, session_id)
            return session_id
        finally:
            del self._pending[key]
            pending.set_result(None)

    async def find(self, key: str, body: bytes) -> SessionId | None:
        """The session opened with a key by this process. Raises IdempotencyMismatch if the body was another, and as
        `Sessions.look`."""
        storage = self._manager.sessions.storage
        session_id = self._ids.get(key) if storage is None else await storage.find(key)
        if session_id is None:
            return None
        try:
            session = await self._manager.sessions.peek(session_id)
        except SessionNotFound:
            return None
        if session.opened_by != RequestIdentity(route="/sessions", body=body, key=key).mark():
            raise IdempotencyMismatch
        return session.id

    def _note(self, key: str, session_id: SessionId) -> None:
        if self._manager.sessions.storage is not None:
            return
        self._ids[key] = session_id
        if len(self._ids) > self._num_checked:
            self._ids = {key: id_ for key, id_ in self._ids.items() if self._manager.sessions.has(id_)}
            self._num_checked = MAX_KEYS + 2 * len(self._ids)
