"""The clients of a soak, from a process of their own: each plays session after session until it is time to end.

    python -m benchmarks.soak.load '{"server": "http://…", "engine": "http://…", …}'

Says a line of JSON each second, `"over"` when nothing new is begun any more, and a last one with `"done": true`, when
every session has been looked at and deleted.
"""

import asyncio
import gc
import itertools
import sys
import time

import msgspec

from benchmarks.kit.client import BUFFER_BYTES, LoadClient, address
from benchmarks.kit.conversation import Messages
from benchmarks.kit.steps import new_runner, say
from benchmarks.soak.client import SoakClient, SoakContext
from benchmarks.soak.model import SessionModel
from benchmarks.soak.plan import LARGE_MESSAGE_BYTES, Deck, draw_session
from benchmarks.soak.session import Player
from benchmarks.soak.tally import SoakTally
from standins.ordered_engine import OrderedReply

PERIOD_S = 1.0
MOST_FAILURES = 200
"""Beyond it, more of the same is not worth the time."""


class SoakPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The work and its ends: until `duration_s` have passed or `max_turns` were had."""

    server: str
    engine: str
    replies: tuple[OrderedReply, ...]
    seed: int
    clients: int
    duration_s: float
    max_turns: int


class SoakLoad:
    """All clients of one plan."""

    def __init__(self, plan: SoakPlan) -> None:
        self.tally = SoakTally()
        self._plan = plan
        self._deck = Deck(plan.seed)
        self._num_told = 0
        self._numbers = itertools.count()
        self._begun = time.monotonic()
        self._ended = asyncio.Event()
        buffer = memoryview(bytearray(BUFFER_BYTES))
        server, engine = address(plan.server), address(plan.engine)
        filler = next(Messages(num_bytes=LARGE_MESSAGE_BYTES + 1000, num_messages=1).texts(1))
        self._around = SoakContext(
            server=lambda: LoadClient(*server, buffer),
            engine=lambda: LoadClient(*engine, buffer),
            replies=plan.replies,
            filler=filler,
            tally=self.tally,
            stopping=self._is_over,
        )

    async def run(self) -> None:
        """All of it, reports included."""
        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(self._report())
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.clients):
                    group.create_task(self._client())
            self._ended.set()
            await reporter
        self._say(done=True)

    def _is_over(self) -> bool:
        tally, plan = self.tally, self._plan
        is_late = time.monotonic() - self._begun >= plan.duration_s
        return is_late or tally.num_turns >= plan.max_turns or tally.num_failures >= MOST_FAILURES

    async def _client(self) -> None:
        while not self._is_over():
            session = draw_session(next(self._numbers), seed=self._plan.seed, deck=self._deck)
            client = SoakClient(plan=session, around=self._around, model=SessionModel(is_tree=session.is_tree))
            await Player(own=client).run()

    async def _report(self) -> None:
        while not self._ended.is_set():
            self._say(done=False)
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._ended.wait()
            except TimeoutError:
                continue

    def _say(self, *, done: bool) -> None:
        tally = self.tally
        told: dict[str, object] = {
            "done": done,
            "over": self._is_over(),
            "seconds": time.monotonic() - self._begun,
            "num_turns": tally.num_turns,
            "num_sessions": tally.num_sessions,
            "num_failures": tally.num_failures,
            "failures": tally.failures[self._num_told :],
        }
        self._num_told = len(tally.failures)
        if done:
            told["tally"] = tally
        say(told)


if __name__ == "__main__":
    gc.freeze()
    with new_runner() as runner:
        runner.run(SoakLoad(msgspec.json.decode(sys.argv[1], type=SoakPlan)).run())
