"""Drives conversations from a process of its own, as a closed or an open loop.

    python -m stenograph.bench.serving.load '{"mix": "chat", "sessions": 16, "concurrency": 4, "url": …}'

Closed: `concurrency` clients, each takes the next session and runs its turns one after the other. Open: each session
begins at its arrival, however many run already; its turns follow one another. A turn is due when its session arrives,
or when the reply before it has come; latencies count from then (coordinated omission; Gil Tene). It says
`{"ready": …}`, then does one step for each line on stdin (`warm`, `run`, `collect`), and reports each as a line of
JSON; while `run` goes on, lines with `progress` come.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stenograph.bench.kit.client import Failures, RequestFailed
from stenograph.bench.kit.quantiles import milliseconds
from stenograph.bench.kit.requests import as_columns
from stenograph.bench.kit.steps import obey, run_child, say
from stenograph.bench.serving.engine import EngineTarget
from stenograph.bench.serving.http import HttpTarget
from stenograph.bench.serving.mix import CHAT, MIXES, SessionPlan, arrivals_s, read_sessions, sample_sessions
from stenograph.bench.serving.target import ServedReply, Talk, Target
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.embedded import EmbeddedEngine
from stenograph.http.app import make_renderer
from stenograph.model.files import load_model_files

WARM_UP_SEED_STEP = 1_000_003
"""The warm-up says other things than any run with a small seed does; only the system prompt is the same."""
NUM_PROGRESS_LINES = 10


class ServingPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The conversations, their rate, and their target: `host` and `port`, or an `engine` that the load runs itself.

    `dataset_path` is the file of the mix sharegpt. `endpoint` is `chat` or `completions`: those are one growing text,
    and have no session anywhere. `sessionless`: the address is an engine's, which knows no sessions. `rate` None is a
    closed loop of `concurrency` clients. `limit_s` is how long a request may take.
    """

    mix: str
    seed: int
    sessions: int
    dataset_path: str | None = None
    endpoint: str = CHAT
    max_tokens: int | None = None
    concurrency: int = 1
    rate: float | None = None
    warm_up_sessions: int = 2
    host: str = ""
    port: int = 0
    sessionless: bool = False
    model: str = ""
    engine: EmbeddedOptions | None = None
    limit_s: float = 600.0

    def sampled(self, num: int, seed: int) -> list[SessionPlan]:
        """The first `num` sessions of a seed. Raises OSError and ValueError as `read_sessions` does."""
        if self.dataset_path is not None:
            return read_sessions(Path(self.dataset_path), num=num, seed=seed, max_tokens=self.max_tokens)
        return sample_sessions(MIXES[self.mix], num=num, seed=seed, max_tokens=self.max_tokens)


@dataclass(slots=True)
class _Talked:
    """The results of a step."""

    heard: list[ServedReply] = field(default_factory=list[ServedReply])
    failures: Failures = field(default_factory=Failures)


class ServingLoad:
    """All sessions of one plan, at one target."""

    def __init__(self, plan: ServingPlan, target: Target, *, note: Callable[[int, int], None]) -> None:
        self._plan = plan
        self._target = target
        self._note = note
        self._mix = MIXES[plan.mix]
        self._sessions = plan.sampled(plan.sessions, plan.seed)
        self._warm_up = plan.sampled(plan.warm_up_sessions, plan.seed + WARM_UP_SEED_STEP)
        self._last = _Talked()
        self._num_planned = sum(len(session.turns) for session in self._sessions)
        self._num_asked = 0
        self._is_warming = False

    async def step(self, name: str) -> dict[str, object]:
        """Do one step; returns its report."""
        plan = self._plan
        match name:
            case "warm":
                self._is_warming = True
                talked = await self._closed(self._warm_up, plan.concurrency)
                self._is_warming = False
                await self._collect(talked)
                return _report(name, talked)
            case "run":
                self._last = await (
                    self._closed(self._sessions, plan.concurrency)
                    if plan.rate is None
                    else self._open(self._sessions, arrivals_s(plan.rate, num=plan.sessions, seed=plan.seed))
                )
                return _report(name, self._last)
            case _:
                talked = _Talked(heard=self._last.heard)
                await self._collect(talked)
                return {**_report(name, talked), "requests": _columns(self._last.heard)}

    async def _closed(self, sessions: list[SessionPlan], concurrency: int) -> _Talked:
        talked = _Talked()
        waiting = iter(enumerate(sessions))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(self._client(waiting, talked))
        return talked

    async def _client(self, waiting: Iterator[tuple[int, SessionPlan]], talked: _Talked) -> None:
        for number, session in waiting:
            talk = self._target.talk(number, self._mix, session)
            talk.prepare(session.turns[0])
            await self._converse(talk, session, talked, due_s=None)

    async def _open(self, sessions: list[SessionPlan], arrivals: list[float]) -> _Talked:
        talked = _Talked()
        talks = [self._target.talk(number, self._mix, session) for number, session in enumerate(sessions)]
        for talk, session in zip(talks, sessions, strict=True):
            talk.prepare(session.turns[0])
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for talk, session, arrival in zip(talks, sessions, arrivals, strict=True):
                tasks.create_task(self._converse(talk, session, talked, due_s=begin + arrival))
        return talked

    async def _converse(self, talk: Talk, session: SessionPlan, talked: _Talked, *, due_s: float | None) -> None:
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
                        talked.heard.append(await talk.ask(turn, due))
                except RequestFailed as error:
                    talked.failures.add(error)
                except TimeoutError:
                    talked.failures.add(RequestFailed("timeout", f"no reply within {self._plan.limit_s:g} s"))
                self._count()
        finally:
            talk.close()

    def _count(self) -> None:
        if not self._is_warming:
            self._num_asked += 1
            self._note(self._num_asked, self._num_planned)

    async def _collect(self, talked: _Talked) -> None:
        try:
            await self._target.collect(talked.heard)
        except RequestFailed as error:
            talked.failures.add(error)


def _report(name: str, talked: _Talked) -> dict[str, object]:
    heard = talked.heard
    return {
        "step": name,
        "num_ok": len(heard),
        "seconds": max(one.end_s for one in heard) - min(one.due_s for one in heard) if heard else 0.0,
        **talked.failures.report(),
    }


def _columns(heard: list[ServedReply]) -> dict[str, list[object]]:
    """All requests, a list a fact, in order of their due times; milliseconds from the first."""
    ordered = sorted(heard, key=lambda one: one.due_s)
    zero = ordered[0].due_s if ordered else 0.0
    rows = [
        {
            "session": one.session,
            "turn": one.turn,
            "due_ms": milliseconds(one.due_s - zero),
            "wait_ms": milliseconds(one.sent_s - one.due_s),
            "ttft_ms": None if one.first_s is None else milliseconds(one.first_s - one.due_s),
            "e2e_ms": milliseconds(one.end_s - one.due_s),
            "num_prompt": one.num_prompt,
            "num_completion": one.num_completion,
            "num_cached": one.num_cached,
            "is_cut": one.is_cut,
            "gaps_ms": [
                milliseconds(after - before) for before, after in zip(one.pieces_s, one.pieces_s[1:], strict=False)
            ],
            "stages_ms": {stage: milliseconds(seconds) for stage, seconds in one.stages_s.items()},
        }
        for one in ordered
    ]
    return as_columns(rows)


def _progress(num: int, total: int) -> None:
    """A tenth more is done."""
    if total and num * NUM_PROGRESS_LINES // total > (num - 1) * NUM_PROGRESS_LINES // total:
        say({"progress": num, "of": total})


async def _target(plan: ServingPlan) -> Target:
    if plan.engine is None:
        return HttpTarget(plan.host, plan.port, sessionless=plan.sessionless, endpoint=plan.endpoint)
    path = Path(plan.model)
    renderer = make_renderer(load_model_files(path), "auto")
    engine = EmbeddedEngine(path, plan.engine)
    await engine.start()
    return EngineTarget(engine, renderer, endpoint=plan.endpoint)


async def _run(plan: ServingPlan) -> None:
    target = await _target(plan)
    try:
        await obey(ServingLoad(plan, target, note=_progress).step)
    finally:
        await target.aclose()


if __name__ == "__main__":
    run_child(_run(msgspec.json.decode(sys.argv[1], type=ServingPlan)))
