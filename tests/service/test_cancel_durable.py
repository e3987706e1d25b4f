"""The laws of test_cancel_anywhere.py where there is a store: a turn is durable or not at all, and memory is the disk.

The store takes a few passes of the loop for each row, so that every blow also falls while a turn is on its way there.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from stenograph.core.errors import SessionBusy, StorageUnavailable
from stenograph.core.kinds import HistoryKind
from stenograph.core.telemetry import TurnEnd
from stenograph.session.admission import Limits
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.steps import TurnServices
from stenograph.session.storage import SessionStorage, restored_session
from stenograph.session.turn import TurnOutcome
from stenograph.store.base import Done, Tail
from stenograph.store.codec.rows import COMMIT, Totals
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark, SessionOptions
from stenograph.trajectory.matching import MATCHERS
from stenograph.trajectory.turn import line_ids, line_messages

from .memory_store import MemoryStore
from .movable_loop import MovableLoop
from .test_cancel_anywhere import (
    ENDS_SESSION,
    GRACE_S,
    KEEPS_SESSION,
    TIMEOUT_S,
    Blow,
    Room,
    passes,
    play,
    settled,
    struck,
    user,
)

pytestmark = pytest.mark.timeout(600)


class SlowStore(MemoryStore):
    """A store whose rows take some passes of the loop, or wait until a test lets them go."""

    def __init__(self, num_passes: int) -> None:
        super().__init__()
        self.num_passes = num_passes
        self.is_held = False
        self._waiting: list[tuple[Tail, bytes, Totals, float, Done, int]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def append(self, tail: Tail, payload: bytes, *, adds: Totals, at: float, done: Done, kind: int = COMMIT) -> None:
        if self.is_held:
            self._waiting.append((tail, payload, adds, at, done, kind))
        else:
            self._later(self.num_passes, tail, payload, adds, at, done, kind)

    def let_go(self) -> None:
        self.is_held = False
        for tail, payload, adds, at, done, kind in self._waiting:
            super().append(tail, payload, adds=adds, at=at, done=done, kind=kind)
        self._waiting.clear()

    def _later(self, num: int, tail: Tail, payload: bytes, adds: Totals, at: float, done: Done, kind: int) -> None:
        if num == 0:
            super().append(tail, payload, adds=adds, at=at, done=done, kind=kind)
        else:
            asyncio.get_running_loop().call_soon(self._later, num - 1, tail, payload, adds, at, done, kind)


@dataclass
class StoredRoom(Room):
    """A room whose session is in a store."""

    store: SlowStore = field(default_factory=lambda: SlowStore(3))

    async def before(self) -> None:
        services = TurnServices(
            engine=self.engine,
            renderer=self.renderer,
            pool=self.pool,
            clock=self.clock,
            timeout_s=self.timeout_s,
            abort_grace_s=GRACE_S,
        )
        storage = SessionStorage(self.store, clock=self.clock, pool=self.pool, model=ModelMark())
        limits = Limits(max_sessions=10, max_in_flight=10)
        self.manager = SessionManager(services=services, limits=limits, telemetry=self.telemetry, storage=storage)
        self.session = await self.manager.sessions.open(SessionOptions(history=self.history))
        await super().before()

    async def check_disk(self, *, is_gone: bool = False) -> None:
        """What the store has makes the session that is in memory, or there is neither."""
        stored = await self.store.load(self.session.id)
        if is_gone:
            assert stored is None
            return
        assert stored is not None
        again = restored_session(stored, matcher_of=MATCHERS.get, model=ModelMark(), now=0.0, wall=0.0)
        lines = [(node.id, line_messages(node), line_ids(node).tolist()) for node in again.nodes]
        assert lines == [(node.id, line_messages(node), line_ids(node).tolist()) for node in self.session.nodes]
        assert again.strands.discarded == self.session.strands.discarded


@pytest.mark.parametrize("history", [HistoryKind.LINEAR, HistoryKind.TREE, HistoryKind.STRANDS])
@pytest.mark.parametrize("name", [*KEEPS_SESSION, *ENDS_SESSION])
def test_a_blow_at_any_moment_leaves_a_whole_turn_or_none_and_the_disk_has_the_same(
    renderer: Renderer, name: str, history: HistoryKind
) -> None:
    is_gone = name in ENDS_SESSION
    blow: Blow = ENDS_SESSION[name] if is_gone else KEEPS_SESSION[name][0]
    ends: set[TurnEnd] = set()

    async def one(loop: MovableLoop, num: int) -> bool:
        room = StoredRoom(renderer, history=history, timeout_s=TIMEOUT_S)
        report, was_over, told = await struck(room, num, blow, loop, is_gone=is_gone)
        ends.add(report.end)
        if isinstance(told, TurnOutcome) and not is_gone:
            assert told.committed
        await room.check_disk(is_gone=is_gone)
        return was_over

    for num in itertools.count():
        if play(lambda loop, num=num: one(loop, num)):
            break
    assert TurnEnd.COMMITTED in ends or is_gone


@pytest.mark.parametrize("name", ["leave", "abandon", "abort", "deadline", "deadline_then_leave"])
def test_a_turn_on_its_way_to_the_disk_can_no_longer_be_ended(renderer: Renderer, name: str) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = StoredRoom(renderer, timeout_s=TIMEOUT_S)
        await room.before()
        room.says("three")
        room.store.is_held = True
        watch = room.start(user("c"))
        waiter = loop.create_task(settled(watch))
        while not room.store.num_waiting:
            await passes(1)
        with pytest.raises(SessionBusy):  # the lease is held until it is durable
            room.start(user("d"))
        await KEEPS_SESSION[name][0](room, watch, loop)
        await passes(20)
        assert not waiter.done()
        assert room.session.is_busy
        room.store.let_go()
        assert isinstance(await waiter, TurnOutcome)
        await passes(5)
        assert room.telemetry.reports[0].end is TurnEnd.COMMITTED
        assert room.session.nodes[-1].turn.reply.message.content == "three"
        await room.check_disk()
        await room.check_usable()

    play(scenario)


def test_who_hung_up_and_asks_again_gets_the_reply_that_was_on_its_way_to_the_disk(renderer: Renderer) -> None:
    identity = RequestIdentity(route="v1/chat/completions", body=b"c")
    again = RequestIdentity(route="v1/chat/completions", body=b"c", is_retry=True)

    async def scenario(loop: MovableLoop) -> None:
        room = StoredRoom(renderer)
        await room.before()
        room.says("three")
        room.store.is_held = True
        watch = room.start(user("c"), identity=identity)
        while not room.store.num_waiting:
            await passes(1)
        watch.leave()
        settling = loop.create_task(room.manager.settle(room.session))
        await passes(20)
        assert not settling.done()  # it ends by itself, and soon: nobody is refused because of it
        room.store.let_go()
        await settling
        outcome = await settled(room.start(user("c"), identity=again))
        assert isinstance(outcome, TurnOutcome)
        assert outcome.reply.parsed.message.content == "three"
        assert len(room.engine.requests) == 1
        await room.check_disk()

    play(scenario)


def test_a_row_that_fails_leaves_the_session_as_it_was_and_its_lease_free(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = StoredRoom(renderer)
        await room.before()
        room.says("three")
        room.store.refuse = StorageUnavailable("full", is_full=True)
        told = await settled(room.start(user("c")))
        assert isinstance(told, StorageUnavailable)
        await passes(3)
        assert room.shown() == room.lines
        (report,) = room.telemetry.reports
        assert (report.end, report.code) == (TurnEnd.FAILED, "storage_unavailable")
        room.store.refuse = None
        await room.check_disk()
        await room.check_usable()
        await room.check_disk()

    play(scenario)


def test_siblings_of_a_tree_are_committed_in_the_order_of_the_disk(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = StoredRoom(renderer, history=HistoryKind.TREE)
        await room.before()
        room.store.is_held = True
        waiters: list[asyncio.Task[object]] = []
        for number in range(4):
            room.says(f"sibling {number}")
            waiters.append(loop.create_task(settled(room.start(user("c")))))
        while room.store.num_waiting < 4:
            await passes(1)
        assert len(room.session.nodes) == 2
        room.store.let_go()
        for waiter in waiters:
            assert isinstance(await waiter, TurnOutcome)
        assert [node.id for node in room.session.nodes] == list(range(6))
        await room.check_disk()

    play(scenario)
