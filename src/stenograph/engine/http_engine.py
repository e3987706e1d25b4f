"""An engine that is an HTTP server, as an `Engine`: what all of them share.

Owns the tasks of its requests, its aborts and its probe; `aclose` awaits them all. Knows no engine: which bytes go
where, and what those that come back mean, a `Dialect` says. An engine may go on generating for a client that has hung
up, so that every way out before the reply was whole also aborts by the request's id, where the engine can.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from stenograph.core.errors import (
    EngineUnavailable,
    StenographError,
    UpstreamError,
    UpstreamRefused,
    UpstreamUnreachable,
)
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId
from stenograph.engine.base import Capabilities, EngineHealth, EngineState, GenerateRequest
from stenograph.engine.transport import EngineTransport, Headers, HttpReply
from stenograph.offload.body_slots import BodySlots

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_ABORT_PAUSE_S = 0.1
LONGEST_ABORT_PAUSE_S = 2.0
ABORT_DEADLINE_S = 5.0
PROBE_DEADLINE_S = 5.0
CLOSE_GRACE_S = 2.0
"""How long `aclose` waits for the last aborts to be told."""
AFFINITY_HEADER = "x-smg-routing-key"
"""By which a router keeps a session on one worker."""
NOT_THERE = (404, 405)
"""The statuses of a path that a server does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEngineOptions:
    """Where an engine's server, or a router before several, is."""

    url: str
    connect_timeout_s: float = 5.0
    probe_pause_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A POST of JSON. `streams`: the reply is asked for as server-sent events."""

    path: str
    body: bytes
    headers: Headers = ()
    streams: bool = False


class Reading(Protocol):
    """One generation's reply as it is read. Every method raises UpstreamInvalid, naming the law that was broken, or the
    error that the engine tells within a 200.

    Whoever reads holds the chunk that carries `finish` back until the engine has said all that belongs to it, so that
    the last chunk is the last: a connection that is cut after it cuts nothing off.
    """

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        """The chunks of a 200 that came at once."""
        ...

    def event(self, data: bytes) -> Sequence[Chunk]:
        """The chunks that one event's data brings; those of the terminal event are nobody's business here."""
        ...

    def end(self) -> Sequence[Chunk]:
        """What was held back until the stream's proper end."""
        ...


class Ask(Protocol):
    """A request to the engine's server outside of generations. Raises UpstreamError."""

    async def __call__(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply: ...


@runtime_checkable
class Settles(Protocol):
    """A reading that may have enough before its stream ends, and may then have to ask for what was left out."""

    @property
    def has_enough(self) -> bool:
        """Whether nothing more is wanted of the stream; leaving it hangs up."""
        ...

    async def settle(self, ask: Ask) -> Sequence[Chunk]:
        """The chunks that come after the reply and before `end`. Raises UpstreamError."""
        ...


class Dialect(Protocol):
    """One engine's HTTP: field mapping and quirks, and nothing else. Holds no task and no connection."""

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do; settled once `discover` has returned."""
        ...

    @property
    def probe_paths(self) -> Sequence[str]:
        """Paths to GET for health; the next one is tried where the one before is not there, and one has to be."""
        ...

    async def discover(self, ask: Ask) -> None:
        """Find out what this server can do, each time it comes up. Raises UpstreamError if it does not tell."""
        ...

    def call(self, request: GenerateRequest) -> Call:
        """The request of a generation. Raises InvalidRequest for what the engine cannot do."""
        ...

    def reading(self, request: GenerateRequest) -> Reading:
        """The reader of its reply."""
        ...

    def refusal(self, http: HttpReply, request: GenerateRequest) -> StenographError:
        """The error that a status other than 200 is, as the answer to `request`."""
        ...

    def abort_call(self, request_id: RequestId) -> Call | None:
        """The request that ends a generation early; None where hanging up is the only way."""
        ...


def routing_headers(request: GenerateRequest) -> Headers:
    """What says to a router which session a generation is of, if it is of any."""
    return () if request.affinity_key is None else ((AFFINITY_HEADER, request.affinity_key),)


def passed_through(http: HttpReply) -> UpstreamRefused:
    """A refusal that the client gets as the engine wrote it."""
    return UpstreamRefused(status=http.status, content_type=http.content_type, headers=http.headers, body=http.body)


@dataclass(slots=True)
class _Running:
    """A generation under way. `is_whole`: the engine has said all, and draws no more. `was_cut`: aborted by hanging
    up, because the engine knows no other way."""

    exchange: "asyncio.Task[None]"
    aborter: "asyncio.Task[None] | None" = None
    is_whole: bool = False
    was_cut: bool = False


class HttpEngine:
    """A server somewhere on the network that speaks one dialect."""

    def __init__(self, options: HttpEngineOptions, dialect: Dialect, body_slots: BodySlots | None = None) -> None:
        self._options = options
        self._dialect = dialect
        self._name = dialect.capabilities.engine
        self._transport = EngineTransport(options.url, options.connect_timeout_s, body_slots)
        self._health = EngineHealth(state=EngineState.STARTING, detail="not probed yet")
        self._is_discovered = False
        self._running: dict[RequestId, _Running] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._doubt = asyncio.Event()
        self._closing = False

    def __repr__(self) -> str:
        return f"<HttpEngine {self._name} {self._options.url} {self._health.state} {len(self._running)} running>"

    @property
    def url(self) -> str:
        """Where its server is."""
        return self._options.url

    @property
    def capabilities(self) -> Capabilities:
        return self._dialect.capabilities

    @property
    def num_running(self) -> int:
        """Generations whose reply is not whole yet."""
        return len(self._running)

    def health(self) -> EngineHealth:
        return self._health

    async def start(self) -> None:
        """Open the connection pool and probe once. An engine that is not there yet is DOWN, not an error."""
        self._transport.open()
        await self._probe()
        self._own(self._watch(), name=f"{self._name}-probe")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Draw. Raises what the dialect makes of any status but 200, as a rule UpstreamRefused."""
        if self._closing:
            raise EngineUnavailable("The engine was stopped.")
        request_id = request.request_id
        assert request_id not in self._running, "a request id is used once"
        call, reading = self._dialect.call(request), self._dialect.reading(request)
        # Unbounded: its reader does no more than look at a chunk, and gives up at the first beyond max_tokens.
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        exchange = self._own(self._exchange(request, call, reading, chunks), name=f"{self._name}-{request_id}")
        # A task that is cancelled before it runs never reaches a `finally` of its own.
        exchange.add_done_callback(lambda _: chunks.put_nowait(None))
        running = self._running[request_id] = _Running(exchange=exchange)
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
        finally:
            self._end(request_id)
        self._judge(exchange, was_cut=running.was_cut)
        if running.was_cut:
            yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))

    async def abort(self, request_id: RequestId) -> bool:
        """Ask the engine until the generation ends: an abort that overtakes its request is forgotten there."""
        running = self._running.get(request_id)
        if running is None or running.aborter is not None or running.is_whole or running.was_cut:
            return running is not None
        call = self._dialect.abort_call(request_id)
        if call is None:
            running.was_cut = True
            running.exchange.cancel()
        else:
            work = self._abort_until_ended(request_id, call)
            running.aborter = self._own(work, name=f"{self._name}-abort-{request_id}")
        return True

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> HttpReply:
        """A request to the engine as it is, for routes that record nothing; any status is an answer."""
        return await self._transport.forward(method, target, headers, body)

    async def aclose(self) -> None:
        """End everything: generations with EngineUnavailable, after the engine was told to abort them."""
        self._closing = True
        self._health = EngineHealth(state=EngineState.STOPPED, detail="stopped")
        for task in self._tasks:
            if task.get_name() == f"{self._name}-probe":
                task.cancel()
        for request_id in list(self._running):
            self._end(request_id)
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_GRACE_S)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._transport.aclose()

    # -- generations

    async def _exchange(
        self, request: GenerateRequest, call: Call, reading: Reading, chunks: "asyncio.Queue[Chunk | None]"
    ) -> None:
        """Send one request and hand its chunks on. What it raises, `generate` raises."""
        request_id = request.request_id
        if not call.streams:

            def decode(http: HttpReply) -> Sequence[Chunk]:
                return self._whole(request, http, reading)

            self._hand_on(request_id, await self._transport.post(call.path, call.body, call.headers, decode), chunks)
        else:
            await self._read_events(request, call, reading, chunks)
        if isinstance(reading, Settles):
            self._hand_on(request_id, await reading.settle(self._ask), chunks)
        self._hand_on(request_id, reading.end(), chunks)
        if not self._running[request_id].is_whole:
            raise UpstreamUnreachable("The engine's stream ended before the generation did.", reply_began=True)

    async def _read_events(
        self, request: GenerateRequest, call: Call, reading: Reading, chunks: "asyncio.Queue[Chunk | None]"
    ) -> None:
        try:
            async with aclosing(self._transport.events(call.path, call.body, call.headers)) as events:
                async for event in events:
                    if isinstance(event, bytes):
                        self._hand_on(request.request_id, reading.event(event), chunks)
                    else:  # it does not stream after all, or refuses
                        self._hand_on(request.request_id, self._whole(request, event, reading), chunks)
                    if isinstance(reading, Settles) and reading.has_enough:
                        break
        except UpstreamUnreachable:
            if not self._running[request.request_id].is_whole:
                raise
            # Its end was handed on: by its own word the reply was whole before its connection was cut.

    def _whole(self, request: GenerateRequest, http: HttpReply, reading: Reading) -> Sequence[Chunk]:
        self._is_whole(request.request_id)
        if http.status != 200:
            raise self._dialect.refusal(http, request)
        return reading.whole(http)

    def _hand_on(self, request_id: RequestId, read: Sequence[Chunk], chunks: "asyncio.Queue[Chunk | None]") -> None:
        for chunk in read:
            if chunk.finish is not None:
                self._is_whole(request_id)
            chunks.put_nowait(chunk)

    def _is_whole(self, request_id: RequestId) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.is_whole = True

    def _end(self, request_id: RequestId) -> None:
        """Forget a generation; where its reply is not whole, hang up and abort it. Does nothing the second time."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if running.aborter is not None:
            running.aborter.cancel()
        running.exchange.cancel()
        if running.is_whole:
            return
        call = self._dialect.abort_call(request_id)
        if call is not None:
            self._own(self._tell_abort(request_id, call), name=f"{self._name}-abort-{request_id}")

    def _judge(self, exchange: "asyncio.Task[None]", *, was_cut: bool) -> None:
        """Raise what the exchange ended with, and learn from it how the engine is."""
        if exchange.cancelled():
            if was_cut and not self._closing:
                return
            raise EngineUnavailable("The turn was lost: the engine was stopped.")
        error = exchange.exception()
        if isinstance(error, UpstreamUnreachable):
            self._become(EngineState.DOWN, error.message)
            self._doubt.set()
        elif error is None:
            self._become(EngineState.READY, self._dialect.capabilities.note)
        if error is not None:
            raise error

    async def _abort_until_ended(self, request_id: RequestId, call: Call) -> None:
        pause_s = FIRST_ABORT_PAUSE_S
        while True:  # until `_end` cancels it
            await self._tell_abort(request_id, call)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_ABORT_PAUSE_S)

    async def _tell_abort(self, request_id: RequestId, call: Call) -> None:
        where = self._options.url
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                status = await self._transport.post(call.path, call.body, call.headers, lambda reply: reply.status)
        except UpstreamError as error:
            log.warning("could not abort %s at %s: %s", request_id, where, error.message)
        except TimeoutError:
            log.warning("could not abort %s at %s within %g s", request_id, where, ABORT_DEADLINE_S)
        else:
            if status != 200:
                log.warning("could not abort %s at %s: status %d", request_id, where, status)

    # -- health

    async def _watch(self) -> None:
        """Probe now and then, and at once when a request has failed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.probe_pause_s):
                    await self._doubt.wait()
            self._doubt.clear()
            await self._probe()

    async def _probe(self) -> None:
        path = self._dialect.probe_paths[0]
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                fault = await self._probed_fault()
                if not fault and not self._is_discovered:
                    await self._dialect.discover(self._ask)
                    self._is_discovered = True
        except UpstreamError as error:
            self._become(EngineState.DOWN, error.message)
        except TimeoutError:
            self._become(EngineState.DOWN, f"it did not answer GET {path} within {PROBE_DEADLINE_S:g} s")
        else:
            if fault:
                self._become(EngineState.DOWN, fault)
            else:
                self._become(EngineState.READY, self._dialect.capabilities.note)

    async def _probed_fault(self) -> str:
        """What the first path that is there says to be wrong, or that none is; empty where nothing is wrong."""
        told: list[str] = []
        for path in self._dialect.probe_paths:
            status = (await self._ask("GET", path)).status
            if status >= 500:
                return f"GET {path} answered {status}"
            if status not in NOT_THERE:
                return ""
            told.append(f"GET {path} answered {status}")
        return f"{', '.join(told)}: there is no {self._name} server at this address"

    async def _ask(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
        of_body = (("content-type", "application/json"),) if body else ()
        return await self._transport.forward(method, target, (*of_body, *headers), body)

    def _become(self, state: EngineState, detail: str = "") -> None:
        """Keep what was learned of the engine; a change is logged."""
        if self._closing:
            return
        if state is not self._health.state:
            level = logging.INFO if state is EngineState.READY else logging.WARNING
            log.log(level, "the engine at %s is %s%s", self._options.url, state, detail and f": {detail}")
        if state is not EngineState.READY:
            self._is_discovered = False  # what comes up again may be another version
        self._health = EngineHealth(state=state, detail=detail)

    # -- tasks

    def _own(self, work: Coroutine[None, None, T], *, name: str) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StenographError):
            log.error("%s failed", task.get_name(), exc_info=error)
