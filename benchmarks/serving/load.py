"""Drives conversations, as a closed or an open loop.

Closed: `concurrency` clients, each takes the next session and runs its turns one after the other. Open: each session
begins at its arrival, however many run already; its turns follow one another. A turn is due when its session arrives,
or when the reply before it has come; latencies count from then (coordinated omission; Gil Tene).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.kit.client import Failures, RequestFailed
from benchmarks.kit.quantiles import milliseconds
from benchmarks.kit.requests import Columns, TimedReply, as_columns
from benchmarks.serving.mix import (
    CHAT,
    MIXES,
    Mix,
    SessionPlan,
    TurnPlan,
    arrivals_s,
    read_sessions,
    sample_sessions,
)

WARM_UP_SEED_STEP = 1_000_003
"""The warm-up says other things than any run with a small seed does; only the system prompt is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The conversations and their rate.

    `dataset_path` is the file of the mix sharegpt. `endpoint` is `chat` or `completions`: those are one growing text,
    and have no session anywhere. `rate` None is a closed loop of `concurrency` clients. `limit_s` is how long a request
    may take.
    """

    mix: str
    seed: int
    sessions: int
    dataset_path: Path | None = None
    endpoint: str = CHAT
    max_tokens: int | None = None
    concurrency: int = 1
    rate: float | None = None
    warm_up_sessions: int = 2
    limit_s: float = 600.0

    def sampled(self, num: int, seed: int) -> list[SessionPlan]:
        """The first `num` sessions of a seed. Raises OSError and ValueError as `read_sessions` does."""
        if self.dataset_path is not None:
            return read_sessions(self.dataset_path, num=num, seed=seed, max_tokens=self.max_tokens)
        return sample_sessions(MIXES[self.mix], num=num, seed=seed, max_tokens=self.max_tokens)


class Talk(Protocol):
    """A session's client. `prepare` is its own work, before the clock runs; all after it is measured."""

    def prepare(self, turn: TurnPlan) -> None:
        """Make ready what `ask` sends."""
        ...

    async def ask(self, turn: TurnPlan) -> TimedReply:
        """Send a turn and hear its reply to the end. Raises RequestFailed."""
        ...

    def close(self) -> None:
        """Let go of what the client holds. A session at a server stays."""
        ...


class Target(Protocol):
    """The server or the engine that answers."""

    async def start(self) -> None:
        """Make it ready. Raises StartupError."""
        ...

    def talk(self, mix: Mix, plan: SessionPlan) -> Talk:
        """The client of a session."""
        ...

    async def collect(self, heard: list[TimedReply]) -> None:
        """After the load: add what the other side knows of the requests, close the sessions. Raises RequestFailed."""
        ...

    async def aclose(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """A turn of a session that was answered, and when it was due."""

    session: int
    turn: int
    due_s: float
    reply: TimedReply


@dataclass(slots=True, kw_only=True)
class Talked:
    """The chats of a step. `num_planned` 0: nobody asks how far it is."""

    num_planned: int = 0
    num_asked: int = 0
    heard: list[ServedTurn] = field(default_factory=list[ServedTurn])
    failures: Failures = field(default_factory=Failures)

    def report(self, step: str) -> dict[str, Any]:
        """As an artifact keeps it."""
        ends_s, dues_s = [one.reply.end_s for one in self.heard], [one.due_s for one in self.heard]
        seconds = max(ends_s) - min(dues_s) if self.heard else 0.0
        return {"step": step, "num_ok": len(self.heard), "seconds": seconds, **self.failures.report()}

    def columns(self) -> Columns:
        """All requests, a list a fact, in order of their due times; milliseconds from the first."""
        ordered = sorted(self.heard, key=lambda one: one.due_s)
        return as_columns(
            [
                {
                    "session": one.session,
                    "turn": one.turn,
                    "due_ms": milliseconds(one.due_s - ordered[0].due_s),
                    "wait_ms": milliseconds(one.reply.sent_s - one.due_s),
                    **one.reply.facts(one.due_s),
                    "is_cut": one.reply.is_cut,
                    "stages_ms": {stage: milliseconds(seconds) for stage, seconds in one.reply.stages_s.items()},
                }
                for one in ordered
            ]
        )


class ServingLoad:
    """All sessions of one plan, at one target."""

    def __init__(self, plan: ServingPlan, target: Target, *, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._target = target
        self._note = note
        self._sessions = plan.sampled(plan.sessions, plan.seed)
        self._warm_up = plan.sampled(plan.warm_up_sessions, plan.seed + WARM_UP_SEED_STEP)

    async def warm_up(self) -> Talked:
        """Other conversations, which are in no figure."""
        talked = Talked()
        await self._closed(self._warm_up, talked)
        await self.collect(talked)
        return talked

    async def run(self) -> Talked:
        """The load."""
        talked = Talked(num_planned=sum(len(session.turns) for session in self._sessions))
        if self._plan.rate is None:
            await self._closed(self._sessions, talked)
        else:
            await self._open(self._sessions, self._plan.rate, talked)
        return talked

    async def collect(self, talked: Talked) -> None:
        """Add what the target knows of the requests. What fails of it is a failure of the step."""
        try:
            await self._target.collect([one.reply for one in talked.heard])
        except RequestFailed as error:
            talked.failures.add(error)

    async def _closed(self, sessions: list[SessionPlan], talked: Talked) -> None:
        waiting = iter(enumerate(sessions))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.concurrency):
                tasks.create_task(self._client(waiting, talked))

    async def _client(self, waiting: Iterator[tuple[int, SessionPlan]], talked: Talked) -> None:
        for number, session in waiting:
            talk = self._begun(session)
            await self._converse(number, session, talk, time.monotonic(), talked)

    async def _open(self, sessions: list[SessionPlan], rate: float, talked: Talked) -> None:
        talks = [self._begun(session) for session in sessions]
        arrivals = arrivals_s(rate, num=len(sessions), seed=self._plan.seed)
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, (session, talk, arrival) in enumerate(zip(sessions, talks, arrivals, strict=True)):
                tasks.create_task(self._converse(number, session, talk, begin + arrival, talked))

    def _begun(self, session: SessionPlan) -> Talk:
        """The client of a session, with its first turn prepared."""
        talk = self._target.talk(MIXES[self._plan.mix], session)
        talk.prepare(session.turns[0])
        return talk

    async def _converse(self, number: int, session: SessionPlan, talk: Talk, due_s: float, talked: Talked) -> None:
        """A session's turns, the first of which is due at `due_s`. After a failure it goes on with what it has."""
        try:
            if (early_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(early_s)
            for index, turn in enumerate(session.turns):
                if index:
                    talk.prepare(turn)
                    due_s = time.monotonic()
                if (reply := await self._ask(talk, turn, talked)) is not None:
                    talked.heard.append(ServedTurn(session=number, turn=index, due_s=due_s, reply=reply))
        finally:
            talk.close()

    async def _ask(self, talk: Talk, turn: TurnPlan, talked: Talked) -> TimedReply | None:
        """A turn's reply; None where it failed, which is counted."""
        reply = None
        try:
            async with asyncio.timeout(self._plan.limit_s):
                reply = await talk.ask(turn)
        except RequestFailed as error:
            talked.failures.add(error)
        except TimeoutError:
            talked.failures.add(RequestFailed("timeout", f"no reply within {self._plan.limit_s:g} s"))
        talked.num_asked += 1
        if talked.num_planned:
            self._note(f"{talked.num_asked} of {talked.num_planned} chats")
        return reply
