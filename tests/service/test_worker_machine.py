"""Sessions of two workers against a plain model, each request through either: rules of the session machine, by HTTP.

The same workers serve all examples, each with sessions of its own. Every reply waits in the engine until its rule
lets it go on, so that what strikes a turn strikes it in the middle. test_server_machine.py drives the workers of two
servers, which share a database, by the same rules.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
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

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, output_ids, user
from .workers_kit import Workers, two_workers

T = TypeVar("T")

THROUGH = st.tuples(st.integers(0, 3), st.integers(0, 2))
"""The worker that a request comes to, and how far from it the other one is that has a part in the rule."""
STRIKES = st.sampled_from([None, "hang up", "abort", "abort all", "delete", "busy", "retry", *(2 * ("stop", "late"))])
"""What strikes a turn. Where workers keep their sessions, the last two are nothing."""
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
class Doors:
    """All workers, two of each server, on a loop that the rules run."""

    loop: asyncio.AbstractEventLoop
    lives: list[Live]
    num_asked: int = 0
    clocks: list[ManualClock] = field(default_factory=list[ManualClock])
    """The clocks of the servers' leases, where they share a database."""

    @property
    def engine(self) -> ScriptedEngine:
        """The engine of all."""
        return self.lives[0].engine

    def of(self, through: tuple[int, int]) -> tuple[Live, Live]:
        """A worker, and another one."""
        at, num = through[0] % len(self.lives), len(self.lives)
        return self.lives[at], self.lives[(at + 1 + through[1] % (num - 1)) % num]


class WorkerMachine(RuleBasedStateMachine):
    """Clients of all workers beside the model."""

    def __init__(self, doors: Doors) -> None:
        super().__init__()
        self.doors = doors
        self.sessions: list[Seen] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.doors.loop.run_until_complete(work)

    @rule(through=THROUGH, is_keyed=st.booleans())
    def open(self, through: tuple[int, int], is_keyed: bool) -> None:
        door, other = self.doors.of(through)
        self.doors.num_asked += 1
        headers = {"idempotency_key": f"opening {self.doors.num_asked}"} if is_keyed else {}
        answer = self.run(door.call("POST", "/sessions", {}, **headers))
        session = answer.json()["session_id"]
        if is_keyed:
            again = self.run(other.call("POST", "/sessions", {}, **headers))
            assert again.json()["session_id"] == session
        else:
            assert int(session[:2], 16) == self.doors.lives.index(door) % 2
        self.sessions.append(Seen(id=session))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), through=THROUGH, strike=STRIKES, shape=SHAPES)
    def chat(self, data: st.DataObject, through: tuple[int, int], strike: str | None, shape: tuple[str, bool]) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.run(self.turn(session, through, strike, shape))

    def request(self, session: Seen, dialect: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
        messages = [*session.messages, user("go on")]
        path = f"/sessions/{session.id}/v1/" + ("messages" if dialect == "messages" else "chat/completions")
        return path, {"messages": messages, "max_tokens": 50, "stream": stream, "model": "m"}

    def script(self) -> tuple[str, Script]:
        """A text that nobody said before, and the reply that waits to be it."""
        self.doors.num_asked += 1
        text = f"reply {self.doors.num_asked}"
        ids = (*self.doors.lives[0].renderer.tokenizer.encode(text), END)
        return text, Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=END), paused=True)

    async def turn(self, session: Seen, through: tuple[int, int], strike: str | None, shape: tuple[str, bool]) -> None:
        engine, (door, other) = self.doors.engine, self.doors.of(through)
        text, script = self.script()
        engine.plan(script)
        path, body = self.request(session, shape[0], stream=shape[1])
        num_before, key = len(engine.requests), f"key {self.doors.num_asked}"
        asking = asyncio.create_task(door.call("POST", path, body, idempotency_key=key))
        await engine.begun(num_before + 1)
        request_id = engine.requests[-1].request_id
        engine.step_turn(request_id, 2)
        if strike == "hang up":
            asking.cancel()
            await engine.idle()
            return
        if strike == "busy":
            another = {**body, "seed": 1}
            refused = await other.call("POST", path, another)
            assert (refused.status, refused.json()["error"]["code"]) == (409, "session_busy")
        if strike in ("abort", "abort all", "delete"):
            await self.strike(session, other, strike)
            answer = await asking
            assert answer.status == 200
            return
        if strike in ("stop", "late") and self.may_be_taken(session, other):
            text, script = await self.taken_over(
                session, other, asking, is_late=strike == "late", ask=(path, body, key)
            )
            answer = await door.call("POST", path, body, idempotency_key=key)
            other_answer = await other.call("POST", path, body, idempotency_key=key)
            assert len(engine.requests) == num_before + 2
        else:
            again = asyncio.create_task(other.call("POST", path, body, idempotency_key=key))
            engine.step_turn(request_id, len(script.ids))
            answer, other_answer = await asyncio.gather(asking, again)
            assert len(engine.requests) == num_before + 1  # whether it joined the turn or got its reply
        if strike == "retry":
            other_answer = await other.call("POST", path, body, idempotency_key=key)
            assert len(engine.requests) == num_before + 1
        for one in (answer, other_answer):
            assert (one.status, said_by(one, stream=shape[1])) == (200, text)
        if session.is_cut:
            session.turns.pop()
            session.is_cut = False
        session.messages += [user("go on"), {"role": "assistant", "content": text}]
        session.turns.append(list(script.ids))

    def may_be_taken(self, session: Seen, other: Live) -> bool:
        """Whether that worker may have the session, once its owner was stopped past its lease."""
        return False

    async def taken_over(
        self,
        session: Seen,
        other: Live,
        asking: asyncio.Task[Answer],
        *,
        is_late: bool,
        ask: tuple[str, dict[str, Any], str],
    ) -> tuple[str, Script]:
        """Stop the session's owner past its lease, and have the other worker be asked meanwhile: its reply. The owner's
        own turn is refused; `is_late`: it ends before the owner knows that its lease is over."""
        raise AssertionError("workers of one server keep their sessions")

    async def strike(self, session: Seen, door: Live, strike: str) -> None:
        if strike == "delete":
            assert (await door.call("DELETE", f"/sessions/{session.id}")).status == 204
            self.sessions.remove(session)
            for one in self.doors.lives:
                assert (await one.call("GET", f"/sessions/{session.id}")).status == 404
            return
        path = "/abort_request" if strike == "abort all" else f"/sessions/{session.id}/abort"
        answer = await door.call("POST", path, {"abort_all": True} if strike == "abort all" else {})
        assert answer.json() == {"aborted": 1}
        if session.is_cut:
            session.turns.pop()
        session.is_cut = True
        session.turns.append([])  # what it had drawn: only a beginning of it is known

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), through=THROUGH)
    def delete(self, data: st.DataObject, through: tuple[int, int]) -> None:
        session, (door, other) = data.draw(st.sampled_from(self.sessions)), self.doors.of(through)
        assert self.run(door.call("DELETE", f"/sessions/{session.id}")).status == 204
        assert self.run(other.call("DELETE", f"/sessions/{session.id}")).status == 404
        self.sessions.remove(session)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        views = [self.run(door.call("GET", f"/sessions/{session.id}")) for door in self.doors.lives]
        assert len({view.body for view in views}) == 1
        found = [output_ids(record) for record in views[0].json()["records"]]
        assert len(found) == len(session.turns)
        for kept, turn in zip(found, session.turns, strict=True):
            assert kept == turn or not turn

    @invariant()
    def every_worker_lists_the_sessions_that_there_are_and_nothing_runs(self) -> None:
        if not self.sessions:
            return
        pages = [self.run(door.call("GET", "/sessions?limit=1000")).json()["sessions"] for door in self.doors.lives]
        # Whether a session of another process is busy is not known where servers share a database.
        listed = [[{**one, "busy": one["busy"] or False} for one in page] for page in pages]
        assert all(page == listed[0] for page in listed)
        assert {session.id for session in self.sessions} <= {one["session_id"] for one in listed[0]}
        assert self.doors.engine.num_running == 0
        assert sum(live.manager.num_in_flight for live in self.doors.lives) == 0

    def teardown(self) -> None:
        for session in self.sessions:
            assert self.run(self.doors.lives[0].call("DELETE", f"/sessions/{session.id}")).status == 204
        assert self.run(self.doors.lives[0].call("GET", "/sessions")).json()["sessions"] == []


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
def served(servers: Sequence[AbstractAsyncContextManager[Workers]]) -> Iterator[Doors]:
    """The workers of some servers, on a loop of their own."""

    async def entered() -> list[Live]:
        return [live for server in servers for live in (await stack.enter_async_context(server)).lives]

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield Doors(runner.get_loop(), runner.run(entered()))
        finally:
            runner.run(stack.aclose())


def run_machine(machine: type[WorkerMachine], doors: Doors, *, examples: int, steps: int) -> None:
    """Run a machine's rules, by chance."""
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: machine(doors), settings=chosen)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(200)  # many requests, on a machine that may do other work too
@pytest.mark.parametrize("has_store", [False, True])
def test_whatever_is_asked_through_whichever_worker_is_what_one_server_says(
    has_store: bool, renderer: Renderer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path / "data"} if has_store else {}
    with served([two_workers(tmp_path, renderer, **options)]) as doors:
        run_machine(WorkerMachine, doors, examples=10, steps=15)
