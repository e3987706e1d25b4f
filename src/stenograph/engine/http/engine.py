"""An HTTP server as an `Engine`: the part common to all adapters.

Owns the tasks of its requests, its aborts and its probe; `aclose` awaits them all. Knows no engine: an `EngineAdapter`
makes the requests and reads the replies. An engine may go on generating after its client has
hung up, so every way out before the reply was whole also aborts by the request's id, where the engine can.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec import Struct
from yarl import URL

from stenograph.core.errors import EngineUnavailable, StartupError, StenographError, UpstreamError, UpstreamUnreachable
from stenograph.core.loaded import entry
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId
from stenograph.core.weights import UNNAMED, ControlAnswer, LoraCommand, NameWeights, UpdateWeights, WeightCommand
from stenograph.engine.base import AFFINITY_HEADER, Capabilities, Engine, EngineHealth, EngineState, GenerateRequest
from stenograph.engine.http.adapter import (
    Ask,
    Call,
    ControlReply,
    EngineAdapter,
    EngineReading,
    carried_out,
    probed_fault,
)
from stenograph.engine.http.transport import DEFAULT_MAX_REPLY_BYTES, EngineTransport, Headers, HttpReply
from stenograph.offload.body_slots import BodySlots

if TYPE_CHECKING:
    from stenograph.engine.base import EngineLoad
    from stenograph.engine.scoring import ScoreRequest, Scores

log = logging.getLogger(__name__)

T = TypeVar("T")

BY_LORA = "stenograph.engine.http.loras:sampled_by_lora"
FIRST_ABORT_PAUSE_S, LONGEST_ABORT_PAUSE_S = 0.1, 2.0
ABORT_DEADLINE_S = PROBE_DEADLINE_S = 5.0
SESSION_HEADER = "x-session-id"  # the same for other routers
CLOSE_GRACE_S = 2.0  # for `aclose` to send the last aborts
MAX_SAID = 8  # reasons in the log for one outage; they may differ in more than matters


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEngineOptions:
    """Address of an engine's server, or of a router before several, and the key for it. `control_timeout_s`:
    how long it may take to load weights. `check` asks more of it when it comes up; its StartupError means: not to
    be used as it is."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 5.0
    probe_pause_s: float = 3.0
    control_timeout_s: float = 600.0
    max_reply_bytes: int = DEFAULT_MAX_REPLY_BYTES
    check: Callable[[EngineAdapter, Ask], Awaitable[None]] | None = None


class _RunningExchange(Struct):
    """A generation under way. `routing` are the headers that tell a router its session, if it has any, and its
    trace. `waiting` is the task that waits for the engine; None while none does. `is_whole`: the engine has sent all,
    and samples no more. `was_cut`: aborted by closing the connection, because the engine knows no other way."""

    request: GenerateRequest
    reading: EngineReading
    routing: Headers
    waiting: "asyncio.Task[object] | None" = None
    was_stopped: bool = False
    aborter: "asyncio.Task[None] | None" = None
    is_whole: bool = False
    was_cut: bool = False

    def stop(self) -> None:
        """End the wait for the engine, and so close the connection."""
        if self.waiting is not None and not self.was_stopped:
            self.was_stopped = self.waiting.cancel()


class HttpEngine(Engine):
    """A server somewhere on the network, spoken to by one adapter."""

    def __init__(self, options: HttpEngineOptions, adapter: EngineAdapter, body_slots: BodySlots | None = None) -> None:
        self._options = options
        self._adapter = adapter
        self._name = adapter.capabilities.engine
        self._address = str(URL(options.url, encoded=True).with_user(None)) if "@" in options.url else options.url
        """The address for logs and displays: without a name and a password."""
        self._transport = EngineTransport(
            options.url,
            options.connect_timeout_s,
            body_slots,
            max_reply_bytes=options.max_reply_bytes,
            reuses_connections=adapter.names_requests,
            api_key=options.api_key,
        )
        self._health = EngineHealth(state=EngineState.STARTING, detail="not probed yet")
        self._is_discovered = False
        self._version: str | None = None  # of the weights that it took from here, or has to take
        self._had = set[str]()  # names of weights that it has had, by its own word or ours
        self._loras = dict[str, str]()  # folders of those that it had to load; "": it has refused
        self._lacks = ""  # why it gets no turns although it is there: it has other weights
        self._said: set[str] = set()  # of the reasons why it is down, those that the log has
        self._running: dict[RequestId, _RunningExchange] = {}
        self._was_aborted = dict[RequestId, bool]()  # of the turns that may be asked again
        self._tasks: set[asyncio.Task[object]] = set()
        self._doubt = asyncio.Event()
        self._closing = False

    def __repr__(self) -> str:
        return f"<HttpEngine {self._name} {self._address} {self._health.state} {len(self._running)} running>"

    @property
    def name(self) -> str:
        return self._address

    @property
    def capabilities(self) -> Capabilities:
        return self._adapter.capabilities

    @property
    def forwards(self) -> bool:
        return True

    @property
    def num_running(self) -> int:
        """Generations without a whole reply yet."""
        return len(self._running)

    def health(self) -> EngineHealth:
        return self._health

    async def start(self) -> None:
        """Open the connection pool and probe once. An absent engine is DOWN, not an error. Raises
        StartupError for one that fails the options' check; if it comes up later, it is DOWN."""
        self._transport.open()
        await self._probe()
        self._own(self._watch(), name=f"{self._name}-probe")

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Sample. Raises the adapter's error for any status but 200, as a rule UpstreamRefused."""
        again = self._adapter.media_sampler if request.prompt.media else ""
        chunks = entry(again)(self._generated, request, self._was_aborted) if again else self._generated(request)
        return chunks if request.policy is None else entry(BY_LORA)(chunks, self._adapter, request.policy, self._loras)

    async def _generated(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self._closing:
            raise EngineUnavailable("The engine was stopped.")
        request_id = request.request_id
        assert request_id not in self._running, "a request id is used once"
        call, reading = self._adapter.call(request)
        key = request.affinity_key
        routing: Headers = () if key is None else ((AFFINITY_HEADER, key), (SESSION_HEADER, key))
        if request.trace is not None:
            routing = (*routing, *request.trace.headers())
        running = self._running[request_id] = _RunningExchange(request, reading, routing)
        exchange = None
        try:
            if call.streams:
                # Unbounded: its reader does no more than look at a chunk, and gives up at the first beyond max_tokens.
                queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
                work = self._streamed(running, call, queue.put_nowait)
                exchange = self._own(work, name=f"{self._name}-{request_id}")
                # A task that is cancelled before it runs never reaches a `finally` of its own.
                exchange.add_done_callback(lambda _: queue.put_nowait(None))
                running.waiting = exchange
                while (one := await queue.get()) is not None:
                    yield one
            else:
                for chunk in await self._replied(running, call):
                    yield chunk
        finally:
            self._end(request_id)
        if exchange is not None and exchange.cancelled():
            self._check_cut(running)
        elif exchange is not None:
            self._judge(exchange.exception())
        if running.was_cut:
            yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))

    async def score(self, request: "ScoreRequest") -> "Scores":
        if request.policy is not None:
            entry("stenograph.engine.http.loras:check_loaded")(self._adapter, request.policy, self._loras)
        scorer = self._adapter.scorer
        scored = entry(scorer)(self._adapter, request, self._ask) if scorer else super().score(request)
        try:
            return cast("Scores", await scored)
        except asyncio.CancelledError:
            self._abort_left(request.request_id)
            raise

    async def abort(self, request_id: RequestId) -> bool:
        """Ask the engine until the generation ends: an abort that overtakes its request is forgotten there."""
        running = self._running.get(request_id)
        if request_id in self._was_aborted:
            self._was_aborted[request_id] = True
        if running is None or running.aborter is not None or running.is_whole or running.was_cut:
            return running is not None
        call = self._adapter.abort_call(request_id)
        if call is None:
            running.was_cut = True
            running.stop()
        else:
            work = self._abort_until_ended(request_id, call)
            running.aborter = self._own(work, name=f"{self._name}-abort-{request_id}")
        return True

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> HttpReply:
        """A request to the engine as it is, for routes without a record; any status is an answer."""
        return await self._transport.forward(method, target, headers, body)

    def end_session(self, key: str) -> None:
        if not self._closing and (call := self._adapter.close_call(key)) is not None:
            self._own(self._tell("close", key, call), name=f"{self._name}-close-{key}")

    async def find_load(self) -> "EngineLoad | None":
        return await self._adapter.find_load(self._ask)

    async def find_version(self) -> str | None:
        if self._version is not None and not self._lacks:
            return self._version
        with contextlib.suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(PROBE_DEADLINE_S):
                return await self._adapter.find_version(self._ask)
        return None

    async def find_policies(self) -> None:
        self._is_discovered = False
        await self._look()

    def require_version(self, version: str) -> None:
        self._lack(version, "others")

    def follow_version(self, version: str | None, lacking: Collection[str]) -> None:
        if version is not None and self.name in lacking:
            self.require_version(version)
            return
        if self._has_to_have(version):
            self._become(EngineState.READY, self._adapter.capabilities.note)
            self._doubt.set()

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        calls, told = self._adapter.control_calls(command), ControlReply()
        try:
            async with asyncio.timeout(self._options.control_timeout_s):
                told = await carried_out(self._adapter, self._ask, command, calls)
        except UpstreamError as error:
            told = ControlReply(problem=error.message)
        except TimeoutError:
            told = ControlReply(problem=f"it did not answer within {self._options.control_timeout_s:g} s")
        if isinstance(command, LoraCommand):
            entry("stenograph.engine.http.loras:remember")(self._loras, command, told.problem)
        if not told.problem and isinstance(command, UpdateWeights | NameWeights):
            self._has_to_have(command.version)
            self._become(EngineState.READY, self._adapter.capabilities.note)
            self._doubt.set()
        return (ControlAnswer(name=self.name, problem=told.problem, note=told.note, num_paused=told.num_paused),)

    async def aclose(self) -> None:
        """End everything: generations with EngineUnavailable, after their aborts were sent to the engine."""
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

    async def _replied(self, running: _RunningExchange, call: Call) -> Sequence[Chunk]:
        """The chunks of a whole reply; none where it was cut. The turn waits for it itself: unlike a stream, with its
        task and queue, it has nothing to read meanwhile. Raises as `generate` does."""
        read: Sequence[Chunk] = ()
        running.waiting = task = asyncio.current_task()
        assert task is not None, "a turn has a task"
        num_before = task.cancelling()
        headers = (*call.headers, *running.routing)
        try:
            read = await self._transport.post(call.path, call.body, headers, partial(self._whole, running))
            if not read or read[-1].finish is None:
                await self._settle(running, (read := [*read]).append)
        except asyncio.CancelledError:
            if not running.was_stopped or task.cancelling() > num_before + 1:
                raise  # the turn is cancelled
            self._check_cut(running)
        except UpstreamUnreachable as error:
            self._judge(error)
        else:
            if self._health.state is not EngineState.READY:
                self._become(EngineState.READY, self._adapter.capabilities.note)
        finally:
            running.waiting = None
            if running.was_stopped:
                task.uncancel()
        return read

    async def _streamed(self, running: _RunningExchange, call: Call, put: Callable[[Chunk], object]) -> None:
        """Send one request and hand the chunks of its stream on. `generate` raises its errors."""
        await running.reading.begin(partial(self._ask, routing=running.routing))
        try:
            await self._read_events(running, call, put)
        except UpstreamUnreachable:
            if not running.is_whole:  # else its end was handed on: its reply was whole before its connection was cut
                raise
        except UpstreamError as error:
            running.is_whole = error.has_ended  # an abort could meet a second try, which has the same id
            raise
        await self._settle(running, put)

    async def _settle(self, running: _RunningExchange, put: Callable[[Chunk], object]) -> None:
        """Hand on the chunks after a reply without the generation's end: the rest, asked for separately."""
        ask = partial(self._ask, routing=running.routing)
        self._hand_on(running, await running.reading.settle(ask), put)
        self._hand_on(running, running.reading.end(), put)
        if not running.is_whole:
            raise UpstreamUnreachable("The engine's stream ended before the generation did.", reply_began=True)

    async def _read_events(self, running: _RunningExchange, call: Call, put: Callable[[Chunk], object]) -> None:
        headers = (*call.headers, *running.routing)
        async with aclosing(self._transport.events(call.path, call.body, headers)) as events:
            async for event in events:
                if isinstance(event, bytes):
                    self._hand_on(running, running.reading.event(event), put)
                else:  # it does not stream after all, or refuses
                    self._hand_on(running, self._whole(running, event), put)
                if running.reading.has_enough:
                    break

    def _whole(self, running: _RunningExchange, http: HttpReply) -> Sequence[Chunk]:
        running.is_whole = True
        if http.status != 200:
            raise self._adapter.refusal(http, running.request)
        return running.reading.whole(http)

    def _hand_on(self, running: _RunningExchange, read: Sequence[Chunk], put: Callable[[Chunk], object]) -> None:
        for chunk in read:
            if chunk.finish is not None:
                running.is_whole = True
            put(chunk)

    def _end(self, request_id: RequestId) -> None:
        """Forget a generation; where its reply is not whole, hang up and abort it. Does nothing the second time."""
        if (running := self._running.pop(request_id, None)) is None:
            return
        if running.aborter is not None:
            running.aborter.cancel()
        running.stop()
        if not running.is_whole:
            self._abort_left(request_id)

    def _abort_left(self, request_id: RequestId) -> None:
        if (call := self._adapter.abort_call(request_id)) is not None:
            self._own(self._tell("abort", request_id, call), name=f"{self._name}-abort-{request_id}")

    def _check_cut(self, running: _RunningExchange) -> None:
        """Raise EngineUnavailable for a stopped wait, unless an abort stopped it."""
        if not running.was_cut or self._closing:
            raise EngineUnavailable("The turn was lost: the engine was stopped.")

    def _judge(self, error: BaseException | None) -> None:
        """Raise the error of an exchange, if any, and learn from it how the engine is."""
        if isinstance(error, UpstreamUnreachable):
            self._become(EngineState.DOWN, error.reason)
            self._doubt.set()
        elif error is None:
            self._become(EngineState.READY, self._adapter.capabilities.note)
        if error is not None:
            raise error

    async def _abort_until_ended(self, request_id: RequestId, call: Call) -> None:
        pause_s = FIRST_ABORT_PAUSE_S
        while True:  # until `_end` cancels it
            await self._tell("abort", request_id, call)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_ABORT_PAUSE_S)

    async def _tell(self, what: str, key: str, call: Call) -> None:
        where, state = self._address, self._health.state
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                status = await self._transport.post(call.path, call.body, call.headers, lambda reply: reply.status)
        except UpstreamError as error:
            is_known = isinstance(error, UpstreamUnreachable) and EngineState.DOWN in (state, self._health.state)
            level = logging.DEBUG if is_known else logging.WARNING
            log.log(level, "could not %s %s at %s: %s", what, key, where, error.message)
        except TimeoutError:
            log.warning("could not %s %s at %s within %g s", what, key, where, ABORT_DEADLINE_S)
        else:
            if status != 200:
                log.warning("could not %s %s at %s: status %d", what, key, where, status)

    async def _watch(self) -> None:
        """Probe now and then, and at once when a request has failed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.probe_pause_s):
                    await self._doubt.wait()
            self._doubt.clear()
            await self._look()

    async def _look(self) -> None:
        """Find out how the engine is; one that fails the options' check is down."""
        try:
            await self._probe()
        except StartupError as error:
            self._become(EngineState.DOWN, str(error))

    async def _probe(self) -> None:
        """Find out how the engine is. Raises StartupError as the options' check does."""
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                fault = await probed_fault(self._adapter, self._ask)
                if not fault and not self._is_discovered:
                    await self._adapter.discover(self._ask)
                    await self._check_version()
            if not fault and not self._is_discovered and self._options.check is not None:
                await self._options.check(self._adapter, self._ask)
            self._is_discovered = not fault
        except UpstreamError as error:
            self._become(EngineState.DOWN, error.reason if isinstance(error, UpstreamUnreachable) else error.message)
        except TimeoutError:
            self._become(
                EngineState.DOWN, f"it did not answer GET {self._adapter.probe_paths[0]} within {PROBE_DEADLINE_S:g} s"
            )
        else:
            self._become(EngineState.DOWN if fault else EngineState.READY, fault or self._adapter.capabilities.note)

    async def _check_version(self) -> None:
        """Take no turns for an engine that came up with earlier weights; one that does not name its weights gets turns,
        unless it refused the new ones. Weights it never had came from its trainer. Raises UpstreamError."""
        if (found := await self._adapter.find_version(self._ask)) is None:
            return
        is_new = bool(self._had) and found not in (*self._had, UNNAMED)
        self._had.add(found)
        if self._version is not None and found != self._version and not is_new:
            self._lack(self._version, repr(found))
        elif self._version is not None:
            self._has_to_have(found)

    def _has_to_have(self, version: str | None) -> bool:
        """Returns whether it was known to have others."""
        had_others, self._version, self._lacks = bool(self._lacks), version, ""
        self._had.update(() if version is None else (version,))
        return had_others

    def _lack(self, version: str, found: str) -> None:
        self._has_to_have(version)
        self._lacks = f"it has not taken the weights {version!r}, and has {found}"
        self._become(EngineState.DOWN, self._lacks)

    async def _ask(
        self, method: str, target: str, body: bytes = b"", headers: Headers = (), *, routing: Headers = ()
    ) -> HttpReply:
        of_body = (("content-type", "application/json"),) if body else ()
        return await self._transport.forward(method, target, (*of_body, *headers, *routing), body)

    def _become(self, state: EngineState, detail: str = "") -> None:
        """Keep the news of the engine; a change is logged."""
        if self._closing:
            return
        if state is EngineState.READY and self._lacks:
            state, detail = EngineState.DOWN, self._lacks
        if state is EngineState.READY:
            if state is not self._health.state:
                log.info("the engine at %s is ready%s", self._address, detail and f": {detail}")
            self._said.clear()
        elif detail not in self._said and len(self._said) < MAX_SAID:
            # One line for each reason of an outage. The server itself says that it waits for an engine at its start.
            level = logging.DEBUG if self._health.state is EngineState.STARTING else logging.WARNING
            log.log(level, "the engine at %s is down: %s", self._address, detail)
            self._said.add(detail)
        self._is_discovered &= state is EngineState.READY  # what comes up again may be another version
        self._health = EngineHealth(state=state, detail=detail)

    def _own(self, work: Coroutine[None, None, T], *, name: str) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StenographError):
            log.error("%s failed", task.get_name(), exc_info=error)
