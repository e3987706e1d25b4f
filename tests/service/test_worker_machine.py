"""Sessions of two workers against a plain model, each request through either: rules of the session machine, by HTTP.

One pair of workers serves all examples, each with sessions of its own. Every reply waits in the engine until its rule
lets it go on, so that what strikes a turn strikes it in the middle.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stenograph.core.types import Finish, FinishReason
from stenograph.render.renderer import Renderer
from stenograph.testing.standins.scripted_engine import Script

from .conftest import END, Answer, output_ids, user
from .workers_kit import Workers, two_workers

T = TypeVar("T")

THROUGH = st.sampled_from([0, 1])
STRIKES = st.sampled_from([None, None, None, "hang up", "abort", "abort all", "delete", "busy", "retry"])
SHAPES = st.sampled_from([("chat", False), ("chat", True), ("messages", False), ("messages", True)])


@dataclass(eq=False, kw_only=True)
class Seen:
    """A session as its client knows it: its messages, and the ids of each reply."""

    id: str
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    turns: list[list[int]] = field(default_factory=list[list[int]])
    is_cut: bool = False
    """Its last turn ended by an abort; the client asks again, and the next reply replaces it."""


@dataclass(eq=False)
class Pair:
    """Two workers on a loop that the rules run."""

    loop: asyncio.AbstractEventLoop
    workers: Workers
    num_asked: int = 0


class WorkerMachine(RuleBasedStateMachine):
    """Clients of both workers beside the model."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.workers = pair.workers
        self.sessions: list[Seen] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.pair.loop.run_until_complete(asyncio.wait_for(work, 30))

    async def call(self, through: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.workers.lives[through].call(method, path, body, **headers)

    @rule(through=THROUGH, is_keyed=st.booleans())
    def open(self, through: int, is_keyed: bool) -> None:
        self.pair.num_asked += 1
        headers = {"idempotency_key": f"opening {self.pair.num_asked}"} if is_keyed else {}
        answer = self.run(self.call(through, "POST", "/sessions", {}, **headers))
        session = answer.json()["session_id"]
        if is_keyed:
            again = self.run(self.call(1 - through, "POST", "/sessions", {}, **headers))
            assert again.json()["session_id"] == session
        else:
            assert int(session[:2], 16) == through
        self.sessions.append(Seen(id=session))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), through=THROUGH, strike=STRIKES, shape=SHAPES)
    def chat(self, data: st.DataObject, through: int, strike: str | None, shape: tuple[str, bool]) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.run(self.turn(session, through, strike, shape))

    def request(self, session: Seen, dialect: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
        messages = [*session.messages, user("go on")]
        path = f"/sessions/{session.id}/v1/" + ("messages" if dialect == "messages" else "chat/completions")
        return path, {"messages": messages, "max_tokens": 50, "stream": stream, "model": "m"}

    async def turn(self, session: Seen, through: int, strike: str | None, shape: tuple[str, bool]) -> None:
        engine = self.workers.engine
        self.pair.num_asked += 1
        text = f"reply {self.pair.num_asked}"
        ids = (*self.workers.lives[0].renderer.tokenizer.encode(text), END)
        engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=END), paused=True))
        path, body = self.request(session, shape[0], stream=shape[1])
        num_before, key = len(engine.requests), f"key {self.pair.num_asked}"
        asking = asyncio.create_task(self.call(through, "POST", path, body, idempotency_key=key))
        await engine.begun(num_before + 1)
        request_id = engine.requests[-1].request_id
        engine.step_turn(request_id, 2)
        if strike == "hang up":
            asking.cancel()
            await engine.idle()
            return
        if strike == "busy":
            other = {**body, "messages": [*body["messages"], user("another")]}
            refused = await self.call(1 - through, "POST", path, {**other, "messages": body["messages"], "seed": 1})
            assert (refused.status, refused.json()["error"]["code"]) == (409, "session_busy")
        if strike in ("abort", "abort all", "delete"):
            await self.strike(session, 1 - through, strike)
            answer = await asking
            assert answer.status == 200
            return
        again = asyncio.create_task(self.call(1 - through, "POST", path, body, idempotency_key=key))
        engine.step_turn(request_id, len(ids))
        answer, other_answer = await asyncio.gather(asking, again)
        assert len(engine.requests) == num_before + 1  # whether it joined the turn or got its reply
        if strike == "retry":
            other_answer = await self.call(1 - through, "POST", path, body, idempotency_key=key)
            assert len(engine.requests) == num_before + 1
        for one in (answer, other_answer):
            assert (one.status, said_by(one, stream=shape[1])) == (200, text)
        if session.is_cut:
            session.turns.pop()
            session.is_cut = False
        session.messages += [user("go on"), {"role": "assistant", "content": text}]
        session.turns.append(list(ids))

    async def strike(self, session: Seen, through: int, strike: str) -> None:
        if strike == "delete":
            assert (await self.call(through, "DELETE", f"/sessions/{session.id}")).status == 204
            self.sessions.remove(session)
            assert (await self.call(1 - through, "GET", f"/sessions/{session.id}")).status == 404
            return
        path = "/abort_request" if strike == "abort all" else f"/sessions/{session.id}/abort"
        answer = await self.call(through, "POST", path, {"abort_all": True} if strike == "abort all" else {})
        assert answer.json() == {"aborted": 1}
        if session.is_cut:
            session.turns.pop()
        session.is_cut = True
        session.turns.append([])  # what it had drawn: only a beginning of it is known

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), through=THROUGH)
    def delete(self, data: st.DataObject, through: int) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        assert self.run(self.call(through, "DELETE", f"/sessions/{session.id}")).status == 204
        assert self.run(self.call(1 - through, "DELETE", f"/sessions/{session.id}")).status == 404
        self.sessions.remove(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        views = [self.run(self.call(through, "GET", f"/sessions/{session.id}")) for through in (0, 1)]
        assert views[0].body == views[1].body
        found = [output_ids(record) for record in views[0].json()["records"]]
        assert len(found) == len(session.turns)
        for kept, turn in zip(found, session.turns, strict=True):
            assert kept == turn or not turn

    @invariant()
    def every_worker_lists_the_sessions_that_there_are_and_nothing_runs(self) -> None:
        if not self.sessions:
            return
        listed = [self.run(self.call(through, "GET", "/sessions?limit=1000")).json() for through in (0, 1)]
        assert listed[0]["sessions"] == listed[1]["sessions"]
        ids = {one["session_id"] for one in listed[0]["sessions"]}
        assert {session.id for session in self.sessions} <= ids
        assert self.workers.engine.num_running == 0
        assert sum(live.manager.num_in_flight for live in self.workers.lives) == 0

    def teardown(self) -> None:
        for session in self.sessions:
            assert self.run(self.call(0, "DELETE", f"/sessions/{session.id}")).status == 204
        assert self.run(self.call(0, "GET", "/sessions")).json()["sessions"] == []


def said_by(answer: Answer, *, stream: bool) -> str:
    """The text of a reply in either protocol, whole or in a stream."""
    if not stream:
        body = answer.json()
        return str(body["content"][0]["text"] if "content" in body else body["choices"][0]["message"]["content"])
    text = ""
    for line in answer.body.decode().splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            choices = event.get("choices") or [{}]
            text += event.get("delta", {}).get("text") or choices[0].get("delta", {}).get("content") or ""
    return text


@contextmanager
def served(folder: Path, renderer: Renderer, **settings: Any) -> Iterator[Pair]:
    with asyncio.Runner() as runner:
        workers = two_workers(folder, renderer, **settings)
        try:
            yield Pair(runner.get_loop(), runner.run(workers.__aenter__()))
        finally:
            runner.run(workers.__aexit__(None, None, None))


@pytest.mark.timeout(200)  # many requests, on a machine that may do other work too
@pytest.mark.parametrize("has_store", [False, True])
def test_whatever_is_asked_through_whichever_worker_is_what_one_server_says(
    has_store: bool, renderer: Renderer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path / "data"} if has_store else {}
    with served(tmp_path, renderer, **options) as pair:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: WorkerMachine(pair),
            settings=settings(
                max_examples=10, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
