"""Nodes, leases, a database and clients in virtual time, with clocks that drift, pauses, partitions and crashes.

The owners, leases, writers and stores are the real ones; the database is `SharedTables`, which another test holds to
PostgreSQL. A node holds sessions in memory as the manager does: what it has it answers from, as long as its owner says
that the lease runs. SEEDS sets how many runs there are; `scripts/test-cluster` makes 10,000.
"""

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from standins.shared_rows import MemoryRows, SharedTables
from standins.virtual_time import VirtualLoop
from stenograph.cluster.postgres.shared_rows import DatabaseAway
from stenograph.cluster.postgres.store import OwnedTail, PostgresStore
from stenograph.core.clock import Timer
from stenograph.core.errors import SessionElsewhere, StenographError, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.base import Tail, checked_payloads
from tests.store_laws import appended, session_id

T = TypeVar("T")

SEEDS = int(os.environ.get("SEEDS", "40"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
RUNS = 10
"""Parts that the seeds are tested in."""

pytestmark = pytest.mark.timeout(60 + SEEDS)

LEASE_S = 1.0
NUM_NODES = 3
NUM_SESSIONS = 3
TROUBLE_S = 12.0
CALM_S = 20.0
TURNS_AT_THE_END = 2
MAX_DRIFT = 0.05
"""A node's clock is at most so much slower or faster than the database's."""
WAY_TIMEOUT_S = 0.8


@dataclass(slots=True)
class Machine:
    """What a node's process runs on: a clock of its own rate, which can be stopped, and a network that can be cut."""

    loop: VirtualLoop
    chance: random.Random
    rate: float
    running: asyncio.Event = field(default_factory=asyncio.Event)
    is_cut: bool = False
    is_dead: bool = False

    def monotonic(self) -> float:
        return 1000.0 + self.loop.time() * self.rate

    def wall(self) -> float:
        return self.monotonic()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """A timer that comes late where the process is stopped, and never where it is dead."""

        def due() -> None:
            if self.is_dead:
                return
            if self.running.is_set():
                call()
            else:
                waiting.append(self.loop.create_task(self._resumed(call)))

        waiting: list[asyncio.Task[None]] = []
        handle = self.loop.call_later(delay_s / self.rate, due)

        class Both:
            def cancel(self) -> None:
                handle.cancel()
                for task in waiting:
                    task.cancel()

        return Both()

    async def _resumed(self, call: Callable[[], None]) -> None:
        await self.running.wait()
        call()

    async def way(self, statement: Callable[[], T]) -> T:
        """To the database and back: each may take long, and be lost. A statement may come after it was given up."""
        arrived: asyncio.Future[T] = self.loop.create_future()

        async def travel() -> None:
            await asyncio.sleep(self._delay_s())
            if self.is_cut or self.chance.random() < 0.02:
                return
            answer = statement()
            await asyncio.sleep(self._delay_s())
            if not self.is_cut and self.chance.random() >= 0.02 and not arrived.done():
                arrived.set_result(answer)

        self.loop.create_task(travel())  # goes on when nobody waits for it any more
        try:
            async with asyncio.timeout(WAY_TIMEOUT_S):
                answer = await arrived
        except TimeoutError:
            raise DatabaseAway("no answer in time") from None
        finally:
            await self.running.wait()
        return answer

    def _delay_s(self) -> float:
        if self.chance.random() < 0.02:
            return self.chance.uniform(0.0, 3.0)
        return self.chance.choice((0.001, 0.001, 0.002, 0.01, 0.3 * self.chance.random()))


@dataclass(slots=True)
class Memory:
    """A session in a node's memory."""

    turns: list[bytes]
    tail: Tail


class Node:
    """A server: its store, and the sessions that it has in memory."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.machine: Machine
        self.store: PostgresStore
        self.memory: dict[SessionId, Memory] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.start()

    def start(self) -> None:
        world = self.world
        rate = 1.0 + world.chance.uniform(-MAX_DRIFT, MAX_DRIFT)
        self.machine = Machine(world.loop, world.chance, rate)
        self.machine.running.set()
        self.memory = {}
        rows = MemoryRows(world.tables, self.machine.way)
        self.store = PostgresStore(rows, self.machine, url=f"http://{self.number}", lease_s=LEASE_S)
        self.store.on_lost = self.memory.clear
        self.store.on_moved = self.moved

    def moved(self, id_: SessionId) -> None:
        """A row was refused: only because the session is another owner's."""
        memory = self.memory.pop(id_)
        assert isinstance(memory.tail, OwnedTail)
        assert self.world.tables.epoch(id_) > memory.tail.epoch, "the owner was refused its own session"

    def crash(self) -> None:
        """The process is gone: nothing of it runs any more, but for what it has sent."""
        self.machine.is_dead = True
        for task in (self.store._living, self.store._writer, *self.store._asked, *self.tasks):
            task.cancel()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do a request's work as a task of the process. Raises CancelledError if the process dies."""
        task = self.world.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        await asyncio.wait({task})
        if task.cancelled():
            raise StorageUnavailable("the node died", is_full=False)
        return task.result()

    async def awake(self, id_: SessionId) -> Memory:
        """As `Ownership.settle` and `Sessions.wake`."""
        await self.machine.running.wait()
        self.store.owner.held()
        if (found := self.memory.get(id_)) is not None:
            return found
        stored = await self.store.take(id_)
        assert stored is not None
        tail = stored.tail()
        self.store.check_owned(tail)
        if (found := self.memory.get(id_)) is not None:
            return found
        self.memory[id_] = Memory(turns=list(map(bytes, checked_payloads(stored)))[1:], tail=tail)
        return self.memory[id_]

    async def turn(self, id_: SessionId, key: bytes, after: list[bytes]) -> list[bytes]:
        """Add a turn, unless one with its key is there; the turns after it. `after` is what its client was told of."""
        memory = await self.awake(id_)
        assert memory.turns[: len(after)] == after, "an acknowledged turn is lost, or another stands in its place"
        if any(turn.startswith(key) for turn in memory.turns):  # the client asks again
            return list(memory.turns)
        payload = key + b" sampled as %d" % self.world.chance.randrange(10**9)
        made = [*memory.turns, payload]
        await asyncio.sleep(self.world.chance.choice((0.0, 0.05, 0.5)))  # the engine
        await self.machine.running.wait()
        await appended(self.store, memory.tail, payload)
        memory.turns.append(payload)
        assert memory.turns == made, "turns of one session are one after the other"
        return list(memory.turns)

    async def look(self, id_: SessionId) -> list[bytes]:
        memory = await self.awake(id_)
        return list(memory.turns)


class World:
    """One run."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.tables = SharedTables(loop.time)
        self.nodes = [Node(self, number) for number in range(NUM_NODES)]
        self.acknowledged: dict[SessionId, list[bytes]] = {}
        self.is_calm = False
        self.num_turns = 0

    async def client(self, number: int) -> None:
        """One rollout: turn after turn, each asked for until it is there, of any node."""
        id_ = session_id(number)
        while True:
            node = self.chance.choice(self.nodes)
            try:
                await node.run(self._create(node, id_))
                break
            except StenographError:
                await asyncio.sleep(0.1)
        done = self.acknowledged[id_] = []
        left = TURNS_AT_THE_END
        while left:
            key = b"turn %d:" % len(done)
            shown = await self._asked(id_, lambda node, key=key: node.turn(id_, key, list(done)))  # type: ignore[misc]
            assert shown[:-1] == done, "a turn is there once"
            assert shown[-1].startswith(key)
            done.append(shown[-1])
            self.num_turns += 1
            before = list(done)
            seen = await self._asked(id_, lambda node: node.look(id_))
            assert seen == before, "an answer from memory is of what was acknowledged before it was asked for"
            left -= self.is_calm

    async def _asked(self, id_: SessionId, what: Callable[[Node], Coroutine[Any, Any, list[bytes]]]) -> list[bytes]:
        while True:
            node = self.chance.choice(self.nodes)
            try:
                return await node.run(what(node))
            except StenographError as error:
                if isinstance(error, SessionElsewhere):
                    number = int(error.url.removeprefix("http://") or "0")
                    with suppress(StenographError):
                        return await self.nodes[number].run(what(self.nodes[number]))
            await asyncio.sleep(self.chance.uniform(0.01, 0.2))

    async def _create(self, node: Node, id_: SessionId) -> None:
        await node.machine.running.wait()
        with suppress(StenographError):
            if await node.store.load(id_) is not None:
                return
        tail = await node.store.create(id_, b"opening", at=1.0, ttl_s=None, key="k")
        node.store.check_owned(tail)
        node.memory.setdefault(id_, Memory(turns=[], tail=tail))  # as `Sessions.open`

    async def trouble(self) -> None:
        while self.loop.time() < TROUBLE_S:
            await asyncio.sleep(self.chance.uniform(0.0, 1.5))
            node = self.chance.choice(self.nodes)
            match self.chance.choice(("pause", "pause", "cut", "cut", "crash", "all cut")):
                case "pause":
                    self.loop.create_task(self._paused(node.machine, self.chance.choice((0.1, 0.5, 0.95, 1.2, 3.0))))
                case "cut":
                    self.loop.create_task(self._cut([node.machine], self.chance.choice((0.2, 0.9, 1.5, 3.0))))
                case "crash":
                    node.crash()
                    node.start()
                case _:
                    machines = [one.machine for one in self.nodes]
                    self.loop.create_task(self._cut(machines, self.chance.choice((0.3, 2.0))))
        await asyncio.sleep(3.0)
        self.is_calm = True

    async def _paused(self, machine: Machine, time_s: float) -> None:
        machine.running.clear()
        await asyncio.sleep(time_s)
        machine.running.set()

    async def _cut(self, machines: list[Machine], time_s: float) -> None:
        for machine in machines:
            machine.is_cut = True
        await asyncio.sleep(time_s)
        for machine in machines:
            machine.is_cut = False

    async def run(self) -> int:
        async with asyncio.timeout(TROUBLE_S + CALM_S):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.trouble())
                for number in range(NUM_SESSIONS):
                    tasks.create_task(self.client(number))
        for id_, done in self.acknowledged.items():
            stored = self.tables.read(id_)
            assert stored is not None
            assert list(map(bytes, checked_payloads(stored)))[1:] == done, "each turn is there, once, in its order"
        for node in self.nodes:
            node.crash()
        return self.num_turns


def played(seed: int) -> int:
    """Run one seed; the turns that were made. Raises AssertionError."""
    loop = VirtualLoop()

    async def run() -> int:
        return await World(loop, seed).run()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("part", range(RUNS))
def test_whatever_clocks_and_networks_do_no_session_forks_no_turn_is_lost_and_all_goes_on(part: int) -> None:
    turns = [played(seed) for seed in range(FIRST_SEED + part, FIRST_SEED + SEEDS, RUNS)]
    assert min(turns) >= NUM_SESSIONS * TURNS_AT_THE_END
