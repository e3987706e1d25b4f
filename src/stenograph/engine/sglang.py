"""SGLang as an `Engine`: one chat request a turn, whose reply the client gets unchanged.

Owns the tasks of its requests, its aborts and its probe; `aclose` awaits them all. SGLang may go on generating for a
client that has hung up, so that every way out before the reply was whole also aborts by the request's id.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stenograph.core.errors import EngineUnavailable, UpstreamError, UpstreamRefused, UpstreamUnreachable
from stenograph.core.settings import ReplayKind
from stenograph.core.types import Chunk, EngineReply, GrammarKind, RequestId
from stenograph.engine.base import Capabilities, EngineHealth, EngineState, GenerateRequest
from stenograph.engine.sglang_wire import GRAMMARS, decode_reply, encode_abort, encode_request
from stenograph.engine.transport import EngineTransport, HttpReply
from stenograph.offload.body_slots import BodySlots

log = logging.getLogger(__name__)

T = TypeVar("T")

CHAT_PATH = "/v1/chat/completions"
ABORT_PATH = "/abort_request"
PROBE_PATH = "/health"
OTHER_PROBE_PATH = "/v1/models"
"""For routers that have no `/health`."""

FIRST_ABORT_PAUSE_S = 0.1
LONGEST_ABORT_PAUSE_S = 2.0
ABORT_DEADLINE_S = 5.0
PROBE_DEADLINE_S = 5.0
CLOSE_GRACE_S = 2.0
"""How long `aclose` waits for the last aborts to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangOptions:
    """Where an SGLang server, or a router before several, is, and what its model is.

    `model` is its name there. `replay` says what is asked for that trainers replay.
    """

    url: str
    model: str
    vocab_size: int
    connect_timeout_s: float = 5.0
    probe_pause_s: float = 3.0
    grammars: frozenset[GrammarKind] = GRAMMARS
    replay: ReplayKind = ReplayKind.NONE


@dataclass(slots=True)
class _Running:
    """A generation's request under way, and who asks that it be aborted, if anyone does."""

    exchange: "asyncio.Task[Chunk]"
    aborter: "asyncio.Task[None] | None" = None


_NOT_WHOLE = (UpstreamUnreachable, asyncio.CancelledError)
"""Ways in which an exchange ends while the engine may still draw."""


class SGLangEngine:
    """An SGLang server somewhere on the network."""

    def __init__(self, options: SGLangOptions, body_slots: BodySlots | None = None) -> None:
        self._options = options
        self._transport = EngineTransport(options.url, options.connect_timeout_s, body_slots)
        self._capabilities = Capabilities(
            engine="sglang",
            model=options.model,
            vocab_size=options.vocab_size,
            max_context_tokens=None,
            grammars=options.grammars,
            streams=False,
            parses=True,
            takes_json=True,
        )
        self._health = EngineHealth(state=EngineState.STARTING, detail="not probed yet")
        self._running: dict[RequestId, _Running] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._doubt = asyncio.Event()
        self._closing = False

    def __repr__(self) -> str:
        return f"<SGLangEngine {self._options.url} {self._health.state} {len(self._running)} running>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

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
        self._own(self._watch(), name="sglang-probe")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """One chunk with everything. Raises UpstreamRefused for any status but 200."""
        if self._closing:
            raise EngineUnavailable("The engine was stopped.")
        body = encode_request(request, model=self._options.model, replay=self._options.replay)
        key = request.affinity_key
        headers = () if key is None else (("x-smg-routing-key", key),)
        num_prompt = len(request.prompt.ids)
        exchange = self._own(
            self._transport.post(CHAT_PATH, body, headers, lambda http: self._chunk(http, num_prompt=num_prompt)),
            name=f"sglang-{request.request_id}",
        )
        assert request.request_id not in self._running, "a request id is used once"
        self._running[request.request_id] = _Running(exchange=exchange)
        try:
            await asyncio.wait((exchange,))
        finally:
            self._end(request.request_id)
        yield self._outcome(exchange)

    async def abort(self, request_id: RequestId) -> bool:
        """Ask the engine until the generation ends: an abort that overtakes its request is forgotten there."""
        running = self._running.get(request_id)
        if running is not None and running.aborter is None:
            running.aborter = self._own(self._abort_until_ended(request_id), name=f"sglang-abort-{request_id}")
        return running is not None

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> HttpReply:
        """A request to the engine as it is, for routes that record nothing; any status is an answer."""
        return await self._transport.forward(method, target, headers, body)

    async def aclose(self) -> None:
        """End everything: generations with EngineUnavailable, after the engine was told to abort them."""
        self._closing = True
        self._health = EngineHealth(state=EngineState.STOPPED, detail="stopped")
        probes = {task for task in self._tasks if task.get_name() == "sglang-probe"}
        for task in probes:
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

    def _end(self, request_id: RequestId) -> None:
        """Forget a generation; where its reply is not whole, hang up and abort it. Does nothing the second time."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        exchange = running.exchange
        whole = exchange.done() and not exchange.cancelled() and not isinstance(exchange.exception(), _NOT_WHOLE)
        if running.aborter is not None:
            running.aborter.cancel()
        if not whole:
            exchange.cancel()
            self._own(self._tell_abort(request_id), name=f"sglang-abort-{request_id}")

    def _outcome(self, exchange: "asyncio.Task[Chunk]") -> Chunk:
        """What the engine drew, or why there is nothing."""
        if exchange.cancelled():  # by `aclose`, and by nothing else
            raise EngineUnavailable("The turn was lost: the engine was stopped.")
        try:
            chunk = exchange.result()
        except UpstreamUnreachable as error:
            self._become(EngineState.DOWN, error.message)
            self._doubt.set()
            raise
        self._become(EngineState.READY)
        return chunk

    def _chunk(self, http: HttpReply, *, num_prompt: int) -> Chunk:
        """A reply, checked. Raises UpstreamRefused for any status but 200, UpstreamInvalid for a 200 that lies."""
        if http.status != 200:
            raise UpstreamRefused(
                status=http.status, content_type=http.content_type, headers=http.headers, body=http.body
            )
        reply = decode_reply(http.body, vocab_size=self._options.vocab_size, num_prompt=num_prompt)
        return Chunk(
            ids=reply.ids,
            logprobs=reply.logprobs,
            top_logprobs=reply.top_logprobs,
            finish=reply.finish,
            num_cached_tokens=reply.num_cached_tokens,
            weight_version=reply.weight_version,
            reply=EngineReply(
                id=reply.id,
                body=http.body,
                content_type=http.content_type,
                headers=http.headers,
                message=reply.message,
            ),
            replay=reply.replay,
        )

    async def _abort_until_ended(self, request_id: RequestId) -> None:
        pause_s = FIRST_ABORT_PAUSE_S
        while True:  # until `_end` cancels it
            await self._tell_abort(request_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_ABORT_PAUSE_S)

    async def _tell_abort(self, request_id: RequestId) -> None:
        try:
            async with asyncio.timeout(ABORT_DEADLINE_S):
                status = await self._transport.post(
                    ABORT_PATH, encode_abort(request_id), (), lambda reply: reply.status
                )
        except UpstreamError as error:
            log.warning("could not abort %s at %s: %s", request_id, self._options.url, error.message)
        except TimeoutError:
            log.warning("could not abort %s at %s within %g s", request_id, self._options.url, ABORT_DEADLINE_S)
        else:
            if status != 200:
                log.warning("could not abort %s at %s: status %d", request_id, self._options.url, status)

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
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                status = await self._probed_status()
        except UpstreamError as error:
            self._become(EngineState.DOWN, error.message)
        except TimeoutError:
            self._become(EngineState.DOWN, f"it did not answer GET {PROBE_PATH} within {PROBE_DEADLINE_S:g} s")
        else:
            works = status < 500
            self._become(
                EngineState.READY if works else EngineState.DOWN, "" if works else f"GET {PROBE_PATH} answered {status}"
            )

    async def _probed_status(self) -> int:
        reply = await self._transport.forward("GET", PROBE_PATH, (), b"")
        if reply.status in (404, 405):
            reply = await self._transport.forward("GET", OTHER_PROBE_PATH, (), b"")
        return reply.status

    def _become(self, state: EngineState, detail: str = "") -> None:
        """Keep what was learned of the engine; a change is logged."""
        if self._closing:
            return
        if state is not self._health.state:
            level = logging.INFO if state is EngineState.READY else logging.WARNING
            log.log(level, "the engine at %s is %s%s", self._options.url, state, detail and f": {detail}")
        self._health = EngineHealth(state=state, detail=detail)

    # -- tasks

    def _own(self, work: Coroutine[None, None, T], *, name: str) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, UpstreamError):
            log.error("%s failed", task.get_name(), exc_info=error)
