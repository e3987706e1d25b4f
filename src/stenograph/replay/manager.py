"""A manager for sessions lived again: a recorded request gets its reply, and runs no turn."""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, TurnRequest
from stenograph.core.errors import HistoryMismatch, SessionDamaged, SessionNotFound
from stenograph.core.types import SessionId
from stenograph.replay.watch import PacedWatch
from stenograph.session.admission import Admission, Caller
from stenograph.session.kept import StoredReply
from stenograph.session.manager import NOBODY, SessionManager
from stenograph.session.recorded import Recorded, RecordedSession
from stenograph.session.session import Session
from stenograph.session.storage import SessionStorage, restored_session
from stenograph.session.watch import Watch
from stenograph.store.base import SessionStore, StoredSession
from stenograph.store.restored import restored_turns

log = logging.getLogger(__name__)


class ReplayStorage(SessionStorage):
    """A store opened for reading. A woken session begins anew, and goes on in memory alone; once it has left memory,
    also by its deletion, it can begin once more."""

    def __init__(self, store: SessionStore, *, ignored: Sequence[re.Pattern[str]], **options: Any) -> None:
        """Parts of messages that are `ignored` are alike. The other options are a storage's."""
        super().__init__(store, **options)
        self._ignored = ignored
        self.scripts: WeakKeyDictionary[Session, RecordedSession] = WeakKeyDictionary()
        """Those of the woken sessions: each has its own, also of two woken at once under one id."""

    async def create(self, session: Session) -> None:
        """A new session is in memory alone."""

    async def read(self, session_id: str, *, takes: bool = True) -> Session:
        stored = await self.store.load(SessionId(session_id))
        if stored is None:
            raise SessionNotFound(session_id)
        num_bytes = sum(len(row.body) for row in stored.rows)
        try:
            session, script = await self._pool.run(lambda: self._begun(stored, takes=takes), num_bytes=num_bytes)
        except SessionDamaged:
            self.num_damaged += 1
            raise
        if script is not None:
            self.scripts[session] = script
        self.num_read += 1
        return session

    def _begun(self, stored: StoredSession, *, takes: bool) -> tuple[Session, RecordedSession | None]:
        """A session before its first turn, with its script; where it is not taken, as it was recorded. Raises
        SessionDamaged."""
        rows = stored.rows[:1] if takes else stored.rows
        session = restored_session(
            replace(stored, rows=rows),
            matcher_of=self._matchers.get,
            model=self._model,
            now=self._clock.monotonic(),
            wall=stored.at,
        )
        session.tail = None
        if not takes:
            return session, None
        restored = restored_turns(stored, self._matchers.get)
        session.strands.recall(restored.nodes.values())
        script = RecordedSession(restored.commits, session.options.matcher, self._ignored, refusal=session.refusal)
        session.refusal = None
        return session, script

    async def delete(self, session_id: str, session: Session | None) -> bool:
        return await self.store.load(SessionId(session_id)) is not None

    def discard(self, session: Session) -> None:
        """Nothing is deleted."""

    async def remove(self, session_id: str, check: Callable[[Session], None]) -> Session | None:
        """Nothing is deleted, so a claim in the record keeps nobody."""
        with suppress(SessionDamaged):
            return await self.read(session_id, takes=False)
        return None

    async def expired(self) -> "tuple[SessionId, ...]":
        return ()


class ReplayManager(SessionManager):
    """Answers requests of recorded sessions from their records; the others are the engine's."""

    def __init__(self, *, is_paced: bool, is_strict: bool, **options: Any) -> None:
        """`is_paced`: replies come at their recorded pace. `is_strict`: a request unlike the recorded ones is refused.
        The other options are a manager's."""
        super().__init__(**options)
        self._is_paced, self._is_strict = is_paced, is_strict

    def begin(self, admission: Admission, decoded: tuple[TurnRequest, bytes], caller: Caller = NOBODY) -> Watch:
        session, storage = admission.session, self.sessions.storage
        assert isinstance(storage, ReplayStorage), "the store of a replay"
        script = None if session is None else storage.scripts.get(session)
        if session is None or script is None:
            return super().begin(admission, decoded, caller)
        request = self.as_sent(decoded[0], session, self._services.kind_rules.agent_id(caller.headers))
        found = script.find(request, admission.identity)
        if found is not None:
            log.debug("session %s: turn %d from the record", session.id, found.node.id)
            reply = script.live_to(found, session.strands, admission.identity)
            return self._given(session, reply, found, decoded[0])
        if not script.has_parted:
            where = script.difference(request)
            log.warning("session %s differs from its record: %s", session.id, where)
            if self._is_strict:
                is_chat = isinstance(request, ChatRequest)
                blame = Blame(RequestPart.MESSAGES if is_chat else RequestPart.PROMPT)
                raise HistoryMismatch(f"This session was recorded otherwise: {where}.", blame=blame)
        if script.refusal is not None:
            raise script.refusal
        watch = super().begin(admission, decoded, caller)
        script.has_parted = True
        return watch

    def _given(self, session: Session, reply: StoredReply, found: Recorded, request: TurnRequest) -> Watch:
        """A client of a recorded reply."""
        turn = found.node.turn
        session.last_chat = self._clock.monotonic()
        self.sessions.chatted(session)
        capabilities = self._services.engine.capabilities
        watch = reply.watch(request, replace(capabilities, model=turn.policy or capabilities.model))
        return PacedWatch(watch.kept, turn.stages) if self._is_paced else watch
