"""The moment of a server of several processes, merged from those of all answering ones; the others are counted as away.

While somebody watches here, each other worker sends its moments by one stream, however many watch. An ended worker
is away from then on, and is asked again until it is back.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from stenograph.cluster.peers import Peers
from stenograph.core.errors import WorkerUnavailable
from stenograph.http.merging import moment
from stenograph.http.processes import EVERY_S, FRESH_S, Board

NOW_PATH, WATCH_PATH = "/workers/now", "/workers/watch"

ANSWER_S = 2.0
"""Longest time for a worker to report its turns; a slower one is away."""
STALE_S = 5.0
"""A worker silent for so long is away, although its connection is there."""
AGAIN_S = 2.0
"""Between two questions to an absent worker."""


class AllMoments:
    """The moments of all workers; `board` is this one's. Close it at the end."""

    def __init__(self, board: Board, peers: Peers, *, own: int) -> None:
        self.board = board
        self._peers = peers
        self._others = [worker for worker in range(peers.num) if worker != own]
        self._said: dict[int, tuple[float, bytes]] = {}
        """The last words of the others, each with its time."""
        self._merged: tuple[float, bytes] | None = None
        self.num_watching = 0
        """Streams watched here."""
        self._following: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<AllMoments of {1 + len(self._others)} workers, {self.num_watching} watch>"

    async def now(self) -> bytes:
        await asyncio.gather(*map(self._ask, self._others))
        self._merged = None
        return self._read()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        self._begin()
        try:
            yield await self.now()  # before the first words of all streams are there
            await asyncio.sleep(EVERY_S)
            while not self.board.is_draining:
                yield self._read()
                await asyncio.sleep(EVERY_S)
        finally:
            self._end()

    async def aclose(self) -> None:
        """Wait for the end of all streams."""
        for task in self._following:
            task.cancel()
        if tasks := [*self._following, *self._ending]:
            await asyncio.wait(tasks)

    def _begin(self) -> None:
        self.num_watching += 1
        if self.num_watching == 1:
            loop = asyncio.get_running_loop()
            self._following = [
                loop.create_task(self._follow(worker), name=f"watch-worker-{worker}") for worker in self._others
            ]

    def _end(self) -> None:
        """Does not wait: whoever watched may be cancelled again and again."""
        self.num_watching -= 1
        if self.num_watching:
            return
        tasks, self._following = self._following, []
        for task in tasks:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    def _read(self) -> bytes:
        """The moment, or the one of half a second ago."""
        now_s = asyncio.get_running_loop().time()
        if self._merged is None or now_s - self._merged[0] >= FRESH_S:
            there = [said for at_s, said in self._said.values() if now_s - at_s < STALE_S]
            num_away = len(self._others) - len(there)
            self._merged = (now_s, moment([self.board.read(), *there], num_away=num_away))
        return self._merged[1]

    async def _ask(self, worker: int) -> None:
        try:
            answer = await self._peers.ask(worker, "POST", NOW_PATH, timeout_s=ANSWER_S)
        except WorkerUnavailable:
            self._said.pop(worker, None)
        else:
            self._hear(worker, answer.body)

    async def _follow(self, worker: int) -> None:
        while True:
            with suppress(WorkerUnavailable):  # it is counted as away, until it is back
                await self._listen(worker)
            self._said.pop(worker, None)
            await asyncio.sleep(AGAIN_S)

    async def _listen(self, worker: int) -> None:
        """Hear a worker's moments, a line each, until its stream ends. Raises WorkerUnavailable."""
        async with self._peers.reading(worker, WATCH_PATH, b"") as stream, aclosing(stream.lines()) as lines:
            async for line in lines:
                self._hear(worker, line)

    def _hear(self, worker: int, said: bytes) -> None:
        self._said[worker] = (asyncio.get_running_loop().time(), said)
