"""The life of a node as an owner: it joins, renews its lease in time, and lets go of everything when it cannot.

Owns the task of asking for the lease. Every answer from memory asks `held` first: a process stopped and
continued finds its lease over before any timer has told it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from stenograph.cluster.postgres.lease import OwnerLease
from stenograph.cluster.postgres.shared_rows import DatabaseAway, SharedRows
from stenograph.core.clock import Clock, Timer
from stenograph.core.errors import StorageUnavailable

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0

AWAY = (
    "The database of --store does not answer, so nothing can be kept and nobody knows who owns a session. What was"
    " acknowledged is safe; ask again."
)


class OwnerMemory(Protocol):
    """The number of a process's last owner; it outlives the process, ready for its next start."""

    @property
    def last(self) -> int | None:
        """The owner it was last; None if it was none."""
        ...

    def taken(self, owner: int) -> None:
        """It is this owner now."""
        ...


class SharedOwner:
    """This node among those on a shared database. `on_lost` is called when its sessions may be another's by now."""

    def __init__(
        self,
        rows: SharedRows,
        clock: Clock,
        *,
        name: str,
        lease_s: float,
        on_lost: Callable[[], None],
        memory: OwnerMemory | None = None,
    ) -> None:
        """`memory` knows this process's owner in its life before, and is told of each new one."""
        self._rows = rows
        self._clock = clock
        self.name = name
        self._memory = memory
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._lease: OwnerLease | None = None
        self._last_owner: int | None = None if memory is None else memory.last
        self._alarm: Timer | None = None
        self._is_closed = False
        self.joined = asyncio.Event()
        """Set once there was a lease."""
        self.num_lost = 0
        """Lost leases."""
        self.num_away = 0
        """Questions about the lease without an answer by the database."""

    def __repr__(self) -> str:
        return f"<SharedOwner {self._last_owner} at {self.name}, lease={self._lease}>"

    @property
    def is_held(self) -> bool:
        """Whether the lease runs, as far as a timer has told. May be read on any thread."""
        return self._lease is not None

    @property
    def retry_s(self) -> float:
        """The time until a client may ask again while there is no lease."""
        return max(1.0, min(self._lease_s, 5.0))

    def held(self) -> OwnerLease | None:
        """The lease, if it runs; an expired one is let go of here."""
        lease = self._lease
        if lease is not None and lease.is_over(self._clock.monotonic()):
            self._lose("it could not be renewed in time")
            return None
        return lease

    def needed(self) -> OwnerLease:
        """The lease. Raises StorageUnavailable if there is none."""
        if (lease := self.held()) is None:
            raise StorageUnavailable(AWAY, is_full=False, retry_after_s=self.retry_s)
        return lease

    async def live(self) -> None:
        """Join, and renew the lease until this is cancelled."""
        delay_s = FIRST_RETRY_S
        while True:
            sent_at = self._clock.monotonic()
            try:
                period_s = await self._ask(sent_at)
                delay_s = FIRST_RETRY_S
            except (DatabaseAway, StorageUnavailable) as error:
                self.num_away += 1
                is_first = delay_s == FIRST_RETRY_S
                log.log(logging.WARNING if is_first else logging.DEBUG, "the lease could not be asked for: %s", error)
                period_s, delay_s = delay_s, min(2 * delay_s, MAX_RETRY_S, self._lease_s / 3)
            await pause(self._clock, max(0.0, sent_at + period_s - self._clock.monotonic()))

    def give_up(self, lease: OwnerLease, why: str) -> None:
        """Let go of a lease, if it runs: nothing can be done with it."""
        if self.held() is lease:
            self._lose(why)

    async def leave(self) -> None:
        """End the lease: others may have the sessions at once."""
        self._is_closed = True
        lease = self.held()
        self._set_alarm(None)
        self._lease = None
        if lease is not None:
            try:
                await self._rows.leave(lease.owner)
            except (DatabaseAway, StorageUnavailable):
                log.warning("the lease could not be given back; it runs out by itself in %g s", self._lease_s)

    async def _ask(self, sent_at: float) -> float:
        """Ask for a lease, or for a longer one; the time until the next such question."""
        lease = self.held()
        if lease is None:
            owner = await self._rows.join(self.name, lease_s=self._lease_s, instead_of=self._last_owner)
            self._last_owner = owner
            if self._memory is not None:
                self._memory.taken(owner)
            lease = OwnerLease.granted(owner, lease_s=self._lease_s, sent_at=sent_at)
            self._lease = lease
            self.joined.set()
            log.info("this process is owner %d of the sessions it serves, at %s", owner, self.name)
        elif await self._rows.renew(lease.owner, lease_s=self._lease_s):
            lease.renewed(sent_at=sent_at)
        elif self._lease is lease:
            self._lose("the database had let it run out")
            return 0.0
        if self._lease is lease:
            self._set_alarm(lease)
        return lease.renewal_period_s

    def _set_alarm(self, lease: OwnerLease | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if lease is not None:
            remaining_s = lease.remaining_s(self._clock.monotonic())
            self._alarm = self._clock.call_later(remaining_s, self._look)

    def _look(self) -> None:
        """The time of a lease should be over."""
        if (lease := self.held()) is not None:
            self._set_alarm(lease)

    def _lose(self, why: str) -> None:
        self._lease = None
        self._set_alarm(None)
        self.num_lost += 1
        if not self._is_closed:
            log.warning("the lease of owner %s is lost: %s. Its sessions leave memory", self._last_owner, why)
        self._on_lost()


async def pause(clock: Clock, delay_s: float) -> None:
    """Wait, by a clock."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_later(delay_s, lambda: None if future.done() else future.set_result(None))
    try:
        await future
    finally:
        timer.cancel()
