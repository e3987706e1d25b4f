"""Drives sessions at once, each turn after turn, from a process of its own: a closed loop that costs little.

    python -m stenograph.bench.kit.load '{"host": …, "port": …, "sessions": 64, "turns": 5, …}'

The clients' bodies are joined from fragments that are made before the clock runs; replies are counted, not parsed. It
says `{"ready": …}`, then does one step for each line on stdin (`open`, `run`, `delete`), and reports each as a line of
JSON. The server's own reply is constant, so that what an agent would send back is known without reading it.
"""

import asyncio
import sys
import time
from dataclasses import dataclass, field

import msgspec

from stenograph.bench.guided.grammar import PROFILE_SCHEMA
from stenograph.bench.kit.client import BUFFER_BYTES, UNREAD, Failures, LoadClient, RequestFailed
from stenograph.bench.kit.conversation import Conversation, Messages, completion_parts
from stenograph.bench.kit.quantiles import quantile, summary_ms
from stenograph.bench.kit.reply_shape import ReplyShape, assistant_fragment, reply_body, reply_content
from stenograph.bench.kit.steps import obey, run_child


class LoadPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A load and its target. `direct`: the engine itself is driven, which knows no sessions.

    A client begins its turns anew, as another session would, until `least_s` have passed; only if `direct`. With
    `prompts`, a turn is a completion of so many texts, without a session; 0 is a chat. With `guided_tokens`, it is a
    streamed chat without a session, of so many tokens at most, held to `PROFILE_SCHEMA`. With `at_once`, so many
    clients are at work at a time, and none keeps its connection; 0 is all of them.
    """

    host: str
    port: int
    sessions: int
    turns: int
    message_bytes: int
    shape: ReplyShape
    prompts: int = 0
    guided_tokens: int = 0
    at_once: int = 0
    direct: bool = False
    least_s: float = 0.0
    limit_s: float = 600.0


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


class _NewSession(msgspec.Struct):
    session_id: str


async def open_session(client: LoadClient) -> str:
    """Open a session at a server; returns its id. Raises RequestFailed."""
    answer = await client.asked("POST", "/sessions", [b"{}"])
    try:
        return msgspec.json.decode(answer.body, type=_NewSession).session_id
    except msgspec.DecodeError as error:
        raise RequestFailed("not a session", str(error)) from error


def _guided_fields(num_tokens: int) -> dict[str, object]:
    """The fields of a guided stream's request beside its messages."""
    schema = {"name": "profile", "schema": PROFILE_SCHEMA, "strict": True}
    response_format = {"type": "json_schema", "json_schema": schema}
    return {"stream": True, "max_tokens": num_tokens, "response_format": response_format}


class Load:
    """All clients of one plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        num_messages = plan.sessions * plan.turns * max(1, plan.prompts)
        self._messages = Messages(num_bytes=plan.message_bytes, num_messages=num_messages)
        self._assistant = assistant_fragment(plan.shape)
        # A completion's reply is the server's own: it has less in it.
        self._least_bytes = len(reply_content(plan.shape)) if plan.prompts else len(reply_body(plan.shape))
        self._guided = b"]," + msgspec.json.encode(_guided_fields(plan.guided_tokens))[1:]
        if plan.guided_tokens:
            self._least_bytes = 0  # the model's reply, not the stand-in's; its last event is looked for
        buffer = memoryview(bytearray(BUFFER_BYTES))
        self._sessions = [
            _LoadSession(number, LoadClient(plan.host, plan.port, buffer)) for number in range(plan.sessions)
        ]
        self._places = asyncio.Semaphore(plan.at_once or plan.sessions)

    async def step(self, name: str) -> dict[str, object]:
        """Do one step with all clients at once; returns its report."""
        tally = _StepTally()
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self._plan.limit_s), asyncio.TaskGroup() as tasks:
                for session in self._sessions:
                    tasks.create_task(self._step_of(session, name, tally))
        except TimeoutError:
            error = RequestFailed("unfinished", f"the step took longer than {self._plan.limit_s:g} s")
            tally.failures.add(error)
        return _report(name, tally, time.perf_counter() - begun)

    async def _step_of(self, session: _LoadSession, name: str, tally: _StepTally) -> None:
        steps = {"open": self._open, "run": self._run, "delete": self._delete}
        async with self._places:
            try:
                await steps[name](session, tally)
            except RequestFailed as error:
                tally.failures.add(error)
            if self._plan.at_once:
                session.client.close()

    async def _open(self, session: _LoadSession, _: _StepTally) -> None:
        if self._plan.direct or self._plan.prompts or self._plan.guided_tokens:
            await session.client.connected()
            return
        session.session_id = await open_session(session.client)

    async def _run(self, session: _LoadSession, tally: _StepTally) -> None:
        until = time.perf_counter() + self._plan.least_s
        await self._turns(session, tally)
        while self._plan.direct and time.perf_counter() < until and not tally.failures.by_kind:
            session.conversation = Conversation()
            await self._turns(session, tally)

    async def _turns(self, session: _LoadSession, tally: _StepTally) -> None:
        path = "/v1/completions" if self._plan.prompts else "/v1/chat/completions"
        if session.session_id:
            path = f"/sessions/{session.session_id}{path}"
        for turn in range(self._plan.turns):
            number = session.number * self._plan.turns + turn
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
        if num_prompts := self._plan.prompts:
            first = number * num_prompts
            return completion_parts([self._messages.text(first + index) for index in range(num_prompts)])
        parts = session.conversation.request_parts(user)
        return [*parts[:-1], self._guided] if self._plan.guided_tokens else parts

    async def _turn(self, client: LoadClient, path: str, parts: list[bytes]) -> int:
        """Ask; returns how many bytes the answer has. Raises RequestFailed."""
        is_guided = self._plan.guided_tokens > 0
        answer = await client.asked("POST", path, parts, None if is_guided else UNREAD)
        if is_guided and b"data: [DONE]" not in answer.body:
            raise RequestFailed("unfinished", answer.body[-300:].decode(errors="replace"))
        return answer.num_bytes

    async def _delete(self, session: _LoadSession, _: _StepTally) -> None:
        session_id, session.session_id, session.conversation = session.session_id, "", Conversation()
        if session_id:
            await session.client.asked("DELETE", f"/sessions/{session_id}", [])

    async def run(self) -> None:
        """Do as stdin says; close all connections at the end."""
        try:
            await obey(self.step)
        finally:
            for session in self._sessions:
                session.client.close()


def _report(name: str, tally: _StepTally, seconds: float) -> dict[str, object]:
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


if __name__ == "__main__":
    run_child(Load(msgspec.json.decode(sys.argv[1], type=LoadPlan)).run())
