"""The sessions that exist, in memory and in the store: opened, found, read, listed, evicted, expired, forgotten.

Owns the table of those in memory and the count of their tokens. Knows no turn: those running on a session, and their
ends, are the manager's. All state changes are synchronous.
"""

import itertools
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress

from stenograph.core.clock import Clock
from stenograph.core.errors import (
    Draining,
    Limit,
    LimitExceeded,
    SessionElsewhere,
    SessionNotFound,
    StorageUnavailable,
)
from stenograph.core.loaded import entry
from stenograph.core.stated_options import TAG, tag_of
from stenograph.core.telemetry import NoTelemetry, SessionEnd, SessionReport, Telemetry
from stenograph.core.types import SessionId
from stenograph.session.admission import Capacity, Limits
from stenograph.session.journal import STOPPED, log_session_end, session_report
from stenograph.session.peeked import PeekedSessions
from stenograph.session.session import Session
from stenograph.session.storage import FORGOTTEN_TURNS, Listed, SessionStorage
from stenograph.store.restored import ListedSession
from stenograph.trajectory.commits import RequestMark, SessionOptions

Begin = Callable[[Session], Awaitable[None]] | None
FILE_DIGITS = "00"
"""The beginning of the ids of sessions in the store, and the name of their file, where the server has one process."""


def _ignore(_: SessionId) -> None:
    return


class Sessions:
    """All sessions of this process."""

    def __init__(
        self,
        *,
        clock: Clock,
        limits: Limits,
        telemetry: Telemetry | None = None,
        storage: SessionStorage | None = None,
        capacity: Capacity | None = None,
        digits: str | None = None,
        on_gone: Callable[[SessionId], None] = _ignore,
    ) -> None:
        """`digits` begin the ids of new sessions, `capacity` is shared with others; both where there are several
        processes. `on_gone` is called with the id of each deleted or expired session."""
        self._clock = clock
        self.capacity = capacity or Capacity(limits, evicts=storage is not None)
        self._digits = digits or ("" if storage is None else FILE_DIGITS)
        self._telemetry = telemetry or NoTelemetry()
        self._on_gone = on_gone
        self.storage = storage
        """The sessions on disk; None if there are none but in memory."""
        self._sessions: dict[SessionId, Session] = {}
        self._recent: OrderedDict[SessionId, None] = OrderedDict()
        """Where there is a store, the same sessions: the one idle longest first."""
        self.may_open: Callable[[str], Awaitable[None]] | None = None
        """Raises LimitExceeded if a tenant may not open one more, where there are tenants."""
        self._peeked = PeekedSessions(clock)
        self.num_forgotten = 0
        """Sessions gone from memory."""
        self.sums = Counter[str]()
        """The tokens that ended in this process and are in no store: of sessions in memory alone, and stateless."""
        self.num_evicted = 0
        """Those of them still in the store."""

    def __repr__(self) -> str:
        return f"<Sessions {len(self._sessions)} in memory>"

    def __contains__(self, session_id: str) -> bool:
        """Whether a session is in memory, even while it is being deleted."""
        return session_id in self._sessions

    def __iter__(self) -> Iterator[SessionId]:
        return iter(self._sessions)

    @property
    def clock(self) -> Clock:
        """The clock of its turns."""
        return self._clock

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self.capacity.is_draining

    @property
    def num_held_tokens(self) -> int:
        """Tokens of all sessions."""
        return self.capacity.num_held_tokens

    @property
    def num_sessions(self) -> int:
        """Sessions held now, including those being deleted."""
        return len(self._sessions)

    def create(self, options: SessionOptions) -> Session:
        """Open a session in memory. Raises LimitExceeded or Draining."""
        session = self._opened(options)
        self._hold(session)
        return session

    async def open(self, options: SessionOptions, opened_by: RequestMark | None = None, begin: Begin = None) -> Session:
        """Open a session, also in a store; `begin` gives turns. Raises LimitExceeded, Draining, StorageUnavailable."""
        if self.may_open is not None and options.tenant is not None:
            await self.may_open(options.tenant)
        session = self._opened(options)
        session.opened_by = opened_by
        if self.storage is not None:
            await self.storage.create(session)
        if begin is not None:
            await begin(session)
        # Another node may have found it by its key, and a turn have come here, before its creation was answered.
        if session.id not in self._sessions:
            self._hold(session)
        return self._sessions[session.id]

    def _opened(self, options: SessionOptions) -> Session:
        if self.capacity.is_draining:
            raise Draining("the server is shutting down and opens no sessions", retry_after_s=5.0)
        self._make_room()
        id_ = self._digits + uuid.uuid4().hex[len(self._digits) :]
        if options.tenant is not None:
            id_ = id_[: TAG.start] + tag_of(options.tenant) + id_[TAG.stop :]
        return Session(SessionId(id_), options, created_at=self._clock.wall(), now=self._clock.monotonic())

    def _hold(self, session: Session) -> None:
        self._peeked.drop(session.id)
        self._sessions[session.id] = session
        self.capacity.num_sessions = len(self._sessions)
        if self.storage is not None:
            self._recent[session.id] = None
        self.count_tokens(session)

    def _make_room(self) -> None:
        """Make sure that one more session may be in memory. Raises LimitExceeded."""
        most = self.capacity.limits.max_sessions
        room = most - self.capacity.elsewhere.num_sessions
        if len(self._sessions) >= room:
            self.expire()
            self.evict(1 + len(self._sessions) - room, 0)
        if len(self._sessions) >= room:
            raise LimitExceeded(
                Limit.SESSIONS,
                f"the server holds its {most} sessions (--max-sessions); delete one first",
                retry_after_s=5.0,
            )

    def give_way(self) -> None:
        """Let go of idle sessions whose room another process wants for its own, and of those only peeked at."""
        self._peeked.expire()
        self.evict(self.capacity.num_sessions_lent, self.capacity.num_tokens_lent)

    def evict(self, num_sessions: int, num_tokens: int) -> None:
        """Let go of sessions that nobody works on and the store has, the longest idle first, until so many sessions and
        so many tokens are gone."""
        if self.storage is None or (num_sessions <= 0 and num_tokens <= 0):
            return
        chosen: list[Session] = []
        for session_id in self._recent:
            if num_sessions <= 0 and num_tokens <= 0:
                break
            session = self._sessions[session_id]
            if session.is_idle and session.tail is not None:
                num_sessions, num_tokens = num_sessions - 1, num_tokens - session.num_counted_tokens
                chosen.append(session)
        for session in chosen:
            self._drop(session)
        self.num_evicted += len(chosen)

    async def wake(self, session_id: str) -> Session:
        """The live session with the id, read from the store if it is not in memory.

        Raises SessionNotFound, SessionDamaged, StorageUnavailable, SessionElsewhere, or LimitExceeded if no more may be
        in memory.
        """
        if self.storage is None or session_id in self._sessions:
            return self.get(session_id)
        session = await self.storage.read(session_id)
        if session_id in self._sessions:  # another request was quicker
            return self.get(session_id)
        self._make_room()
        self._hold(session)
        return session

    async def peek(self, session_id: str) -> Session:
        """A session to be read: the live one, or the store's copy without waking it. Raises as `wake`."""
        if self.storage is None or session_id in self._sessions:
            return self.get(session_id)
        return await self.storage.read(session_id, takes=False)

    async def look_again(self, session_id: str) -> Session:
        """As `look`, for a person going through page after page: the store's copy may be a moment old."""
        if self.storage is None or session_id in self._sessions:
            return self.get(session_id)
        return await self._peeked.read(self.storage, session_id)

    def get(self, session_id: str) -> Session:
        """The live session with the id. Raises SessionNotFound, also for one being deleted or expired."""
        session = self._sessions.get(SessionId(session_id))
        if session is None or session.is_closing:
            raise SessionNotFound(session_id)
        if session.options.ttl_s is not None and session.is_expired(self._clock.monotonic()):
            self._drop_expired(session)
            raise SessionNotFound(session_id)
        return session

    def held(self, session_id: str) -> Session | None:
        """A session in memory, also one that expired or is being deleted."""
        return self._sessions.get(SessionId(session_id))

    def has(self, session_id: str) -> bool:
        """Whether there is a live session with the id."""
        session = self._sessions.get(SessionId(session_id))
        return not (session is None or session.is_closing or session.is_expired(self._clock.monotonic()))

    def note_trained(self, session: Session, num_by_node: Mapping[int, int]) -> None:
        """Samples of a session were given out, perhaps of one only peeked at: as `Session.note_trained`. Later
        turns are still to be given out."""
        if (last := session.latest) is not None:
            num_by_node = {last.id: 0, **num_by_node}
        self._sessions.get(session.id, session).note_trained(num_by_node)
        if self.storage is not None:
            self.storage.note_trained(session.id, num_by_node)

    def page(self, *, limit: int, after: str | None) -> list[Session]:
        """Up to `limit` live sessions in order of creation, those after the id `after`.

        Raises SessionNotFound if there is no session `after`.
        """
        self.expire()
        ids = iter(self._sessions)
        if after is not None:
            self.get(after)
            ids = itertools.dropwhile(lambda id_: id_ != after, ids)
            next(ids)
        return [self._sessions[id_] for id_ in itertools.islice(filter(self.has, ids), limit)]

    def expire(self) -> int:
        """Drop sessions past their idle limit, until those had FORGOTTEN_TURNS; returns how many were dropped. The
        others cannot be found any more and go with the next calls."""
        now, num_turns = self._clock.monotonic(), 0
        expired = [session for session in self._sessions.values() if session.is_expired(now)]
        for num_dropped, session in enumerate(expired):
            if num_turns >= FORGOTTEN_TURNS:
                return num_dropped
            num_turns += 1 + session.strands.num_turns
            self._drop_expired(session)
        return len(expired)

    async def page_kept(self, *, limit: int, after: str | None) -> list[Listed]:
        """As `page`, with those in the store; one in memory is the live one."""
        if self.storage is None:
            return [*self.page(limit=limit, after=after)]
        self.expire()
        found = await self.storage.page(limit=limit, after=after)
        shown = [self._sessions.get(one.id, one) for one in found]
        return [one for one in shown if isinstance(one, ListedSession) or self.has(one.id)]

    async def expire_kept(self) -> None:
        """Delete sessions in the store past their idle limit."""
        if self.storage is None or self.storage.store.failure is not None:
            return
        for session_id in await self.storage.expired():
            if session_id not in self._sessions:
                with suppress(SessionNotFound, SessionElsewhere):  # somebody has deleted it meanwhile, or taken it
                    await self.remove(session_id, SessionEnd.EXPIRED)

    def let_go(self, session_id: SessionId, why: StorageUnavailable) -> Session | None:
        """Let go of a session, perhaps another process's by now; requests still working on it are refused by `why`."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.refusal = why
            self._drop(session)
        return session

    def log_stopped(self) -> None:
        """Log the end of each session at the end of the process."""
        now = self._clock.wall()
        for session in self._sessions.values():
            log_session_end(
                session,
                STOPPED,
                age_s=now - session.created_at,
                fates=entry("stenograph.session.fates:num_by_fate")(session),
            )

    def _drop_expired(self, session: Session) -> None:
        session.refuse_new()
        if self.storage is not None and session.tail is not None:
            self.storage.discard(session)
        self.forget(session, SessionEnd.EXPIRED)

    def chatted(self, session: Session) -> None:
        """A request on a session has ended: count its tokens, and evict it after those without one for longer."""
        self.count_tokens(session)
        if session.id in self._recent and self._sessions.get(session.id) is session:
            self._recent.move_to_end(session.id)

    def forget(self, session: Session, end: SessionEnd) -> None:
        """Let go of a session for good. Harmless when repeated."""
        if session.id in self._sessions:
            self._drop(session)
            self._tell_gone(session, end)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.id]
        self._recent.pop(session.id, None)
        self.capacity.num_sessions = len(self._sessions)
        self.count_tokens(session)
        session.close()
        self.num_forgotten += 1

    async def remove(self, session_id: str, end: SessionEnd, *, force: bool = False) -> None:
        """Delete a session found in the store alone. Raises SessionNotFound, also where its time is not over,
        SessionClaimed unless forced, or StorageUnavailable."""
        assert self.storage is not None, "there is a store"
        self._peeked.drop(session_id)

        def check(session: Session) -> None:
            now = self._clock.monotonic()
            if end is SessionEnd.EXPIRED and not session.is_expired(now):  # a claim's lease came after its turns
                raise SessionNotFound(session_id)
            if not force:
                session.check_unclaimed(now)

        session = await self.storage.remove(session_id, check)
        self._peeked.drop(session_id)  # it may have been read before it was gone
        if session is None:  # damaged: nobody knows what it had
            self._telemetry.session_ended(SessionReport(end=end))
        else:
            self._tell_gone(session, end)

    def _tell_gone(self, session: Session, end: SessionEnd) -> None:
        self._on_gone(session.id)
        if self.storage is None or session.tail is None:  # else the store has them
            self.sums.update(entry("stenograph.session.fates:last_sums")(session))
        report = session_report(session, end)
        log_session_end(session, end, age_s=self._clock.wall() - session.created_at, fates=report.num_tokens)
        self._telemetry.session_ended(report)

    def count_tokens(self, session: Session) -> None:
        """Count a session's tokens and scores anew: none once it is out of memory."""
        num_tokens = 0
        if self._sessions.get(session.id) is session:
            num_tokens = session.strands.num_tokens + sum(one.num_held for one in session.annotations.values())
        self.capacity.num_held_tokens += num_tokens - session.num_counted_tokens
        session.num_counted_tokens = num_tokens
