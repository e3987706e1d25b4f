"""The accounts of all sessions of a process: those in memory, those in the store alone, and the sums of ended ones."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from stenograph.core.errors import SessionDamaged, SessionNotFound
from stenograph.core.outcome import TokenFate
from stenograph.core.stated_options import tag_of
from stenograph.session.fates import ENDED, FateRow, SumKey, fate_rows, step_of
from stenograph.session.manager import SessionManager
from stenograph.session.selection import SessionFilter, selected
from stenograph.session.session import Session
from stenograph.store.restored import ListedSession

MAX_REMEMBERED = 100_000
"""Remembered accounts of sessions outside of memory: about 300 bytes each."""

_KEY = msgspec.json.Decoder(SumKey)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFates:
    """The fates of a session's tokens. `session` None: of all ended sessions with this group, step and tenant."""

    session: str | None
    group: str | None
    step: int | None
    tenant: str | None
    rows: Sequence[FateRow]


class AccountBook:
    """Reads accounts. A session outside of memory is read again once it has another row, or samples were given out."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._remembered: dict[str, tuple[object, SessionFates]] = {}

    def __repr__(self) -> str:
        return f"<AccountBook of {self._manager!r}>"

    async def live(
        self, group: str | None = None, *, tag: str = "", by_turn: bool = False
    ) -> AsyncIterator[SessionFates]:
        """Those of all sessions there are, or of a group, or a tenant's by its tag, but for damaged ones. Not
        `by_turn`: those outside of memory have one row for a fate and cause. Raises as `selected`."""
        async for one in selected(self._manager, SessionFilter(group=group, tag=tag)):
            if isinstance(one, Session):
                yield fates_of(one)
            elif (kept := await self._kept(one, by_turn=by_turn)) is not None:
                yield kept

    async def _kept(self, one: ListedSession, *, by_turn: bool) -> SessionFates | None:
        """Those of a session outside of memory; None if it has gone meanwhile, or is damaged."""
        sessions = self._manager.sessions
        mark = one.last_seq, None if sessions.storage is None else sessions.storage.mark_of(one.id)
        known = self._remembered.pop(one.id, None)
        if by_turn or known is None or known[0] != mark:
            try:
                found = fates_of(await sessions.peek(one.id))
            except (SessionNotFound, SessionDamaged):
                return None
            if by_turn:
                return found
            known = mark, _by_cause(found)
        self._remembered[one.id] = known
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return known[1]

    async def ended(self, group: str | None = None, *, tag: str = "") -> tuple[int, list[SessionFates]]:
        """The number of ended sessions, and their sums; those of a group, or of the tenant with a tag, alone, if it is
        given."""
        sessions, num = self._manager.sessions, 0
        sums = Counter(sessions.sums)
        if sessions.storage is not None:
            sums.update(await sessions.storage.store.sums())
        found: list[SessionFates] = []
        for written, num_tokens in sums.items():
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
