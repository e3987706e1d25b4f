"""Drives sessions at once, each turn after turn, from a process of its own: a closed loop that costs little.

    python -m stenograph.bench.load '{"host": …, "port": …, "sessions": 64, "turns": 5, …}'

The clients' bodies are joined from fragments that are made before the clock runs; replies are counted, not parsed. It
says `{"ready": …}`, then does one step for each line on stdin (`open`, `run`, `delete`), and reports each as a line of
JSON. The server's own reply is constant, so that what an agent would send back is known without reading it.
"""

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec
import uvloop

from stenograph.bench.conversation import Conversation, Messages, completion_parts
from stenograph.bench.quantiles import quantile, summary_ms
from stenograph.bench.reply_shape import ReplyShape, assistant_fragment, reply_body, reply_content

BUFFER_BYTES = 2**18
KEPT_BYTES = 2**14
"""How much of an answer is kept where it is to be read: a session's id, an error."""


class LoadPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to do, to whom. `direct`: the engine itself is driven, which knows no sessions.

    A client begins its turns anew, as another session would, until `least_s` have passed; only if `direct`. With
    `prompts`, a turn is a completion of so many texts, without a session; 0 is a chat.
    """

    host: str
    port: int
    sessions: int
    turns: int
    message_bytes: int
    shape: ReplyShape
    prompts: int = 0
    direct: bool = False
    least_s: float = 0.0
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`head_and_body` is cut, and empty where nothing was to be read."""

    status: int
    num_bytes: int
    head_and_body: bytes

    @property
    def body(self) -> bytes:
        return self.head_and_body.partition(b"\r\n\r\n")[2]


class ClientConnection(asyncio.BufferedProtocol):
    """A keep-alive connection with one request under way at a time. All share `buffer`, as in `standin`."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._keeps = False
        self._whole = False
        self._status = 0
        self._num_bytes = 0
        self._kept = b""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def request(self, parts: list[bytes], *, keeps: bool) -> "asyncio.Future[Answer]":
        """Send a request. Its answer's bytes are kept if asked, and if it is an error."""
        assert self._transport is not None
        self._keeps, self._whole, self._status, self._num_bytes, self._kept = keeps, False, 0, 0, b""
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        return self._waiting

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._num_bytes += nbytes
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            return
        if (self._keeps or self._status != 200) and len(self._kept) < KEPT_BYTES:
            self._kept += bytes(self._buffer[:nbytes])
        if self._whole and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(Answer(self._status, self._num_bytes, self._kept))

    def _fail(self, error: ConnectionError) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.close()

    # -- called by the parser

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self._whole = True


@dataclass(slots=True)
class Client:
    """One session's client. `number` is its own, from 0."""

    number: int
    conversation: Conversation = field(default_factory=Conversation)
    connection: ClientConnection | None = None
    session_id: str = ""


@dataclass(slots=True)
class Tally:
    """What a step came to. `errors` are counted by status and code."""

    num_ok: int = 0
    num_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list[float])
    by_turn_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    errors: Counter[str] = field(default_factory=Counter[str])
    first_error: str = ""

    def failed(self, kind: str, detail: str) -> None:
        self.errors[kind] += 1
        self.first_error = self.first_error or f"{kind}: {detail}"


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Opened(msgspec.Struct):
    session_id: str


def error_kind(answer: Answer) -> str:
    """An error's status, and its code if its body has one."""
    try:
        code = msgspec.json.decode(answer.body, type=_ErrorBody).error.code
    except msgspec.DecodeError:
        code = None
    return f"{answer.status} {code}" if code else str(answer.status)


class Load:
    """All clients of one plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        num_messages = plan.sessions * plan.turns * max(1, plan.prompts)
        self._messages = Messages(num_bytes=plan.message_bytes, num_messages=num_messages)
        self._assistant = assistant_fragment(plan.shape)
        # A completion's reply is the server's own: it has less in it.
        self._least_bytes = len(reply_content(plan.shape)) if plan.prompts else len(reply_body(plan.shape))
        self._clients = [Client(number) for number in range(plan.sessions)]
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    async def step(self, name: str) -> dict[str, object]:
        """Do one step with all clients at once; returns its report."""
        tally = Tally()
        steps = {"open": self._open, "run": self._run, "delete": self._delete}
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self._plan.limit_s), asyncio.TaskGroup() as tasks:
                for client in self._clients:
                    tasks.create_task(steps[name](client, tally))
        except TimeoutError:
            tally.failed("unfinished", f"the step took longer than {self._plan.limit_s:g} s")
        return _report(name, tally, time.perf_counter() - begun)

    async def _open(self, client: Client, tally: Tally) -> None:
        if self._plan.direct or self._plan.prompts:
            await self._connected(client, tally)
            return
        answer = await self._asked(client, tally, b"POST", b"/sessions", [b"{}"], keeps=True)
        if answer is not None and self._is_good(answer, tally, statuses=(200, 201)):
            client.session_id = msgspec.json.decode(answer.body, type=_Opened).session_id

    async def _run(self, client: Client, tally: Tally) -> None:
        until = time.perf_counter() + self._plan.least_s
        await self._turns(client, tally)
        while self._plan.direct and time.perf_counter() < until and not tally.errors:
            client.conversation = Conversation()
            await self._turns(client, tally)

    async def _turns(self, client: Client, tally: Tally) -> None:
        num_prompts = self._plan.prompts
        path = b"/v1/completions" if num_prompts else b"/v1/chat/completions"
        if client.session_id:
            path = b"/sessions/%b%b" % (client.session_id.encode(), path)
        for turn in range(self._plan.turns):
            number = client.number * self._plan.turns + turn
            user = self._messages.fragment(number)
            if num_prompts:
                first = number * num_prompts
                parts = completion_parts([self._messages.text(first + index) for index in range(num_prompts)])
            else:
                parts = client.conversation.request_parts(user)
            begun = time.perf_counter()
            answer = await self._asked(client, tally, b"POST", path, parts)
            took = time.perf_counter() - begun
            if answer is None or not self._is_good(answer, tally):
                continue  # an agent would go on with what it has: the turn is not in its history
            if answer.num_bytes < self._least_bytes:
                tally.failed("short", f"a reply of {answer.num_bytes} bytes")
            tally.num_ok += 1
            tally.num_bytes += answer.num_bytes
            tally.latencies_s.append(took)
            tally.by_turn_s.setdefault(turn, []).append(took)
            client.conversation.add_turn(user, self._assistant)

    async def _delete(self, client: Client, tally: Tally) -> None:
        if client.session_id:
            path = b"/sessions/%b" % client.session_id.encode()
            answer = await self._asked(client, tally, b"DELETE", path, [], keeps=True)
            if answer is not None:
                self._is_good(answer, tally, statuses=(200, 204))
        client.session_id, client.conversation = "", Conversation()

    def _is_good(self, answer: Answer, tally: Tally, statuses: tuple[int, ...] = (200,)) -> bool:
        if answer.status in statuses:
            return True
        tally.failed(error_kind(answer), answer.body[:300].decode(errors="replace"))
        return False

    async def _asked(
        self, client: Client, tally: Tally, method: bytes, path: bytes, parts: list[bytes], *, keeps: bool = False
    ) -> Answer | None:
        """The answer to a request, or None where the connection broke, which is counted."""
        connection = await self._connected(client, tally)
        if connection is None:
            return None
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            method,
            path,
            self._plan.host.encode(),
            sum(map(len, parts)),
        )
        try:
            return await connection.request([head, *parts], keeps=keeps)
        except ConnectionError as error:
            tally.failed("connection", str(error))
            return None

    async def _connected(self, client: Client, tally: Tally) -> ClientConnection | None:
        if client.connection is None or not client.connection.is_open:
            try:
                _, client.connection = await asyncio.get_running_loop().create_connection(
                    lambda: ClientConnection(self._buffer), self._plan.host, self._plan.port
                )
            except OSError as error:
                tally.failed("connect", str(error))
                return None
        return client.connection

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[None]:
        """Close all connections at the end."""
        try:
            yield
        finally:
            for client in self._clients:
                if client.connection is not None:
                    client.connection.close()


def _report(name: str, tally: Tally, seconds: float) -> dict[str, object]:
    medians = {turn: quantile(sorted(times), 0.5) for turn, times in tally.by_turn_s.items()}
    return {
        "step": name,
        "seconds": seconds,
        "num_ok": tally.num_ok,
        "num_bytes": tally.num_bytes,
        "latency": summary_ms(tally.latencies_s),
        "by_turn_ms": [medians[turn] * 1e3 for turn in sorted(medians)],
        "errors": dict(tally.errors),
        "first_error": tally.first_error,
    }


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


async def _obey(load: Load) -> None:
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.disable()
    _say({"ready": True})
    async with load.connected():
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            _say(await load.step(line))


def main() -> None:
    """Do as the plan in the first argument says."""
    load = Load(msgspec.json.decode(sys.argv[1], type=LoadPlan))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_obey(load))


if __name__ == "__main__":
    main()
