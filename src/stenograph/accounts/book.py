"""The accounts of all sessions of a process: those in memory, those in the store alone, and the sums of ended ones."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from stenograph.core.errors import SessionNotFound
from stenograph.core.outcome import TokenFate
from stenograph.session.fates import ENDED, FateRow, SumKey, fate_rows, step_of
from stenograph.session.manager import SessionManager
from stenograph.session.selection import SessionFilter, selected
from stenograph.session.session import Session

MAX_REMEMBERED = 100_000
"""Remembered accounts of sessions outside of memory: about 300 bytes each."""

_KEY = msgspec.json.Decoder(SumKey)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFates:
    """The fates of a session's tokens. `session` None: of all ended sessions with this group and step."""

    session: str | None
    group: str | None
    step: int | None
    rows: Sequence[FateRow]


class AccountBook:
    """Reads accounts. A session outside of memory is read again once it has another row."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._remembered: dict[str, tuple[int, SessionFates]] = {}

    def __repr__(self) -> str:
        return f"<AccountBook of {self._manager!r}>"

    async def live(self, group: str | None = None) -> AsyncIterator[SessionFates]:
        """Those of all sessions there are, or of a group. Raises as `selected`."""
        async for one in selected(self._manager, SessionFilter(group=group)):
            if isinstance(one, Session):
                yield fates_of(one)
                continue
            known = self._remembered.get(one.id)
            if known is None or known[0] != one.last_seq:
                with suppress(SessionNotFound):  # it has gone meanwhile: its sums are there
                    known = one.last_seq, fates_of(await self._manager.sessions.peek(one.id))
            if known is not None:
                self._remember(one.id, known)
                yield known[1]

    def _remember(self, session_id: str, known: tuple[int, SessionFates]) -> None:
        self._remembered.pop(session_id, None)
        self._remembered[session_id] = known
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    async def ended(self, group: str | None = None) -> tuple[int, list[SessionFates]]:
        """The number of ended sessions, and their sums; those of a group alone, if it is given."""
        sessions, num = self._manager.sessions, 0
        sums = Counter(sessions.sums)
        if sessions.storage is not None:
            sums.update(await sessions.storage.store.sums())
        found: list[SessionFates] = []
        for written, num_tokens in sums.items():
            key = _KEY.decode(written)
            if group is not None and key.group != group:
                continue
            if key.fate is None:
                num += num_tokens if key.cause == ENDED else 0
                continue
            row = FateRow(fate=key.fate, cause=key.cause, num_tokens=num_tokens)
            found.append(SessionFates(session=None, group=key.group, step=key.step, rows=(row,)))
        return num, found


def fates_of(session: Session) -> SessionFates:
    """The fates of a session's tokens as they are now."""
    return SessionFates(
        session=session.id,
        group=session.options.stated.group,
        step=step_of(session),
        rows=tuple(fate_rows(session)),
    )


def num_tokens(rows: Sequence[FateRow]) -> Counter[TokenFate]:
    """Tokens by fate."""
    found = Counter[TokenFate]()
    for row in rows:
        found[row.fate] += row.num_tokens
    return found
