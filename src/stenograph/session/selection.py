"""Selects sessions by their trainer's knowledge of them: group, state, metadata. Owns no session."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from stenograph.core.errors import SessionNotFound
from stenograph.core.stated_options import TAG
from stenograph.session.manager import SessionManager
from stenograph.session.session import Session
from stenograph.session.storage import Listed

_AT_ONCE = 100
"""Number of sessions looked at in one event-loop iteration."""


class SessionState(StrEnum):
    """States for selecting sessions: one of the first two, and one of the others."""

    BUSY = "busy"
    """A turn runs."""
    IDLE = "idle"
    """No turn runs."""
    OPEN = "open"
    """Nobody has said its outcome."""
    ENDED = "ended"
    """Its outcome is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Conditions on a session; all have to hold, and None is no condition. `tag`: it is of the tenant with this tag.

    `metadata`: each key has the value. `texts`: each key has this text as its value, or a value written so in JSON.
    """

    group: str | None = None
    state: SessionState | None = None
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    tag: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether every session passes, or every one of the tenant."""
        return self.group is None and self.state is None and not self.metadata and not self.texts

    def passes(self, session: Listed) -> bool:
        """Whether a session fulfils the conditions."""
        metadata = session.options.metadata
        is_others = self.tag and session.id[TAG] != self.tag
        if is_others or (self.group is not None and session.options.stated.group != self.group):
            return False
        if any(key not in metadata or metadata[key] != value for key, value in self.metadata.items()):
            return False
        if any(key not in metadata or not _reads(metadata[key], text) for key, text in self.texts.items()):
            return False
        is_busy = isinstance(session, Session) and session.is_busy
        match self.state:
            case SessionState.BUSY | SessionState.IDLE:
                return is_busy is (self.state is SessionState.BUSY)
            case SessionState.OPEN | SessionState.ENDED:
                return (session.outcome is None) is (self.state is SessionState.OPEN)
            case None:
                return True


def _reads(value: object, text: str) -> bool:
    return value == text if isinstance(value, str) else msgspec.json.encode(value) == text.encode("utf-8", "replace")


async def selected(
    manager: SessionManager, wanted: SessionFilter, *, after: str | None = None
) -> AsyncIterator[Listed]:
    """The matching sessions, in the order of their creation, those after the id `after`; one in the store alone is not
    woken. Between some of them the loop serves others, and sessions may come and go.

    Raises SessionNotFound if there is no session `after`, SessionDamaged or StorageUnavailable.
    """
    cursors = [after]
    while page := await _page(manager, cursors):
        cursors = [after, *(one.id for one in page)]
        for session in page:
            if wanted.passes(session):
                yield session
        await asyncio.sleep(0)


async def _page(manager: SessionManager, cursors: list[str | None]) -> list[Listed]:
    """The page after the last of the ids still there; the first one was there when all began."""
    for cursor in reversed(cursors):
        try:
            return await manager.sessions.page_kept(limit=_AT_ONCE, after=cursor)
        except SessionNotFound:
            if cursor is cursors[0]:
                raise
    return []
