"""The sessions of a store: opened, read, deleted, listed. Whether one is in memory is the manager's business.

Owns the way between a `Session` and its rows; after any wait in a method the world may have changed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stenograph.core.clock import Clock
from stenograph.core.errors import ModelMismatch, SessionDamaged, SessionNotFound
from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.offload.memory import untrack
from stenograph.offload.pool import CpuPool
from stenograph.session.session import Session
from stenograph.store.base import NO_SUMS, SessionStore, StoredSession, Sums
from stenograph.store.codec.commits import encode_opened
from stenograph.store.restored import ListedSession, MatcherOf, listed_session, restored_turns
from stenograph.trajectory.commits import ModelMark, SessionOpened
from stenograph.trajectory.matching import MATCHERS, Matcher

if TYPE_CHECKING:
    from stenograph.trajectory.account import Entry

EXPIRED_AT_ONCE = 100
"""Number of sessions looked for and deleted at once, when idle for too long."""

FORGOTTEN_TURNS = 10_000
"""Sessions are forgotten in one event-loop iteration until they had so many turns: each takes about a microsecond."""

READ_AT_ONCE_BYTES = 64 * 1024
"""Sessions of a list are read in one event-loop iteration until their first rows, with all metadata, have this size."""

LISTED_BYTES = 1024
"""The approximate cost of reading one beside its metadata."""


Listed = Session | ListedSession


class SessionStorage:
    """A store of sessions. `model` is the server's; `matchers` are further ones for sessions to name beside the
    known."""

    def __init__(
        self,
        store: SessionStore,
        *,
        clock: Clock,
        pool: CpuPool,
        model: ModelMark,
        matchers: Mapping[str, Matcher] | None = None,
    ) -> None:
        self.store = store
        self._clock = clock
        self._pool = pool
        self._model = model
        self._matchers = {**MATCHERS, **(matchers or {})}
        self._reading: Counter[str] = Counter()
        self._num_left: Counter[str] = Counter()
        """Of sessions being read, how often they have left memory meanwhile."""
        self._deleting: dict[str, list[asyncio.Event]] = {}
        """The ends of deletions under way."""
        self._deleted: set[str] = set()
        self._trained: dict[str, dict[int, int]] = {}
        self._unkept: dict[str, list[Entry]] = {}
        """Entries of accounts that the store has not taken: of turns failed by a full disk, for one."""
        self.num_read = 0
        """Sessions read."""
        self.num_damaged = 0
        """Sessions unreadable because they are damaged."""

    def __repr__(self) -> str:
        return f"<SessionStorage of {self.store!r}>"

    async def create(self, session: Session) -> None:
        """Keep a new session. Raises StorageUnavailable."""
        opened = SessionOpened(
            session_id=session.id,
            created_at=session.created_at,
            model=self._model,
            options=session.options,
            request=session.opened_by,
        )
        session.tail = await self.store.create(
            session.id,
            encode_opened(opened),
            at=session.created_at,
            ttl_s=session.options.ttl_s,
            key=None if session.opened_by is None else session.opened_by.key,
        )

    async def find(self, key: str) -> SessionId | None:
        """The session opened last with a key. Raises StorageUnavailable."""
        found = await self.store.find(key)
        return None if found is None else found.session_id

    async def read(self, session_id: str, *, takes: bool = True) -> Session:
        """A session as it is in the store, held by nobody else; where it is not taken, it is only to be read.

        Raises SessionNotFound, also for one idle for too long, SessionDamaged, StorageUnavailable or SessionElsewhere.
        """
        self._reading[session_id] += 1
        try:
            session = await self._newest(session_id, takes=takes)
            session.on_closed = partial(self._note_left, session_id)
            self.num_read += 1
            return session
        except SessionDamaged as error:
            if not error.was_given:
                raise SessionNotFound(session_id) from error
            self.num_damaged += 1
            raise
        finally:
            self._reading[session_id] -= 1
            if not self._reading[session_id]:
                del self._reading[session_id], self._num_left[session_id]
                self._deleted.discard(session_id)

    async def _newest(self, session_id: str, *, takes: bool) -> Session:
        """A session as its rows are, also if it was woken, went on and left memory again while it was read here. Raises
        as `read`."""
        find = self.store.take if takes else self.store.load
        while True:
            num_left = self._num_left[session_id]
            stored = await find(SessionId(session_id))
            if stored is None:
                raise SessionNotFound(session_id)
            session = await self._restored(stored)
            if session_id in self._deleted or session.is_expired(self._clock.monotonic()):
                raise SessionNotFound(session_id)
            if (ends := self._deleting.get(session_id)) is not None:  # which may be refused
                await ends[-1].wait()
                continue
            if takes and session.tail is not None:
                self.store.check_owned(session.tail)  # whoever goes on with it may be another by now
            if self._num_left[session_id] == num_left:
                return session

    def _note_left(self, session_id: str) -> None:
        if session_id in self._reading:
            self._num_left[session_id] += 1

    def note_trained(self, session_id: str, num_by_node: Mapping[int, int]) -> None:
        """Samples of a session were given out, to be reported when it is gone. The end of the process forgets it.

        As `Session.note_trained`, also for one outside of memory.
        """
        known = self._trained.setdefault(session_id, {})
        for node_id, num_tokens in num_by_node.items():
            known[node_id] = max(num_tokens, known.get(node_id, 0))

    def note_unkept(self, session_id: str, unkept: "Entry") -> None:
        """An entry of a session's account is not in the store: it is read with it. The end of the process forgets
        it."""
        self._unkept.setdefault(session_id, []).append(unkept)

    def mark_of(self, session_id: str) -> tuple[int, int, int]:
        """Another one after each note of `note_trained` with news, and of `note_unkept`."""
        known = self._trained.get(session_id, {})
        return len(known), sum(known.values()), len(self._unkept.get(session_id, ()))

    async def counted(self, session_id: str) -> Session | None:
        """A session as its rows are, for its account alone, also one that expired or is being deleted; None if it has
        gone. Raises SessionDamaged or StorageUnavailable."""
        stored = await self.store.load(SessionId(session_id))
        return None if stored is None else await self._restored(stored)

    async def delete(self, session_id: str, session: Session | None) -> bool:
        """Delete a session; whether there was one. Whoever is reading it finds it gone. What is left of it is its sums,
        none of a damaged one. Raises StorageUnavailable."""
        was_there = await self.store.delete(SessionId(session_id), _sums(session))
        self._forgotten(session_id)
        return was_there

    def discard(self, session: Session) -> None:
        """Delete a session without waiting for it."""
        self.store.discard(session.id, _sums(session))
        self._forgotten(session.id)

    async def remove(self, session_id: str, check: Callable[[Session], None]) -> Session | None:
        """Delete a session outside of memory: as it was, or None if it was damaged. Who reads it meanwhile waits.

        Raises SessionNotFound or StorageUnavailable, and as `check`, which refuses it.
        """
        end = asyncio.Event()
        self._deleting.setdefault(session_id, []).append(end)
        try:
            session: Session | None = None
            with suppress(SessionDamaged):
                stored = await self.store.load(SessionId(session_id))
                session = None if stored is None else await self._restored(stored)
            if session is not None:
                check(session)
            if not await self.delete(session_id, session):
                raise SessionNotFound(session_id)
            return session
        finally:
            end.set()
            self._deleting[session_id].remove(end)
            if not self._deleting[session_id]:
                del self._deleting[session_id]

    def _forgotten(self, session_id: str) -> None:
        self._trained.pop(session_id, None)
        self._unkept.pop(session_id, None)
        if session_id in self._reading:
            self._deleted.add(session_id)

    async def expired(self) -> Sequence[SessionId]:
        """Sessions idle for too long, as far as their rows tell. Raises StorageUnavailable."""
        return await self.store.expired(now=self._clock.wall(), limit=EXPIRED_AT_ONCE)

    async def page(self, *, limit: int, after: str | None) -> list[ListedSession]:
        """Sessions in the order of their creation. Raises SessionNotFound if there is no session `after`, and
        SessionDamaged or StorageUnavailable."""
        found = await self.store.page(limit=limit, after=None if after is None else SessionId(after))
        if not found and after is not None and await self.store.load(SessionId(after)) is None:
            raise SessionNotFound(after)
        is_busy = None if self.store.is_shared else False
        listed: list[ListedSession] = []
        num_bytes = 0
        for one in found:
            listed.append(replace(listed_session(one), is_busy=is_busy))
            num_bytes += LISTED_BYTES + len(one.opened.body)
            if num_bytes >= READ_AT_ONCE_BYTES:
                num_bytes = 0
                await asyncio.sleep(0)
        return listed

    async def backup(self, path: Path) -> int:
        """Write a copy of all durable data to a new file; its bytes. Raises OSError."""
        return await self.store.backup(path)

    async def _restored(self, stored: StoredSession) -> Session:
        num_bytes = sum(len(row.body) for row in stored.rows)
        now, wall = self._clock.monotonic(), self._clock.wall()

        def restored() -> Session:
            return restored_session(stored, matcher_of=self._matchers.get, model=self._model, now=now, wall=wall)

        session = await self._pool.run(restored, num_bytes=num_bytes)
        session.note_trained(self._trained.get(session.id, {}))
        for unkept in self._unkept.get(session.id, ()):
            entry("stenograph.session.stale:add_again")(session, unkept)
        return session


def _sums(session: Session | None) -> Sums:
    return NO_SUMS if session is None else cast("Sums", entry("stenograph.session.fates:last_sums")(session))


def restored_session(
    stored: StoredSession, *, matcher_of: MatcherOf, model: ModelMark | None, now: float, wall: float
) -> Session:
    """A session as it was when its last row was written. Touches nothing else: a worker may make it.

    `now` and `wall` are monotonic seconds and those of the epoch. A session made with another `model` can only be read;
    None: it is only read anyway. Raises SessionDamaged.
    """
    restored = restored_turns(stored, matcher_of)
    opened = restored.opened
    session = Session(
        stored.session_id,
        opened.options,
        created_at=opened.created_at,
        now=now - (max(0.0, wall - stored.at) if stored.idle_s is None else stored.idle_s),
        strands=restored.strands,
    )
    session.opened_by, session.outcome, session.tail = opened.request, restored.outcome, stored.tail()
    session.annotations, session.account = restored.annotations, restored.account
    if session.account is not None:
        session.held_until = now + session.account.held_until - wall
    if model is not None and opened.model.digest != model.digest:
        session.refusal = ModelMismatch(session.id, made_with=opened.model.name, served=model.name)
    if session.account is not None and session.account.abandoned is not None:
        session.refusal = entry("stenograph.session.stale:refusal_of")(session.account.abandoned)
    for commit, placed in restored.commits:
        session.keep_restored(commit, placed)
        for _, node in placed:
            untrack(node.tracked_parts)
    for row in restored.ledger:
        session.ledger.restore(row)
    return session
