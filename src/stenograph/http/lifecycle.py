"""The server's housekeeping, and its log lines at start and shutdown.

Knows no sockets; an engine's health is read now and then, never waited for.
"""

import asyncio
import itertools
import logging
import signal
from collections.abc import Callable
from contextlib import suppress

from stenograph.core.errors import StorageUnavailable
from stenograph.core.weights import UNNAMED
from stenograph.engine.base import Engine, EngineState
from stenograph.offload.memory import trim_memory
from stenograph.offload.pool import INLINE_BELOW_BYTES, CpuPool
from stenograph.session.manager import SessionManager

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.05
HOUSEKEEPING_PERIOD_S = 0.5
EXPIRE_TICKS = 20
EXPIRE_KEPT_TICKS = 120
TRIM_TICKS = 10


async def start_engine(engine: Engine, manager: SessionManager) -> None:
    """Start the engine, and learn the name of its weights before the first turn: it takes precedence over the settings'
    name, until a trainer brings others. Raises StartupError."""
    await engine.start()
    version = await engine.find_version()
    if version not in (None, UNNAMED) and not manager.weights.num_taken:
        manager.weights.name(version)


async def tell_of_readiness(engine: Engine, *, url: str, ready: Callable[[], None]) -> None:
    """Call `ready` when the engine takes turns; until then the log has a line for each awaited engine.

    `url` is where the server listens already.
    """
    away = [status for status in engine.statuses() if status.health.state is not EngineState.READY]
    is_ready = engine.health().state is EngineState.READY
    meanwhile = "" if is_ready else f"; {url}/health answers, turns are refused until an engine is up"
    for status in away:
        reason = status.health.detail or status.health.state
        log.warning("waiting for the engine at %s: %s%s", status.name, reason, meanwhile)
    while engine.health().state is not EngineState.READY:  # noqa: ASYNC110 - no engine tells of it
        await asyncio.sleep(LOOK_PERIOD_S)
    ready()


def tell_of_signal(number: signal.Signals, manager: SessionManager, *, drain_timeout_s: float) -> None:
    """Log the stop of the server, and the turns still awaited."""
    num, waits = manager.num_in_flight, ""
    if num:
        which = "1 turn; a second signal ends it" if num == 1 else f"{num} turns; a second signal ends them"
        waits = f", waiting up to {drain_timeout_s:g} s for {which} at once"
    log.info("%s: shutting down%s", number.name, waits)


def tell_of_lost_sessions(manager: SessionManager) -> None:
    """Log each session ending with the process, and how much is lost where there is no store."""
    if manager.sessions.storage is not None:
        log.info("%d sessions were in memory; all are in the store", manager.sessions.num_sessions)
        return
    manager.sessions.log_stopped()
    num, num_tokens = manager.sessions.num_sessions, manager.sessions.num_held_tokens
    if num_tokens:
        which = "1 session" if num == 1 else f"{num} sessions"
        ends = "ends" if num == 1 else "end"
        log.warning("%s with %d tokens %s with this process: sessions are kept in memory only", which, num_tokens, ends)


async def keep_house(manager: SessionManager, pool: CpuPool) -> None:
    """Drop expired sessions and give memory back, for ever.

    A request for an expired session finds it gone without this. Memory is given back soon after sessions were dropped
    or the last turn ended, and now and then while turns are made: the memory between them is in pieces, and malloc
    would keep these.
    """
    num_forgotten = num_held = 0
    for tick in itertools.count(1):
        await asyncio.sleep(HOUSEKEEPING_PERIOD_S)
        manager.sessions.give_way()
        if tick % EXPIRE_TICKS == 0:
            manager.sessions.expire()
        if tick % EXPIRE_KEPT_TICKS == 0:
            with suppress(StorageUnavailable):  # it is told to whoever needs the store
                await manager.sessions.expire_kept()
        came_to_rest = not manager.num_in_flight and manager.sessions.num_held_tokens != num_held
        if came_to_rest or manager.sessions.num_forgotten != num_forgotten or tick % TRIM_TICKS == 0:
            num_forgotten, num_held = manager.sessions.num_forgotten, manager.sessions.num_held_tokens
            await pool.run(trim_memory, num_bytes=INLINE_BELOW_BYTES)
