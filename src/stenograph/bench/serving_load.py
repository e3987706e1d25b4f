"""Drives conversations from a process of its own, as a closed or an open loop.

    python -m stenograph.bench.serving_load '{"mix": "chat", "sessions": 16, "concurrency": 4, "url": …}'

Closed: `concurrency` clients, each takes the next session and runs its turns one after the other. Open: each session
begins at its arrival, however many run already; its turns follow one another. A turn is due when its session arrives,
or when the reply before it has come; latencies count from then (coordinated omission; Gil Tene). It says
`{"ready": …}`, then does one step for each line on stdin (`warm`, `run`, `collect`), and reports each as a line of
JSON; while `run` goes on, lines with `progress` come.
"""

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvloop

from stenograph.bench.serving_engine import EngineTarget
from stenograph.bench.serving_http import HttpTarget
from stenograph.bench.serving_mix import MIXES, SessionPlan, arrivals_s, draw_sessions
from stenograph.bench.serving_target import ChatFailed, Heard, Talk, Target
from stenograph.core.settings import Settings
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.local import EmbeddedEngine
from stenograph.http.app import make_renderer
from stenograph.render.model_files import load_model_files

WARM_UP_SEED_STEP = 1_000_003
"""The warm-up says other things than any run with a small seed does; only the system prompt is the same."""
NUM_PROGRESS_LINES = 10


class EnginePlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An embedded engine that the load runs itself."""

    model: str
    threads: int
    max_batch: int


class ServingPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to say, how fast, and to whom: `engine`, or the address `host`, `port`.

    `sessionless`: the address is an engine's, which knows no sessions. `rate` None is a closed loop of `concurrency`
    clients. `limit_s` is how long a request may take.
    """

    mix: str
    seed: int
    sessions: int
    max_tokens: int | None = None
    concurrency: int = 1
    rate: float | None = None
    warm_up_sessions: int = 2
    host: str = ""
    port: int = 0
    sessionless: bool = False
    engine: EnginePlan | None = None
    limit_s: float = 600.0


@dataclass(slots=True)
class Tally:
    """What a step came to. `errors` are counted by status and code."""

    heard: list[Heard] = field(default_factory=list[Heard])
    errors: Counter[str] = field(default_factory=Counter[str])
    first_error: str = ""

    def failed(self, error: ChatFailed) -> None:
        self.errors[error.kind] += 1
        self.first_error = self.first_error or str(error)


class ServingLoad:
    """All sessions of one plan, at one target."""

    def __init__(self, plan: ServingPlan, target: Target, *, note: Callable[[int, int], None]) -> None:
        self._plan = plan
        self._target = target
        self._note = note
        self._mix = MIXES[plan.mix]
        self._sessions = self._drawn(plan.sessions, plan.seed)
        self._warm_up = self._drawn(plan.warm_up_sessions, plan.seed + WARM_UP_SEED_STEP)
        self._last = Tally()
        self._num_planned = sum(len(session.turns) for session in self._sessions)
        self._num_asked = 0
        self._is_warming = False

    async def step(self, name: str) -> dict[str, object]:
        """Do one step; returns its report."""
        plan = self._plan
        match name:
            case "warm":
                self._is_warming = True
                tally = await self._closed(self._warm_up, plan.concurrency)
                self._is_warming = False
                await self._collect(tally)
                return _report(name, tally)
            case "run":
                self._last = await (
                    self._closed(self._sessions, plan.concurrency)
                    if plan.rate is None
                    else self._open(self._sessions, arrivals_s(plan.rate, num=plan.sessions, seed=plan.seed))
                )
                return _report(name, self._last)
            case _:
                tally = Tally(heard=self._last.heard)
                await self._collect(tally)
                return {**_report(name, tally), "requests": _columns(self._last.heard)}

    def _drawn(self, num: int, seed: int) -> list[SessionPlan]:
        return draw_sessions(self._mix, num=num, seed=seed, max_tokens=self._plan.max_tokens)

    async def _closed(self, sessions: list[SessionPlan], concurrency: int) -> Tally:
        tally = Tally()
        waiting = iter(enumerate(sessions))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(self._client(waiting, tally))
        return tally

    async def _client(self, waiting: Iterator[tuple[int, SessionPlan]], tally: Tally) -> None:
        for number, session in waiting:
            talk = self._target.talk(number, self._mix, session)
            talk.prepare(session.turns[0])
            await self._converse(talk, session, tally, due_s=None)

    async def _open(self, sessions: list[SessionPlan], arrivals: list[float]) -> Tally:
        tally = Tally()
        talks = [self._target.talk(number, self._mix, session) for number, session in enumerate(sessions)]
        for talk, session in zip(talks, sessions, strict=True):
            talk.prepare(session.turns[0])
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for talk, session, arrival in zip(talks, sessions, arrivals, strict=True):
                tasks.create_task(self._converse(talk, session, tally, due_s=begin + arrival))
        return tally

    async def _converse(self, talk: Talk, session: SessionPlan, tally: Tally, *, due_s: float | None) -> None:
        """A session's turns, the first of which is prepared. After a failure it goes on with what it has."""
        try:
            if due_s is not None:
                await asyncio.sleep(due_s - time.monotonic())
            for number, turn in enumerate(session.turns):
                if number:
                    talk.prepare(turn)
                due = due_s if due_s is not None and number == 0 else time.monotonic()
                try:
                    async with asyncio.timeout(self._plan.limit_s):
                        tally.heard.append(await talk.ask(turn, due))
                except ChatFailed as error:
                    tally.failed(error)
                except TimeoutError:
                    tally.failed(ChatFailed("timeout", f"no reply within {self._plan.limit_s:g} s"))
                self._count()
        finally:
            talk.close()

    def _count(self) -> None:
        if not self._is_warming:
            self._num_asked += 1
            self._note(self._num_asked, self._num_planned)

    async def _collect(self, tally: Tally) -> None:
        try:
            await self._target.collect(tally.heard)
        except ChatFailed as error:
            tally.failed(error)


def _report(name: str, tally: Tally) -> dict[str, object]:
    heard = tally.heard
    return {
        "step": name,
        "num_ok": len(heard),
        "seconds": max(one.end_s for one in heard) - min(one.due_s for one in heard) if heard else 0.0,
        "errors": dict(tally.errors),
        "first_error": tally.first_error,
    }


def _columns(heard: list[Heard]) -> dict[str, list[object]]:
    """All requests, a list a fact, in order of their due times; milliseconds from the first."""
    ordered = sorted(heard, key=lambda one: one.due_s)
    zero = ordered[0].due_s if ordered else 0.0
    rows = [
        {
            "session": one.session,
            "turn": one.turn,
            "due_ms": _ms(one.due_s - zero),
            "wait_ms": _ms(one.sent_s - one.due_s),
            "ttft_ms": None if one.first_s is None else _ms(one.first_s - one.due_s),
            "e2e_ms": _ms(one.end_s - one.due_s),
            "num_prompt": one.num_prompt,
            "num_completion": one.num_completion,
            "num_cached": one.num_cached,
            "is_cut": one.is_cut,
            "gaps_ms": [_ms(after - before) for before, after in zip(one.pieces_s, one.pieces_s[1:], strict=False)],
            "stages_ms": {stage: _ms(seconds) for stage, seconds in one.stages_s.items()},
        }
        for one in ordered
    ]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _progress(num: int, total: int) -> None:
    """A tenth more is done."""
    if total and num * NUM_PROGRESS_LINES // total > (num - 1) * NUM_PROGRESS_LINES // total:
        _say({"progress": num, "of": total})


async def _target(plan: ServingPlan) -> Target:
    if plan.engine is None:
        return HttpTarget(plan.host, plan.port, sessionless=plan.sessionless)
    path = Path(plan.engine.model)
    renderer = make_renderer(load_model_files(path), "auto")
    options = EmbeddedOptions(
        threads=plan.engine.threads, max_batch=plan.engine.max_batch, kv_tokens=Settings().kv_tokens
    )
    engine = EmbeddedEngine(path, options)
    await engine.start()
    return EngineTarget(engine, renderer)


async def _obey(plan: ServingPlan) -> None:
    loop = asyncio.get_running_loop()
    target = await _target(plan)
    try:
        load = ServingLoad(plan, target, note=_progress)
        gc.collect()
        gc.disable()
        _say({"ready": True})
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            _say(await load.step(line))
    finally:
        await target.aclose()


def main() -> None:
    """Do as the plan in the first argument says."""
    plan = msgspec.json.decode(sys.argv[1], type=ServingPlan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_obey(plan))


if __name__ == "__main__":
    main()
