"""The accounts of all sessions of a process: those in memory, those in the store alone, and the sums of ended ones."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from stenograph.core.errors import SessionDamaged, SessionNotFound
from stenograph.core.outcome import TokenFate
from stenograph.core.stated_options import tag_of
from stenograph.session.fates import ENDED, FateRow, SumKey, fate_rows, step_of
from stenograph.session.manager import SessionManager
from stenograph.session.selection import SessionFilter
from stenograph.session.session import Session
from stenograph.session.storage import Listed, SessionStorage
from stenograph.store.base import NO_SUMS
from stenograph.store.restored import ListedSession

MAX_REMEMBERED = 100_000
"""Remembered accounts of sessions outside of memory: about 300 bytes each."""

_AT_ONCE, _KEYS_AT_ONCE = 100, 1000
"""Sessions looked at, and keys of sums decoded, in one event-loop iteration."""

_KEY = msgspec.json.Decoder(SumKey)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFates:
    """The fates of a session's tokens. `session` None: of all ended sessions with this group, step and tenant."""

    session: str | None
    group: str | None
    step: int | None
    tenant: str | None
    rows: Sequence[FateRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllFates:
    """All accounts at one moment: those of sessions there are, and the sums of `num_ended` that ended."""

    live: Sequence[SessionFates]
    ended: Sequence[SessionFates]
    num_ended: int


class AccountBook:
    """Reads accounts. A session outside of memory is read again once it has another row, or samples were given out."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._remembered: dict[str, tuple[object, SessionFates]] = {}

    def __repr__(self) -> str:
        return f"<AccountBook of {self._manager!r}>"

    async def read(self, group: str | None = None, *, tag: str = "", by_turn: bool = False) -> AllFates:
        """The accounts of all sessions, or of a group, or a tenant's by its tag, but for damaged ones. Not `by_turn`:
        those outside of memory have one row for a fate and cause. Raises StorageUnavailable.

        A session may end while others are read. It counts once: by the sums, if they have it when they are read, last
        of all; else as it was read. Tokens sampled meanwhile may be missing.
        """
        sessions = self._manager.sessions
        found, wanted = dict[str, SessionFates](), SessionFilter(group=group, tag=tag)
        async for one in self._all():
            if wanted.passes(one):
                fates = fates_of(one) if isinstance(one, Session) else await self._kept(one, by_turn=by_turn)
                if fates is not None:
                    found[one.id] = fates
        sums, there = (NO_SUMS, None) if sessions.storage is None else await sessions.storage.store.ended()
        is_there = sessions.__contains__ if there is None else there.__contains__
        live = [fates for id_, fates in found.items() if is_there(id_)]
        num, ended = await _ended(Counter(sessions.sums) + Counter(sums), group, tag)
        return AllFates(live=live, ended=ended, num_ended=num)

    async def _all(self) -> AsyncGenerator[Listed, None]:
        """All sessions, also those that expired or are being deleted: their tokens are not among the sums yet."""
        sessions = self._manager.sessions
        if (storage := sessions.storage) is None:
            for num, id_ in enumerate([*sessions]):
                if (session := sessions.held(id_)) is not None:
                    yield session
                if num % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            return
        cursors = list[str | None]([None])
        while page := await _page_after(storage, cursors):
            cursors = [None, *(one.id for one in page)]
            for one in page:
                yield sessions.held(one.id) or one
            await asyncio.sleep(0)

    async def _kept(self, one: ListedSession, *, by_turn: bool) -> SessionFates | None:
        """Those of a session outside of memory; None if it has gone meanwhile, or is damaged."""
        storage = self._manager.sessions.storage
        assert storage is not None, "it is in a store"
        mark = one.last_seq, storage.mark_of(one.id)
        known = self._remembered.pop(one.id, None)
        if by_turn or known is None or known[0] != mark:
            try:
                session = await storage.counted(one.id)
            except SessionDamaged:
                return None
            if session is None:
                return None
            found = fates_of(session)
            if by_turn:
                return found
            known = mark, _by_cause(found)
        self._remembered[one.id] = known
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return known[1]


async def _page_after(storage: SessionStorage, cursors: Sequence[str | None]) -> Sequence[ListedSession]:
    """The page after the last of the ids still there."""
    for cursor in reversed(cursors):
        with suppress(SessionNotFound):
            return await storage.page(limit=_AT_ONCE, after=cursor)
    return ()


async def _ended(sums: Mapping[str, int], group: str | None, tag: str) -> tuple[int, list[SessionFates]]:
    """The number of ended sessions, and their sums; those of a group, or of the tenant with a tag, alone, if it is
    given."""
    num, found = 0, list[SessionFates]()
    for at, (written, num_tokens) in enumerate(sums.items(), start=1):
        if at % _KEYS_AT_ONCE == 0:
            await asyncio.sleep(0)
        key = _KEY.decode(written)
        if group is not None and key.group != group:
            continue
        if tag and (key.tenant is None or tag_of(key.tenant) != tag):
            continue
        if key.fate is None:
            num += num_tokens if key.cause == ENDED else 0
            continue
        row = FateRow(fate=key.fate, cause=key.cause, num_tokens=num_tokens)
        found.append(SessionFates(session=None, group=key.group, step=key.step, tenant=key.tenant, rows=(row,)))
    return num, found


def fates_of(session: Session) -> SessionFates:
    """The fates of a session's tokens as they are now."""
    return SessionFates(
        session=session.id,
        group=session.options.stated.group,
        step=step_of(session),
        tenant=session.options.tenant,
        rows=tuple(fate_rows(session)),
    )


def _by_cause(one: SessionFates) -> SessionFates:
    """The same without turns: as small for a long session as for a short one."""
    sums = Counter[tuple[TokenFate, str]]()
    for row in one.rows:
        sums[row.fate, row.cause] += row.num_tokens
    rows = tuple(FateRow(fate=fate, cause=cause, num_tokens=num) for (fate, cause), num in sums.items())
    return replace(one, rows=rows)


def num_tokens(rows: Sequence[FateRow]) -> Counter[TokenFate]:
    """Tokens by fate."""
    found = Counter[TokenFate]()
    for row in rows:
        found[row.fate] += row.num_tokens
    return found
