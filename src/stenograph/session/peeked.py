"""Sessions read from the store and not woken, kept for a moment: a person reads many pages of one.

Any change to a session in this process drops it here. Another process sharing the store may go on with it: then the
kept copy lags behind by a few seconds, so it is only for showing to a person.
"""

from dataclasses import dataclass

from stenograph.core.clock import Clock
from stenograph.offload.kept_values import KeptValues
from stenograph.session.session import Session
from stenograph.session.storage import SessionStorage

KEPT_S = 10.0
"""Time for which a session is kept after it was read."""
KEPT_TOKENS = 2_000_000
"""Maximum of tokens kept in all, about 50 MB; a session counts as a thousand at least."""
_LEAST_TOKENS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeekedSession:
    """A session as it was at `at_s` on the clock."""

    session: Session
    at_s: float


def _num_tokens(peeked: _PeekedSession) -> int:
    return max(peeked.session.strands.num_tokens, _LEAST_TOKENS)


class PeekedSessions:
    """The sessions of a process peeked at last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: KeptValues[str, _PeekedSession] = KeptValues(most=KEPT_TOKENS, weigh=_num_tokens)

    def __repr__(self) -> str:
        return f"<PeekedSessions {self._kept!r}>"

    async def read(self, storage: SessionStorage, session_id: str) -> Session:
        """A session outside of memory, read once for all requests within a moment. Raises as the storage does."""

        async def peeked() -> _PeekedSession:
            return _PeekedSession(at_s=self._clock.monotonic(), session=await storage.read(session_id, takes=False))

        found = self._kept.find(session_id)
        if found is not None and self._is_over(found):
            self._kept.drop(session_id)
        return (await self._kept.get(session_id, peeked)).session

    def drop(self, session_id: str) -> None:
        """Forget a changing session."""
        self._kept.drop(session_id)

    def expire(self) -> None:
        """Forget sessions not read for a moment."""
        self._kept.drop_where(self._is_over)

    def _is_over(self, peeked: _PeekedSession) -> bool:
        now_s = self._clock.monotonic()
        return now_s - peeked.at_s >= KEPT_S or peeked.session.is_expired(now_s)
