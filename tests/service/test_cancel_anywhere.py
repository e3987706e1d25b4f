"""A turn is ended from outside after each number of passes of the loop, until it is past its end: never half a turn.

Each case runs on a loop of its own, whose time the test moves. What must hold whenever the blow falls: the history has
the whole turn or is as it was, the engine was told if it had begun, the slot is free, one end was reported, no task and
no error is left over, and the next chat works.
"""

import asyncio
import gc
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.chat import ChatRequest, CompletionRequest
from stenograph.core.errors import (
    Draining,
    SessionBusy,
    SessionNotFound,
    StenographError,
    UnexpectedFailure,
    UpstreamTimeout,
)
from stenograph.core.kinds import HistoryKind
from stenograph.core.messages import Message, Role
from stenograph.core.stages import StageTimes
from stenograph.core.telemetry import NoTelemetry, SessionEnd, SessionReport, TurnEnd, TurnReport
from stenograph.core.types import Finish, FinishReason, SamplingParams, token_ids
from stenograph.offload.pool import INLINE_BELOW_BYTES, CpuPool
from stenograph.session.admission import Limits
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.steps import TurnServices
from stenograph.session.turn import TurnOutcome
from stenograph.session.watch import TurnAbandoned, Watch
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.turn import line_ids, line_messages

from .conftest import begun
from .movable_loop import MovableLoop

T = TypeVar("T")

END = 2
"""`<|im_end|>`"""
TIMEOUT_S, GRACE_S = 60.0, 5.0
STOP = Finish(reason=FinishReason.STOP, matched=END)


class SlowPool(CpuPool):
    """A pool whose work takes a few passes of the loop."""

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        await passes(2)
        result = await super().run(work, num_bytes=num_bytes)
        await passes(2)
        return result


class GatedPool(CpuPool):
    """A pool whose threads stand in their work until the test lets them go."""

    def __init__(self) -> None:
        super().__init__(1)
        self.entered, self.let_go, self.ended = threading.Event(), threading.Event(), threading.Event()

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        if num_bytes < INLINE_BELOW_BYTES:
            return await super().run(work, num_bytes=num_bytes)

        def held() -> T:
            self.entered.set()
            self.let_go.wait()
            try:
                return work()
            finally:
                self.ended.set()

        return await super().run(held, num_bytes=num_bytes)


class Counted(NoTelemetry):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[TurnReport] = []
        self.session_ends: list[SessionEnd] = []

    def turn_ended(self, report: TurnReport) -> None:
        self.reports.append(report)

    def session_ended(self, report: SessionReport) -> None:
        self.session_ends.append(report.end)


async def passes(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


@dataclass
class Room:
    """A manager with one session, in which "a" was answered and "b" was answered; then "c" comes in place of "b"."""

    renderer: Renderer
    history: HistoryKind = HistoryKind.LINEAR
    num_passes: int = 0
    pool: CpuPool = field(default_factory=lambda: CpuPool(1))
    timeout_s: float | None = None
    question: str = "c"
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.engine = ScriptedEngine(vocab_size=self.renderer.tokenizer.vocab_size, num_passes=self.num_passes)
        self.telemetry = Counted()
        services = TurnServices(
            engine=self.engine,
            renderer=self.renderer,
            pool=self.pool,
            clock=self.clock,
            timeout_s=self.timeout_s,
            abort_grace_s=GRACE_S,
        )
        limits = Limits(max_sessions=10, max_in_flight=10)
        self.manager = SessionManager(services=services, limits=limits, telemetry=self.telemetry)
        self.session = self.manager.sessions.create(SessionOptions(history=self.history))
        self.told: list[Message] = []
        self.seed = 0

    def start(self, *messages: Message, identity: RequestIdentity | None = None) -> Watch:
        """A turn that the engine plays the last script to."""
        request = ChatRequest(messages=(*self.told, *messages), params=SamplingParams(seed=self.seed))
        stages = StageTimes(start=0.0)
        return begun(self.manager, self.session, request, stages=stages, identity=identity)

    def says(self, text: str, *, paused: bool = False, deaf: bool = False) -> Script:
        ids = (*self.renderer.tokenizer.encode(text), END)
        script = Script(ids=ids, finish=STOP, paused=paused, deaf=deaf)
        self.seed += 1
        self.engine.plan_for(self.seed, script)
        return script

    async def before(self) -> None:
        """Two whole turns."""
        self.says("one")
        first = await settled(self.start(user("a")))
        assert isinstance(first, TurnOutcome)
        self.told += [user("a"), first.reply.parsed.message]
        self.says("two")
        await settled(self.start(user("b")))
        self.telemetry.reports.clear()
        self.engine.requests.clear()
        self.engine.chunks.clear()
        self.lines = self.shown()

    def shown(self) -> list[tuple[list[Message], list[int]]]:
        """Every node's line, as messages and ids."""
        nodes = self.session.nodes
        return [(line_messages(node), line_ids(node).tolist()) for node in nodes]

    async def check_ended(self, script: Script, *, is_gone: bool = False) -> TurnReport:
        """What must hold once the turn that "c" began has ended, whatever ended it."""
        assert self.session.running == []
        assert not self.session.is_busy
        assert self.manager.num_in_flight == 0
        assert self.engine.num_running == 0
        (report,) = self.telemetry.reports
        nodes = self.session.nodes
        if report.end is TurnEnd.COMMITTED:
            node = self.session.latest
            assert node is not None
            assert node.parent is nodes[0]
            assert node.turn.messages == (user(self.question),)
            drawn = self.engine.drawn[self.engine.requests[0].request_id] if self.engine.requests else []
            assert node.turn.sampled.ids.tolist() == drawn
            if node.turn.sampled.finish.reason is FinishReason.STOP:
                assert drawn == list(script.ids)
            else:
                assert report.was_aborted
            if self.engine.requests:
                (request,) = self.engine.requests
                assert line_ids(node).tolist() == request.prompt.ids.tolist() + drawn
            kept = self.lines[:1] if self.history is not HistoryKind.TREE else self.lines
            assert self.shown()[:-1] == kept
        else:
            assert self.shown() == self.lines
            for request in self.engine.requests:
                ended = any(chunk.finish is not None for chunk in self.engine.chunks)
                assert ended or request.request_id in self.engine.stopped
        if is_gone:
            with pytest.raises(SessionNotFound):
                self.start(user("d"))
            assert (self.manager.sessions.num_sessions, self.telemetry.session_ends) == (0, [SessionEnd.DELETED])
        else:
            await self.check_usable()
        return report

    async def check_usable(self) -> None:
        """The next chat is served and kept."""
        num = len(self.session.nodes)
        self.says("next")
        watch = self.start(user("d"))
        outcome = await settled(watch)
        assert isinstance(outcome, TurnOutcome), outcome
        nodes = self.session.nodes
        assert nodes[-1].turn.reply.message.content == "next"
        assert len(nodes) == (2 if self.history is not HistoryKind.TREE else num + 1)


async def settled(watch: Watch) -> TurnOutcome | StenographError | TurnAbandoned:
    """What a watcher gets, who leaves then."""
    try:
        return await watch.result()
    except (StenographError, TurnAbandoned) as error:
        return error
    finally:
        watch.leave()


async def all_pieces(watch: Watch) -> int:
    """As a stream reads: to the end, then leave."""
    num = 0
    try:
        while await watch.take() is not None:
            num += 1
        return num
    finally:
        watch.leave()


def play(scenario: Callable[[MovableLoop], Coroutine[Any, Any, T]]) -> T:
    """Run on a fresh loop; then nothing may be left, and nobody may have complained."""
    loops: list[MovableLoop] = []

    def made() -> MovableLoop:
        loops.append(MovableLoop())
        return loops[-1]

    async def alone() -> T:
        result = await scenario(loops[0])
        await passes(3)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=made) as runner:
        result = runner.run(alone())
    assert loops[0].complaints == []
    return result


@pytest.fixture(autouse=True)
def nothing_is_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> Any:
    with caplog.at_level(logging.ERROR):
        yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


@pytest.fixture
def gated() -> Iterator[GatedPool]:
    """A gated pool that holds no thread back for ever, however the test ends."""
    pool = GatedPool()
    yield pool
    pool.let_go.set()
    pool.close()


Blow = Callable[[Room, Watch, MovableLoop], Coroutine[Any, Any, None]]


async def leave(room: Room, watch: Watch, loop: MovableLoop) -> None:
    watch.leave()


async def leave_twice(room: Room, watch: Watch, loop: MovableLoop) -> None:
    watch.leave()
    await passes(1)
    watch.leave()


async def abandon(room: Room, watch: Watch, loop: MovableLoop) -> None:
    room.manager.abandon_all()


async def abort(room: Room, watch: Watch, loop: MovableLoop) -> None:
    assert await room.manager.abort(room.session.id) <= 1


async def abort_all(room: Room, watch: Watch, loop: MovableLoop) -> None:
    await asyncio.gather(room.manager.abort(room.session.id), room.manager.abort(None))


async def abort_twice(room: Room, watch: Watch, loop: MovableLoop) -> None:
    await asyncio.gather(room.manager.abort(room.session.id), room.manager.abort(None))


async def leave_and_abort(room: Room, watch: Watch, loop: MovableLoop) -> None:
    watch.leave()
    await room.manager.abort(None)


async def deadline(room: Room, watch: Watch, loop: MovableLoop) -> None:
    loop.skipped_s += TIMEOUT_S


async def deadline_then_abort(room: Room, watch: Watch, loop: MovableLoop) -> None:
    loop.skipped_s += TIMEOUT_S
    await passes(2)
    await room.manager.abort(None)


async def deadline_then_leave(room: Room, watch: Watch, loop: MovableLoop) -> None:
    loop.skipped_s += TIMEOUT_S
    await passes(2)
    watch.leave()


async def delete(room: Room, watch: Watch, loop: MovableLoop) -> None:
    await room.manager.delete(room.session.id)


async def delete_twice_at_once(room: Room, watch: Watch, loop: MovableLoop) -> None:
    ends = await asyncio.gather(*(room.manager.delete(room.session.id) for _ in range(3)), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), SessionNotFound, SessionNotFound]


async def deadline_then_delete(room: Room, watch: Watch, loop: MovableLoop) -> None:
    loop.skipped_s += TIMEOUT_S
    await passes(2)
    await room.manager.delete(room.session.id)


KEEPS_SESSION: dict[str, tuple[Blow, set[TurnEnd]]] = {
    "leave": (leave, {TurnEnd.ABANDONED}),
    "leave_twice": (leave_twice, {TurnEnd.ABANDONED}),
    "abandon": (abandon, {TurnEnd.ABANDONED}),
    "abort": (abort, {TurnEnd.COMMITTED}),
    "abort_twice": (abort_twice, {TurnEnd.COMMITTED}),
    "leave_and_abort": (leave_and_abort, {TurnEnd.ABANDONED}),
    "deadline": (deadline, {TurnEnd.FAILED}),
    "deadline_then_leave": (deadline_then_leave, {TurnEnd.FAILED, TurnEnd.ABANDONED}),
    "deadline_then_abort": (deadline_then_abort, {TurnEnd.FAILED}),
}
ENDS_SESSION: dict[str, Blow] = {
    "delete": delete,
    "delete_twice_at_once": delete_twice_at_once,
    "deadline_then_delete": deadline_then_delete,
}


ROOMS = tuple(itertools.product(HistoryKind, (0, 4), (CpuPool, SlowPool)))
"""Linear and tree, with engines and pools that answer at once or take their time."""


def make_room(renderer: Renderer, history: HistoryKind, num_passes: int, pool: type[CpuPool]) -> Room:
    return Room(renderer, history=history, num_passes=num_passes, pool=pool(1), timeout_s=TIMEOUT_S)


async def struck(
    room: Room, num: int, blow: Blow, loop: MovableLoop, *, is_gone: bool = False
) -> tuple[TurnReport, bool, TurnOutcome | StenographError | TurnAbandoned]:
    """One turn, struck after `num` passes: its report, whether it had ended by then, and what its watcher got."""
    await room.before()
    script = room.says("three", paused=True)
    room.engine.step(len(script.ids) + 1)
    watch = room.start(user(room.question))
    waiter = loop.create_task(settled(watch))
    await passes(num)
    was_over = waiter.done()
    await blow(room, watch, loop)
    told = await waiter
    await passes(10)
    return await room.check_ended(script, is_gone=is_gone), was_over, told


@pytest.mark.parametrize("name", KEEPS_SESSION)
def test_a_turn_that_is_ended_anywhere_is_kept_whole_or_not_at_all(name: str, renderer: Renderer) -> None:
    blow, ends = KEEPS_SESSION[name]
    for kind in ROOMS:
        seen: set[TurnEnd] = set()
        for num in itertools.count():
            room = make_room(renderer, *kind)
            report, was_over, told = play(lambda loop, room=room, num=num: struck(room, num, blow, loop))
            room.pool.close()
            if report.end is TurnEnd.COMMITTED:
                assert isinstance(told, TurnOutcome)
                assert told.committed
            elif report.end is TurnEnd.FAILED:
                assert isinstance(told, UpstreamTimeout)
            else:
                assert isinstance(told, Draining if blow is abandon else TurnAbandoned)
            if was_over:
                assert report.end is TurnEnd.COMMITTED
                break
            seen.add(report.end)
        assert ends <= seen <= ends | {TurnEnd.COMMITTED}
        assert num > 8


@pytest.mark.parametrize("name", ENDS_SESSION)
def test_a_session_that_is_deleted_at_any_moment_keeps_nothing_and_is_gone(name: str, renderer: Renderer) -> None:
    for kind in ROOMS:
        for num in itertools.count():
            room = make_room(renderer, *kind)
            report, was_over, told = play(
                lambda loop, room=room, num=num: struck(room, num, ENDS_SESSION[name], loop, is_gone=True)
            )
            room.pool.close()
            if was_over:
                assert report.end is TurnEnd.COMMITTED
                break
            if isinstance(told, TurnOutcome):
                assert told.committed is (report.end is TurnEnd.COMMITTED)
                assert report.end in (TurnEnd.UNRECORDED, TurnEnd.COMMITTED)
            else:
                assert isinstance(told, (UpstreamTimeout, SessionNotFound))
                assert report.end is TurnEnd.FAILED


async def struck_prompts(room: Room, num: int, blow: Blow, loop: MovableLoop) -> tuple[bool, TurnEnd]:
    """A request with three prompts, struck after `num` passes: whether it had ended by then, and how all of it did."""
    await room.before()
    (_, two) = (node for node in room.session.nodes)
    prompts = (token_ids([*line_ids(two), 5]), "c" * 10, token_ids([9, 9]))
    ids = tuple(room.renderer.tokenizer.encode("three"))
    room.engine.plan(*(Script(ids=(*ids, END), finish=STOP, paused=True) for _ in prompts))
    room.engine.step(3 * (len(ids) + 2))
    request = CompletionRequest(prompts=prompts)
    watch = begun(room.manager, room.session, request)
    waiter = loop.create_task(settled(watch))
    await passes(num)
    was_over = waiter.done()
    await blow(room, watch, loop)
    told = await waiter
    await passes(10)
    assert (room.session.running, room.session.is_busy, room.manager.num_in_flight) == ([], False, 0)
    assert room.engine.num_running == 0
    (end,) = {report.end for report in room.telemetry.reports}
    assert len(room.telemetry.reports) == 3
    for sent in room.engine.requests:
        ended = end in (TurnEnd.COMMITTED, TurnEnd.UNRECORDED) or room.engine.drawn[sent.request_id] == [*ids, END]
        assert ended or sent.request_id in room.engine.stopped
    if end is TurnEnd.COMMITTED:
        assert isinstance(told, TurnOutcome)
        new = room.session.nodes[2:]
        assert [node.parent for node in new] == [two, None, None]
        assert [node.turn.sampled.ids.tolist() for node in new] == [
            reply.sampled.ids.tolist() for reply in told.replies
        ]
        assert room.shown()[:2] == room.lines
    else:
        assert room.shown() == room.lines
    return was_over, end


@pytest.mark.parametrize("name", [*KEEPS_SESSION, *ENDS_SESSION])
def test_several_prompts_that_are_ended_anywhere_are_all_kept_or_none(name: str, renderer: Renderer) -> None:
    blow = KEEPS_SESSION[name][0] if name in KEEPS_SESSION else ENDS_SESSION[name]
    if name in ("abort", "abort_twice"):
        blow = abort_all
    for num_passes, pool_type in itertools.product((0, 4), (CpuPool, SlowPool)):
        seen: set[TurnEnd] = set()
        for num in itertools.count():
            room = Room(
                renderer, history=HistoryKind.TREE, num_passes=num_passes, pool=pool_type(1), timeout_s=TIMEOUT_S
            )
            was_over, end = play(lambda loop, room=room, num=num: struck_prompts(room, num, blow, loop))
            room.pool.close()
            seen.add(end)
            if was_over:
                assert end is TurnEnd.COMMITTED
                break
        assert num > 8
        assert len(seen) > 1 or blow is abort_all


def test_a_waiter_that_is_cancelled_leaves_the_turn_alone_and_its_leaving_does_not(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop, room: Room, num: int, reads: bool, leaves: bool) -> bool:
        await room.before()
        script = room.says("three", paused=True)
        watch = room.start(user("c"))

        async def wait() -> None:
            await (watch.take() if reads else watch.result())

        waiter = loop.create_task(wait())
        room.engine.step(len(script.ids) + 1)
        await passes(num)
        was_over = waiter.done()
        waiter.cancel()
        await asyncio.wait({waiter})
        was_running = room.manager.num_in_flight == 1
        if leaves:
            watch.leave()
        else:
            assert isinstance(await watch.result(), TurnOutcome)
        await passes(20)
        report = await room.check_ended(script)
        if not leaves:
            assert report.end is TurnEnd.COMMITTED
        elif was_running and report.end is TurnEnd.COMMITTED:
            assert room.engine.num_running == 0
        return was_over

    for reads, leaves in itertools.product((False, True), (False, True)):
        for num in itertools.count():
            room = Room(renderer, num_passes=2)
            if play(lambda loop, r=room, n=num, x=reads, y=leaves: scenario(loop, r, n, x, y)):
                break
        assert num > 3


def test_of_two_watchers_the_turn_ends_with_the_last_one_who_leaves(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop, room: Room, num: int, *, both: bool) -> bool:
        await room.before()
        script = room.says("three", paused=True)
        first = room.start(user("c"))
        (turn,) = room.session.running
        second = turn.watch()
        stream, whole = loop.create_task(all_pieces(first)), loop.create_task(settled(second))
        room.engine.step(len(script.ids) + 1)
        await passes(num)
        was_over = turn.task.done()
        first.leave()
        await passes(1)
        assert not turn.is_abandoned
        if both:
            second.leave()
        told, _ = await whole, await stream  # neither hangs
        await passes(20)
        report = await room.check_ended(script)
        assert (report.end is TurnEnd.COMMITTED) is isinstance(told, TurnOutcome)
        assert both or isinstance(told, TurnOutcome)
        return was_over

    for both in (False, True):
        for num in itertools.count():
            if play(lambda loop, n=num, b=both: scenario(loop, Room(renderer, num_passes=1), n, both=b)):
                break


def test_who_asks_again_while_an_abandoned_turn_ends_never_joins_it_and_need_not_wait_long(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop, room: Room, num: int) -> bool:
        await room.before()
        room.says("three", paused=True)
        first = RequestIdentity(route="chat", body=b"c", key="k")
        watch = room.start(user("c"), identity=first)
        await passes(10)
        watch.leave()
        await passes(num)
        was_over = not room.session.running
        if room.history is not HistoryKind.TREE and not was_over:
            with pytest.raises(SessionBusy):
                room.start(user("c"), identity=first)
        await room.manager.settle(room.session)
        room.says("again")
        outcome = await settled(room.start(user("c"), identity=first))
        assert isinstance(outcome, TurnOutcome)
        assert outcome.reply.parsed.message.content == "again"
        assert [report.end for report in room.telemetry.reports] == [TurnEnd.ABANDONED, TurnEnd.COMMITTED]
        return was_over

    for history in HistoryKind:
        for num in itertools.count():
            if play(lambda loop, n=num, h=history: scenario(loop, Room(renderer, history=h, num_passes=4), n)):
                break
        assert num > 2


def test_whoever_waits_for_an_abandoned_turn_waits_for_one_that_was_abandoned_meanwhile_too(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = Room(renderer, num_passes=4)
        await room.before()
        room.says("three", paused=True)
        watch = room.start(user("c"))
        await passes(10)
        (turn,) = room.session.running

        def another(_: object) -> None:
            room.start(user("c")).leave()

        turn.task.add_done_callback(another)
        watch.leave()
        await room.manager.settle(room.session)
        assert room.session.running == []
        room.telemetry.reports.pop()
        await room.check_usable()

    play(scenario)


def test_a_reply_that_nobody_got_is_given_again_beside_the_same_one_that_somebody_got(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = Room(renderer, history=HistoryKind.TREE)
        keyed = RequestIdentity(route="chat", body=b"c", key="k")
        bare = RequestIdentity(route="chat", body=b"c")
        ids, watches = [], []
        for identity in (keyed, bare):
            script = room.says("three", paused=True)
            watches.append(room.start(user("c"), identity=identity))
            ids.append(watches[-1].request_id)
            await passes(10)
        room.engine.step(2 * (len(script.ids) + 1))
        for watch in watches:
            await watch.result()
        watches[0].delivered()
        for watch in watches:
            watch.leave()
        again = RequestIdentity(route="chat", body=b"c", is_retry=True)
        assert room.start(user("c"), identity=again).request_id == ids[1]
        assert room.start(user("c"), identity=keyed).request_id == ids[0]

    play(scenario)


def test_a_session_that_is_being_deleted_does_not_expire(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop, num: int) -> bool:
        clock = ManualClock()
        room = Room(renderer, clock=clock)
        room.session = room.manager.sessions.create(SessionOptions(ttl_s=1.0))
        room.says("three", paused=True)
        waiter = loop.create_task(settled(room.start(user("c"))))
        await passes(10)
        deleter = loop.create_task(room.manager.delete(room.session.id))
        await passes(num)
        was_over = deleter.done()
        if num:
            clock.advance(1.0)
            assert room.manager.sessions.expire() == 0
        await asyncio.wait({deleter, waiter})
        assert room.telemetry.session_ends == [SessionEnd.DELETED]
        return was_over

    for num in itertools.count():
        if play(lambda loop, n=num: scenario(loop, n)):
            break
    assert num > 2


@pytest.mark.parametrize("num", [0, 3])
def test_an_abort_of_a_turn_that_stands_in_its_rendering_has_the_grace_time_too(
    num: int, renderer: Renderer, gated: GatedPool
) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = Room(renderer, pool=gated, question="c" * INLINE_BELOW_BYTES)
        await room.before()
        script = room.says("three")
        waiter = loop.create_task(settled(room.start(user(room.question))))
        await passes(num)
        assert await room.manager.abort(room.session.id) == 1
        await passes(5)
        assert gated.entered.wait(30)
        loop.skipped_s += GRACE_S
        assert isinstance(await waiter, UpstreamTimeout)
        gated.let_go.set()
        await room.check_ended(script)

    play(scenario)


def test_a_tree_has_room_for_the_next_node_as_soon_as_the_last_one_is_kept(renderer: Renderer) -> None:
    """A lease ends a moment after its turn is kept; in that moment the turn does not count twice."""

    async def scenario(loop: MovableLoop, num: int) -> bool:
        room = Room(renderer, history=HistoryKind.TREE)
        room.session = room.manager.sessions.create(SessionOptions(history=HistoryKind.TREE, max_nodes=2))
        script = room.says("three", paused=True)
        waiter = loop.create_task(settled(room.start(user("c"))))
        room.engine.step(len(script.ids) + 1)
        await passes(num)
        was_over = waiter.done()
        room.says("four")
        other = await settled(room.start(user("d")))
        assert isinstance(other, TurnOutcome)
        assert isinstance(await waiter, TurnOutcome)
        assert len(room.session.nodes) == 2
        return was_over

    for num in itertools.count():
        if play(lambda loop, n=num: scenario(loop, n)):
            break


def test_a_deleter_who_is_cancelled_leaves_a_session_that_is_gone_and_turns_that_end(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop, room: Room, num: int) -> None:
        await room.before()
        room.says("three", paused=True, deaf=True)
        watches = [room.start(user("c"))]
        await passes(10)
        if room.history is HistoryKind.TREE:
            room.says("four", paused=True, deaf=True)
            watches.append(room.start(user("c")))
            await passes(10)
        waiters = [loop.create_task(settled(watch)) for watch in watches]
        deleter = loop.create_task(room.manager.delete(room.session.id))
        await passes(num)
        deleter.cancel()
        await asyncio.wait({deleter})
        if num == 0:  # it never began: the session is as it was
            assert room.manager.sessions.get(room.session.id) is room.session
            await room.manager.abort(None)
        else:
            with pytest.raises(SessionNotFound):
                room.manager.sessions.get(room.session.id)
        assert room.manager.num_in_flight == len(watches)  # the engine is deaf
        loop.skipped_s += GRACE_S  # one grace time for all of them, whoever waits
        for told in await asyncio.gather(*waiters):
            assert isinstance(told, SessionNotFound if num else UpstreamTimeout)
        assert {report.end for report in room.telemetry.reports} == {TurnEnd.FAILED}
        assert room.manager.num_in_flight == 0
        assert sorted(room.engine.stopped) == sorted(request.request_id for request in room.engine.requests)
        assert room.shown() == room.lines

    for history, num in itertools.product(HistoryKind, range(9)):
        play(lambda loop, n=num, h=history: scenario(loop, Room(renderer, history=h, num_passes=3), n))


def test_an_engine_that_ignores_an_abort_has_the_grace_time_and_no_more(renderer: Renderer) -> None:
    async def scenario(loop: MovableLoop, room: Room, num: int) -> None:
        await room.before()
        script = room.says("three", paused=True, deaf=True)
        watch = room.start(user("c"))
        waiter = loop.create_task(settled(watch))
        await passes(num)
        assert await room.manager.abort(room.session.id) == 1
        assert await room.manager.abort(room.session.id) <= 1
        await passes(30)
        if room.engine.requests:  # else it ended, with nothing, before the engine saw it
            assert not waiter.done()
            loop.skipped_s += GRACE_S
            told = await waiter
            assert isinstance(told, UpstreamTimeout)
            assert "aborted" in told.message
        else:
            told = await waiter
            assert isinstance(told, TurnOutcome)
            assert told.reply.sampled.finish.reason is FinishReason.ABORT
        await passes(10)
        await room.check_ended(script)

    for num, timeout_s in itertools.product(range(14), (None, TIMEOUT_S)):
        room = Room(renderer, num_passes=2, pool=SlowPool(1), timeout_s=timeout_s)
        play(lambda loop, r=room, n=num: scenario(loop, r, n))


def test_a_request_to_abort_that_never_comes_back_is_given_up_after_the_grace_time(renderer: Renderer) -> None:
    class Mute(ScriptedEngine):
        async def abort(self, request_id: str) -> bool:
            await asyncio.get_running_loop().create_future()
            return True

    async def scenario(loop: MovableLoop) -> None:
        room = Room(renderer)
        room.says("never", paused=True)
        room.engine.abort = Mute.abort.__get__(room.engine)  # type: ignore[method-assign]
        waiter = loop.create_task(settled(room.start(user("c"))))
        await passes(10)
        deleter = loop.create_task(room.manager.delete(room.session.id))
        await passes(10)
        loop.skipped_s += GRACE_S
        await deleter
        assert isinstance(await waiter, SessionNotFound)
        assert room.manager.num_in_flight == 0

    play(scenario)


@pytest.mark.parametrize("timeout_s", [None, TIMEOUT_S])
def test_a_timeout_that_is_not_the_turns_own_is_a_bug_and_no_deadline(
    timeout_s: float | None, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = Room(renderer, timeout_s=timeout_s)
        await room.before()
        script = Script(ids=(5,), error=TimeoutError("let out by an engine"))
        room.says("x")
        room.engine.plan_for(room.seed, script)
        assert isinstance(await settled(room.start(user("c"))), UnexpectedFailure)
        report = await room.check_ended(script)
        assert (report.end, report.code) == (TurnEnd.FAILED, "internal_error")

    play(scenario)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is TimeoutError
    caplog.clear()


@pytest.mark.parametrize("name", ["leave", "abandon", "deadline", "delete", "abort"])
def test_work_on_a_thread_that_nobody_waits_for_any_more_is_dropped(
    name: str, renderer: Renderer, gated: GatedPool
) -> None:
    async def scenario(loop: MovableLoop) -> None:
        room = Room(renderer, pool=gated, timeout_s=TIMEOUT_S, question="c" * INLINE_BELOW_BYTES)
        await room.before()
        script = room.says("three")
        watch = room.start(user(room.question))
        waiter = loop.create_task(settled(watch))
        await passes(3)
        assert gated.entered.wait(30)
        is_delete = name == "delete"
        blow = ENDS_SESSION[name] if is_delete else KEEPS_SESSION[name][0]
        struck = loop.create_task(blow(room, watch, loop))
        await passes(10)
        if name in ("leave", "abandon", "deadline"):
            await waiter  # ends though the thread has not
            assert not room.session.is_busy
        gated.let_go.set()
        assert gated.ended.wait(30)
        await struck
        told = await waiter
        assert isinstance(told, TurnOutcome) is (name in ("delete", "abort"))
        assert room.engine.requests == []
        report = await room.check_ended(script, is_gone=is_delete)
        assert report.num_completion == 0

    play(scenario)


@pytest.mark.parametrize("joined", [False, True])
async def test_a_client_that_hangs_up_in_mid_stream_leaves_no_handler_behind(live: Any, joined: bool) -> None:
    before = asyncio.all_tasks()
    script = live.says("never heard to its end", paused=True)
    session_id = await live.open()
    url, body = (
        f"{live.url}/sessions/{session_id}/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}]},
    )
    live.engine.step(2)
    key = {"idempotency-key": "k"}
    response = await live.client.post(url, json={**body, "stream": True}, headers=key)
    await response.content.readany()
    other = await live.client.post(url, json={**body, "stream": True}, headers=key) if joined else None
    handlers = asyncio.all_tasks() - before
    response.close()
    if other is not None:
        live.engine.step(len(script.ids))
        assert (await other.read()).endswith(b"[DONE]\n\n")
        other.close()
    await live.engine.idle()
    await asyncio.wait(handlers)  # hangs if the reader was never told
    assert live.manager.num_in_flight == 0
    assert len(live.manager.sessions.get(session_id).nodes) == (1 if joined else 0)
