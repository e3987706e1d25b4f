"""Drives sessions at once, each turn after turn, on an event loop of its own: a closed loop that costs little.

The clients' bodies are joined from fragments that are made before the clock runs; replies are counted, not parsed. The
engine's own reply is constant, so that what an agent would send back is known without reading it.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Self

import msgspec

from benchmarks.guided.grammar import PROFILE_SCHEMA
from benchmarks.kit.artifact import Raw
from benchmarks.kit.client import (
    BUFFER_BYTES,
    Failures,
    LoadClient,
    RequestFailed,
    address,
    open_session,
    unread,
)
from benchmarks.kit.conversation import Conversation, Messages, completion_parts
from benchmarks.kit.quantiles import quantile, summary_ms
from benchmarks.kit.reply_shape import assistant_fragment, reply_body, reply_content
from benchmarks.kit.steps import new_runner, nothing_collected
from benchmarks.responsiveness.scenarios import Scenario

LIMIT_S = 600.0
"""The limit of a step."""


@dataclass(slots=True)
class _LoadSession:
    """One session's client. `number` is its own, from 0."""

    number: int
    client: LoadClient
    conversation: Conversation = field(default_factory=Conversation)
    session_id: str = ""


@dataclass(slots=True)
class _StepTally:
    """The results of a step."""

    num_ok: int = 0
    num_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list[float])
    by_turn_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    failures: Failures = field(default_factory=Failures)


def _guided_fields(num_tokens: int) -> dict[str, object]:
    """The fields of a guided stream's request beside its messages."""
    schema = {"name": "profile", "schema": PROFILE_SCHEMA, "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    return {"stream": True, "max_tokens": num_tokens, "response_format": response_format}


class Load:
    """All clients of a scenario. However a `with` of it is left, their connections are closed by then.

    `direct`: the engine itself is driven, which knows no sessions, and a client begins its turns anew, as another
    session would, until `least_s` have passed. With `at_once`, so many clients are at work at a time, and none keeps
    its connection; 0 is all of them.
    """

    def __init__(
        self, scenario: Scenario, url: str, *, direct: bool = False, least_s: float = 0.0, at_once: int = 0
    ) -> None:
        self._scenario = scenario
        self._has_sessions = not (direct or scenario.prompts or scenario.guided_tokens)
        self._least_s = least_s
        self._drops_connections = at_once > 0
        num_messages = scenario.sessions * scenario.turns * max(1, scenario.prompts)
        self._messages = Messages(num_bytes=scenario.message_bytes, num_messages=num_messages)
        self._assistant = assistant_fragment(scenario.shape)
        self._guided = b"]," + msgspec.json.encode(_guided_fields(scenario.guided_tokens))[1:]
        self._least_bytes = _least_bytes(scenario)
        self._held = contextlib.ExitStack()
        buffer = memoryview(bytearray(BUFFER_BYTES))
        self._sessions = [
            _LoadSession(number, LoadClient(*address(url), buffer)) for number in range(scenario.sessions)
        ]
        self._places = asyncio.Semaphore(at_once or scenario.sessions)

    def __enter__(self) -> Self:
        self._runner = self._held.enter_context(new_runner())
        self._held.enter_context(nothing_collected())
        return self

    def __exit__(self, *error: object) -> None:
        for session in self._sessions:
            session.client.close()
        self._held.close()

    def step(self, name: str) -> Raw:
        """Do one step (`open`, `run`, `delete`) with all clients at once; returns its report."""
        return self._runner.run(self._step(name))

    async def _step(self, name: str) -> Raw:
        tally = _StepTally()
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                for session in self._sessions:
                    tasks.create_task(self._step_of(session, name, tally))
        except TimeoutError:
            tally.failures.add(RequestFailed("unfinished", f"the step took longer than {LIMIT_S:g} s"))
        return _report(name, tally, time.perf_counter() - begun)

    async def _step_of(self, session: _LoadSession, name: str, tally: _StepTally) -> None:
        steps = {"open": self._open, "run": self._run, "delete": self._delete}
        async with self._places:
            try:
                await steps[name](session, tally)
            except RequestFailed as error:
                tally.failures.add(error)
            if self._drops_connections:
                session.client.close()

    async def _open(self, session: _LoadSession, _: _StepTally) -> None:
        if self._has_sessions:
            session.session_id = await open_session(session.client)
        else:
            await session.client.connected()

    async def _run(self, session: _LoadSession, tally: _StepTally) -> None:
        until = time.perf_counter() + self._least_s
        await self._turns(session, tally)
        while time.perf_counter() < until and not tally.failures.by_kind:
            session.conversation = Conversation()
            await self._turns(session, tally)

    async def _turns(self, session: _LoadSession, tally: _StepTally) -> None:
        path = "/v1/completions" if self._scenario.prompts else "/v1/chat/completions"
        if session.session_id:
            path = f"/sessions/{session.session_id}{path}"
        for turn in range(self._scenario.turns):
            number = session.number * self._scenario.turns + turn
            user = self._messages.fragment(number)
            parts = self._parts(session, number, user)
            begun = time.perf_counter()
            try:
                num_bytes = await self._turn(session.client, path, parts)
            except RequestFailed as error:
                tally.failures.add(error)  # an agent would go on with what it has: the turn is not in its history
                continue
            took = time.perf_counter() - begun
            if num_bytes < self._least_bytes:
                tally.failures.add(RequestFailed("short", f"a reply of {num_bytes} bytes"))
            tally.num_ok += 1
            tally.num_bytes += num_bytes
            tally.latencies_s.append(took)
            tally.by_turn_s.setdefault(turn, []).append(took)
            session.conversation.add_turn(user, self._assistant)

    def _parts(self, session: _LoadSession, number: int, user: bytes) -> list[bytes]:
        """The body of a turn in pieces."""
        if num_prompts := self._scenario.prompts:
            first = number * num_prompts
            return completion_parts([self._messages.text(first + index) for index in range(num_prompts)])
        parts = session.conversation.request_parts(user)
        return [*parts[:-1], self._guided] if self._scenario.guided_tokens else parts

    async def _turn(self, client: LoadClient, path: str, parts: list[bytes]) -> int:
        """Ask; returns how many bytes the answer has. Raises RequestFailed."""
        is_guided = self._scenario.guided_tokens > 0
        answer = await client.asked("POST", path, parts, None if is_guided else unread)
        if is_guided and b"data: [DONE]" not in answer.body:
            raise RequestFailed("unfinished", answer.body[-300:].decode(errors="replace"))
        return answer.num_bytes

    async def _delete(self, session: _LoadSession, _: _StepTally) -> None:
        session_id, session.session_id, session.conversation = session.session_id, "", Conversation()
        if session_id:
            await session.client.asked("DELETE", f"/sessions/{session_id}", [])


def _least_bytes(scenario: Scenario) -> int:
    """The size of a reply that is whole."""
    if scenario.guided_tokens:
        return 0  # the model's reply, not the stand-in's; its last event is looked for
    # A completion's reply is the server's own: it has less in it.
    return len(reply_content(scenario.shape)) if scenario.prompts else len(reply_body(scenario.shape))


def _report(name: str, tally: _StepTally, seconds: float) -> Raw:
    medians = {turn: quantile(sorted(times), 0.5) for turn, times in tally.by_turn_s.items()}
    return {
        "step": name,
        "seconds": seconds,
        "num_ok": tally.num_ok,
        "num_bytes": tally.num_bytes,
        "latency": summary_ms(tally.latencies_s),
        "by_turn_ms": [medians[turn] * 1e3 for turn in sorted(medians)],
        **tally.failures.report(),
    }
