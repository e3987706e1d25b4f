"""Reads how full a fleet's engines are, and holds turns until one has memory for them. `memory` decides.

Owns a task for each engine, which asks it now and then, and the futures of turns that wait. Loaded where there are
several engines and `--engine-load-interval` is not 0; a server of one engine has nothing of it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stenograph.core.clock import Clock
from stenograph.core.errors import EngineUnavailable, StenographError
from stenograph.engine.base import EngineLoad, EngineState
from stenograph.engine.fleet.members import MemberState
from stenograph.engine.fleet.memory import MemoryQueue, MemoryTurn

log = logging.getLogger(__name__)

R = TypeVar("R")

READ_DEADLINE_S = 5.0
NUM_MISSED = 5
"""Readings that may be missing before an engine's last word counts for nothing."""
LONGEST_PAUSE_S = 30.0
"""Between two questions to an engine that does not answer them."""


@dataclass(slots=True, eq=False)
class _HeldTurn(Generic[R]):
    """A turn that waits. `begin` gives it an engine."""

    asked: MemoryTurn[MemberState]
    begin: Callable[[MemberState], R]
    future: "asyncio.Future[R | None]"


class MemoryGate(Generic[R]):
    """The gate. `aclose` ends its tasks, and the waits with EngineUnavailable."""

    def __init__(self, clock: Clock, *, interval_s: float, max_wait_s: float, refresh: Callable[[float], None]) -> None:
        """`refresh` brings the members up to a time, before anybody is let in."""
        self._clock = clock
        self._refresh = refresh
        self._interval_s = interval_s
        stale_s = NUM_MISSED * interval_s + READ_DEADLINE_S
        self._queue: MemoryQueue[MemberState] = MemoryQueue(stale_s=stale_s, max_wait_s=max_wait_s)
        self._held: dict[MemoryTurn[MemberState], _HeldTurn[R]] = {}
        self._watches: dict[MemberState, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._silent: set[str] = set()

    def __repr__(self) -> str:
        return f"<MemoryGate {len(self._watches)} engines, {len(self._held)} turns wait>"

    @property
    def num_waiting(self) -> int:
        """Turns that wait here."""
        return len(self._held)

    def load_of(self, name: str) -> EngineLoad | None:
        """An engine's last word, unless it is old."""
        return self._queue.load_of(name, self._clock.monotonic())

    def follow(self, members: Collection[MemberState]) -> None:
        """Ask these engines from now on, and no others."""
        for gone in [one for one in self._watches if one not in members]:
            watch = self._watches.pop(gone)
            watch.cancel()
            self._ending.add(watch)
            watch.add_done_callback(self._ending.discard)
            self._queue.forget(gone.name)
        for member in members:
            if member not in self._watches:
                work = self._watch(member)
                task = asyncio.get_running_loop().create_task(work, name=f"load-{member.name}")
                task.add_done_callback(_log_fault)
                self._watches[member] = task

    def asked(
        self,
        *,
        key: str,
        home: MemberState | None,
        cost_tokens: int,
        kept_tokens: int,
        candidates: Callable[[], Sequence[MemberState]],
        needs: Hashable,
    ) -> MemoryTurn[MemberState]:
        """A turn that wants an engine now."""
        return MemoryTurn(
            key=key,
            home=home,
            cost_tokens=cost_tokens,
            kept_tokens=kept_tokens,
            since=self._clock.monotonic(),
            candidates=candidates,
            needs=needs,
        )

    async def enter(
        self, asked: MemoryTurn[MemberState], begin: Callable[[MemberState], R], undo: Callable[[R], None]
    ) -> R | None:
        """Begin a turn at an engine that has memory for it, once one has; None: it was dropped. A turn begun as its
        waiter leaves is undone. Raises EngineUnavailable where every engine has gone."""
        self._refresh(asked.since)
        engine = self._queue.ask(asked, asked.since)
        if engine is not None:
            return begin(engine)
        held = self._held[asked] = _HeldTurn(asked, begin, asyncio.get_running_loop().create_future())
        self._arm(held)
        try:
            return await held.future
        except asyncio.CancelledError:
            if held.future.done() and not held.future.cancelled() and (run := held.future.result()) is not None:
                undo(run)
            raise
        finally:
            self._queue.left(asked)
            del self._held[asked]

    def drop(self, asked: MemoryTurn[MemberState]) -> None:
        """End a turn's wait with nothing."""
        held = self._held.get(asked)
        if held is not None and not held.future.done():
            held.future.set_result(None)

    def freed(self, member: MemberState) -> None:
        """A turn has ended at an engine, or it has said how full it is: let in whoever may go there."""
        now = self._clock.monotonic()
        self._refresh(now)
        for asked in self._queue.freed(member, now):
            held = self._held[asked]
            if not held.future.done():
                held.future.set_result(held.begin(member))

    async def aclose(self) -> None:
        for held in self._held.values():
            if not held.future.done():
                held.future.set_exception(EngineUnavailable("The engines were stopped."))
        self.follow(())
        if self._ending:
            await asyncio.wait(self._ending)

    def _arm(self, held: _HeldTurn[R]) -> None:
        now = self._clock.monotonic()
        self._clock.call_later(max(0.0, self._queue.wake_at(held.asked, now) - now), lambda: self._wake(held))

    def _wake(self, held: _HeldTurn[R]) -> None:
        if held.future.done():
            return
        if not held.asked.candidates():
            held.future.set_exception(EngineUnavailable("None of the engines takes turns now.", retry_after_s=1.0))
            return
        engine = self._queue.overdue(held.asked, self._clock.monotonic())
        if engine is not None:
            held.future.set_result(held.begin(engine))
        else:
            self._arm(held)

    # -- readings

    async def _watch(self, member: MemberState) -> None:
        """Ask an engine until it is left out, or turns out to never say."""
        pause_s = self._interval_s
        while True:
            why = ""
            try:
                async with asyncio.timeout(READ_DEADLINE_S):
                    load = await member.engine.find_load()
                if load is None:
                    log.info("the engine at %s does not say how full it is: it is placed by our counts", member.name)
                    return
                self._queue.report(member, load, self._clock.monotonic())
            except StenographError as error:
                why = error.message
            except TimeoutError:
                why = f"no answer within {READ_DEADLINE_S:g} s"
            self._note(member, why)
            pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, self._interval_s)) if why else self._interval_s
            await self._pause(pause_s)

    def _note(self, member: MemberState, why: str) -> None:
        """Let turns in after a word; say it once where words begin to be missing. Of an engine that is down its health
        says so."""
        if not why:
            self._silent.discard(member.name)
            self.freed(member)
        elif member.name not in self._silent and member.health.state is EngineState.READY:
            self._silent.add(member.name)
            log.warning(
                "the engine at %s does not say how full it is, and is placed by our counts: %s", member.name, why
            )

    async def _pause(self, pause_s: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(pause_s, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            timer.cancel()


def _log_fault(task: "asyncio.Task[None]") -> None:
    """A fault of ours must not pass for a silent engine."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
