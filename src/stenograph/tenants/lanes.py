"""The quotas of tenants, and their fair shares of the turns in flight.

Without a free place a request waits in its tenant's line, as long as a turn may take. Places go by deficit round robin;
a tenant's turn costs the tokens of its last ones. The counts are of the whole server, also of several workers.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from stenograph.core.clock import Clock
from stenograph.core.errors import Draining, Limit, LimitExceeded
from stenograph.core.stated_options import tag_of
from stenograph.http.wire import ClientGone, ClientLink
from stenograph.session.admission import Capacity
from stenograph.tenants.counts import IN_FLIGHT, SAMPLED, SESSIONS, STORED, TenantCounts
from stenograph.tenants.fair_queue import FairQueue
from stenograph.tenants.tenant import Tenant

POLL_S = 0.05
"""Between two looks for places given back by other workers."""
STORED_FRESH_S, STORED_PAUSES = 10.0, 50
"""A count of stored tokens and sessions holds so long, and so many times as long as it took."""
RESERVE = 16
"""One in so many places is kept for tenants below their share, while another is above its own."""
ACTIVE_S = 60.0
"""A tenant counts for shares so long after its last request."""
_FIRST_COST, _SMOOTH = 100.0, 0.2
"""The cost of a tenant's first turn, and the weight of each turn in the cost of the next."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One tenant. `level` is the part of its tokens a minute left at `at`, of `num_seen` in all."""

    tenant: Tenant
    tag: str
    level: float
    at: float
    num_seen: int = 0
    cost: float = _FIRST_COST
    active_until: float = 0.0
    stored_until: float = -1.0
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Lanes:
    """The lanes of one process. `stored` counts a tenant's stored tokens and sessions in this process, by its tag."""

    def __init__(
        self,
        capacity: Capacity,
        counts: TenantCounts,
        clock: Clock,
        *,
        timeout_s: float,
        stored: Callable[[str], Awaitable[tuple[int, int]]],
        is_shared: bool,
        has_others: bool,
    ) -> None:
        """`is_shared`: `stored` counts those of all processes."""
        self._capacity = capacity
        self._counts = counts
        self._clock = clock
        self._timeout_s = timeout_s
        self._stored, self._is_shared = stored, is_shared
        self._has_others = has_others
        self._lanes: dict[str, _Lane] = {}
        self._queue: FairQueue[tuple[str, asyncio.Future[None]]] = FairQueue()
        self.num_granted = 0
        """Places given, and not yet counted among the turns in flight."""
        self._is_polling = False

    def __repr__(self) -> str:
        return f"<Lanes of {len(self._lanes)} tenants, {self._queue!r}>"

    def change(self, name: str, tenant: Tenant) -> None:
        """Put a tenant's quotas in force."""
        lane = self._lanes.get(name)
        if lane is None:
            seen = self._counts.of_all(tag_of(name), SAMPLED)
            level = float(tenant.tokens_a_minute or 0)
            self._lanes[name] = _Lane(tenant, tag_of(name), level, self._clock.monotonic(), num_seen=seen)
        else:
            lane.tenant = tenant

    async def place(self, name: str, link: ClientLink) -> "HeldPlace":
        """A place among the turns in flight, for one turn of a tenant. Raises LimitExceeded for a quota, or after too
        long a wait, Draining, and ClientGone."""
        lane = self._lanes[name]
        lane.active_until = self._clock.monotonic() + ACTIVE_S
        self._counts.find_others()
        self._check_rate(name, lane)
        await self._check_stored(name, lane)
        if not self._queue.num_waiting and self._is_free(name):
            return self._granted(name)
        most = lane.tenant.waiting
        if self._queue.num_of(name) >= most:
            raise LimitExceeded(Limit.TENANT, f"{most} requests of {_shown(name)} wait already", retry_after_s=1.0)
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_behind = self._num_reserved(name) == 0
        self._queue.push(name, (name, came), share=lane.tenant.share, cost=lane.cost, is_behind=is_behind)
        late = self._clock.call_later(self._timeout_s, partial(self._end, name, came, _late(name)))
        self._serve()
        try:
            link.when_gone(partial(self._end, name, came, ClientGone()))
            await came
        except asyncio.CancelledError:
            if came.done() and not came.cancelled() and came.exception() is None:
                self._give_up(name)
            came.cancel()
            raise
        finally:
            self._queue.remove(name, (name, came))
            late.cancel()
            link.when_gone(None)
        return HeldPlace(self, name)

    def _num_reserved(self, name: str) -> int:
        """Places kept for others than this tenant: none unless it has its share, of those of all active ones."""
        most, own, now = self._capacity.limits.max_in_flight, self._lanes[name], self._clock.monotonic()
        whole = own.tenant.share
        for lane in self._lanes.values():
            if lane is not own and (now < lane.active_until or self._counts.of_all(lane.tag, IN_FLIGHT)):
                whole += lane.tenant.share
        is_alone = whole == own.tenant.share
        if is_alone or self._counts.of_all(own.tag, IN_FLIGHT) * whole < most * own.tenant.share:
            return 0
        return max(1, most // RESERVE)

    # --- quotas

    def _check_rate(self, name: str, lane: _Lane) -> None:
        """Raise LimitExceeded while the tokens of the last minute, in a leaky bucket, are above the quota."""
        most, now = lane.tenant.tokens_a_minute, self._clock.monotonic()
        num = self._counts.of_all(lane.tag, SAMPLED)
        if most is not None:
            lane.level = min(float(most), lane.level + most * (now - lane.at) / 60) - max(0, num - lane.num_seen)
        lane.at, lane.num_seen = now, num
        if most is not None and lane.level <= 0:
            raise LimitExceeded(
                Limit.TENANT,
                f"{_shown(name)} has sampled its {most} tokens a minute",
                retry_after_s=max(1.0, 60 * -lane.level / most),
            )

    async def _check_stored(self, name: str, lane: _Lane) -> None:
        """Raise LimitExceeded if a tenant's sessions have as many tokens as they may."""
        most = lane.tenant.stored_tokens
        if most is not None and (num := await self._counted(lane, STORED, most)) >= most:
            what = f"the sessions of {_shown(name)} have {num} tokens of at most {most}"
            raise LimitExceeded(Limit.TENANT, f"{what}; delete those that are done", retry_after_s=5.0)

    async def check_opening(self, name: str) -> None:
        """Raise LimitExceeded if a tenant has as many sessions as it may; else it has one more."""
        lane = self._lanes.get(name)
        if lane is None or (most := lane.tenant.sessions) is None:
            return
        self._counts.find_others()
        if (num := await self._counted(lane, SESSIONS, most)) >= most:
            what = f"{_shown(name)} has {num} of at most {most} sessions"
            raise LimitExceeded(Limit.TENANT, f"{what}; delete those that are done", retry_after_s=5.0)
        self._counts.add(lane.tag, SESSIONS, 1)

    async def _counted(self, lane: _Lane, column: int, most: int) -> int:
        """A tenant's stored tokens or sessions. One request at a time counts them, and others wait for the first count;
        at the quota, again after a second: they may have been deleted."""
        began = self._clock.monotonic()
        if began >= lane.stored_until and not (lane.stored_until >= 0 and lane.counting.locked()):
            async with lane.counting:
                if began >= lane.stored_until:
                    await self._count(lane)
        num = (self._counts.own if self._is_shared else self._counts.of_all)(lane.tag, column)
        if num >= most:
            lane.stored_until = min(lane.stored_until, self._clock.monotonic() + 1.0)
        return num

    async def _count(self, lane: _Lane) -> None:
        """Count a tenant's stored tokens and sessions anew. A session opened meanwhile may not be among these: it is
        one more until the next count."""
        began, num_before = self._clock.monotonic(), self._counts.own(lane.tag, SESSIONS)
        num_tokens, num_sessions = await self._stored(lane.tag)
        num_opened = self._counts.own(lane.tag, SESSIONS) - num_before
        self._counts.put(lane.tag, STORED, num_tokens)
        self._counts.put(lane.tag, SESSIONS, num_sessions + num_opened)
        now = self._clock.monotonic()
        lane.stored_until = now + max(STORED_FRESH_S, STORED_PAUSES * (now - began))

    def _is_free(self, name: str) -> bool:
        """Whether a turn of this tenant may begin."""
        capacity = self._capacity
        num = capacity.num_in_flight + capacity.elsewhere.num_in_flight + self.num_granted
        num_left = capacity.limits.max_in_flight - num
        return num_left > 0 and self._is_within(name) and num_left > self._num_reserved(name)

    def _is_within(self, name: str) -> bool:
        lane = self._lanes[name]
        most = lane.tenant.in_flight
        return most is None or self._counts.of_all(lane.tag, IN_FLIGHT) < most

    # --- places

    def _granted(self, name: str) -> "HeldPlace":
        self._grant(name)
        return HeldPlace(self, name)

    def _grant(self, name: str) -> None:
        self.num_granted += 1
        self._counts.add(self._lanes[name].tag, IN_FLIGHT, 1)

    def _give_up(self, name: str) -> None:
        """Take back a place after its request has gone."""
        self.num_granted -= 1
        self.change_in_flight(name, -1)

    def grow(self, name: str, num_turns: int) -> None:
        """More turns of a request with a place. Raises LimitExceeded."""
        most, tag = self._lanes[name].tenant.in_flight, self._lanes[name].tag
        if most is not None and (num := self._counts.of_all(tag, IN_FLIGHT)) + num_turns > most:
            raise LimitExceeded(
                Limit.TENANT, f"{_shown(name)} runs {num} of at most {most} turns (in_flight)", retry_after_s=1.0
            )
        self._counts.add(tag, IN_FLIGHT, num_turns)

    def change_in_flight(self, name: str, num_turns: int) -> None:
        """Turns have ended: others may begin."""
        self._counts.add(self._lanes[name].tag, IN_FLIGHT, num_turns)
        self._serve()

    def sampled(self, name: str, num_tokens: int, num_turns: int) -> None:
        """Turns of a tenant have sampled tokens."""
        lane = self._lanes[name]
        self._counts.add(lane.tag, SAMPLED, num_tokens)
        self._queue.charge(name, num_tokens - lane.cost)
        lane.cost = max(1.0, lane.cost + _SMOOTH * (num_tokens / max(1, num_turns) - lane.cost))

    def _serve(self) -> None:
        """Give the free places to waiting requests."""
        while self._queue.num_waiting:
            if self._capacity.is_draining:
                while (found := self._queue.pop(lambda _: True)) is not None:
                    self._end(*found, Draining("the server is shutting down and takes no new turns", retry_after_s=5.0))
                return
            found = self._queue.pop(self._is_free)
            if found is None:
                break
            name, came = found
            self._grant(name)
            came.set_result(None)
        if self._queue.num_waiting and self._has_others and not self._is_polling:
            self._is_polling = True
            self._clock.call_later(POLL_S, self._poll)

    def _end(self, name: str, came: "asyncio.Future[None]", error: Exception) -> None:
        """A request waits no more."""
        if not came.done():
            came.set_exception(error)
            self._queue.remove(name, (name, came))

    def _poll(self) -> None:
        self._is_polling = False
        self._serve()


class HeldPlace:
    """A place of one request. As `Place`."""

    __slots__ = ("_is_counted", "_lanes", "_name", "_num_started", "_num_turns")

    def __init__(self, lanes: Lanes, name: str) -> None:
        self._lanes = lanes
        self._name = name
        self._num_turns = self._num_started = 1
        self._is_counted = False

    def __repr__(self) -> str:
        return f"<HeldPlace of {self._name}, {self._num_turns} turns>"

    @property
    def tenant(self) -> str | None:
        return self._name or None

    def counted(self) -> None:
        """The manager counts it from here on."""
        self._is_counted = True
        self._lanes.num_granted -= 1

    def grow(self, num_turns: int) -> None:
        self._lanes.grow(self._name, num_turns)
        self._num_turns += num_turns
        self._num_started += num_turns

    def end(self) -> None:
        if not self._is_counted:
            self.counted()
        num, self._num_turns = self._num_turns, 0
        if num:
            self._lanes.change_in_flight(self._name, -num)

    def sampled(self, num_tokens: int) -> None:
        self._lanes.sampled(self._name, num_tokens, self._num_started)


def _shown(name: str) -> str:
    return name or "the operator"


def _late(name: str) -> LimitExceeded:
    return LimitExceeded(Limit.TENANT, f"no place came free for {_shown(name)} in time", retry_after_s=1.0)
