"""The routes that make turns, as raw ASGI: socket to turns, turns to socket. What they say is a dialect's business.

A handler watches turns; the manager runs them. However the handler ends, it leaves its watch, and the last watcher's
leaving stops what still runs. The terminal event of a stream is sent after the commit.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Receive, Scope, Send

from stenograph.core.chat import ChatReply, KnownMessages, Remaining, StreamPiece, TurnRequest
from stenograph.core.clock import Clock
from stenograph.core.errors import StenographError
from stenograph.core.types import Stage, StageTimes
from stenograph.http.auth import Doorman
from stenograph.http.metrics import Metrics
from stenograph.http.wire import Client, ClientGone, count_error, header_value, read_body, send_error, send_whole
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.pool import CpuPool
from stenograph.protocol.openai_errors import error_body
from stenograph.protocol.sse import data_event
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.running import TurnAbandoned, Watch
from stenograph.session.session import Session
from stenograph.session.turn import TurnOutcome

DECODED_OFF_LOOP_BYTES = 128 * 1024
"""A body from this size on is decoded on a worker: a tenth of a millisecond for the hop, against several."""

REMAINING = "x-stenograph-remaining-tokens"
SESSION_REMAINING = "x-stenograph-session-remaining-tokens"

OUR_HEADERS = frozenset({"x-request-id", "server-timing", REMAINING, SESSION_REMAINING})
"""Headers of a reply that no engine's replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A whole reply as it goes out, with the headers that are its own, the content type among them.

    Content that may be large comes in pieces, between which the loop serves others.
    """

    content: bytes | Iterator[bytes]
    headers: Sequence[tuple[str, str]]


Decoded = tuple[TurnRequest, bytes]
"""A request, and as JSON what of it is kept in the record."""


class StreamWriter(Protocol):
    """Writes one streamed reply. `prompts` are the ids of the request's prompts.

    What may be large comes in pieces, between which the loop serves others; they are all taken before the next call.
    """

    def start(self, prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The events that come first."""
        ...

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The events for what is new; nothing if a client would see nothing of it."""
        ...

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The events that come last, the terminal one included."""
        ...


class WireDialect(Protocol):
    """What a route says: bytes to a request, replies to bytes. Knows no sockets."""

    @property
    def name(self) -> str:
        """By which a retry is known to be one of this route's."""
        ...

    def known(self, session: Session) -> KnownMessages | None:
        """What of a request need not be read again, if it begins with it."""
        ...

    def decode(self, body: bytes, known: KnownMessages | None) -> "Decoded":
        """A request, and as JSON what of it is kept in the record. Raises CallerError."""
        ...

    def steps(self, body: bytes) -> "Iterator[Decoded | None] | None":
        """The same in steps for the loop: what they do holds the GIL. None where a worker does as well."""
        ...

    def whole(self, reply_id: str, request: TurnRequest, outcome: TurnOutcome) -> Body:
        """A reply that is not streamed."""
        ...

    def stream(self, reply_id: str, request: TurnRequest, *, created: int) -> StreamWriter:
        """What writes a reply that is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRoute:
    """One route of one server."""

    dialect: WireDialect
    manager: SessionManager
    doorman: Doorman
    metrics: Metrics
    clock: Clock
    max_body_bytes: int
    pool: CpuPool
    share: LoopShare
    body_slots: BodySlots

    async def handle(self, scope: Scope, receive: Receive, send: Send, *, session_id: str | None) -> None:
        """Serve one request; `session_id` is what the path names."""
        stages = StageTimes(start=self.clock.monotonic())
        await self.body_slots.small()
        try:
            watch = await self._admit(scope, receive, stages, session_id)
        except ClientGone:
            return
        except StenographError as error:
            await self._send_error(send, error)
            return
        client = Client(receive, on_gone=watch.leave)
        try:
            async with client.watched():
                await (self._stream if watch.request.reply.stream else self._whole)(watch, client, send)
        finally:
            watch.leave()

    async def _admit(self, scope: Scope, receive: Receive, stages: StageTimes, session_id: str | None) -> Watch:
        self.doorman.check_key(scope["headers"])
        session = self.doorman.session_of(session_id, scope["headers"])
        body = await read_body(scope, receive, max_bytes=self.max_body_bytes, body_slots=self.body_slots)
        stages.mark(Stage.RECEIVE, self.clock.monotonic())
        await self.manager.settle(session)
        identity = None if session is None else self._identity(scope, body)
        known = None if session is None else self.dialect.known(session)
        decode = lambda: self.dialect.decode(body, known)  # noqa: E731
        num_unread = len(body) - (0 if known is None else known.text_print.length)
        if num_unread >= DECODED_OFF_LOOP_BYTES and self.manager.is_new(session, identity):
            stages.mark(Stage.ADMIT, self.clock.monotonic())
            async with self.body_slots.decoding():
                decoded = await self._decode_large(body, known)
            return self.manager.start(session, lambda: decoded, started=stages, identity=identity)
        return self.manager.start(session, decode, started=stages, identity=identity)

    async def _decode_large(self, body: bytes, known: KnownMessages | None) -> Decoded:
        """Decode without holding the loop for long. What msgspec does holds the GIL wherever it runs."""
        steps = self.dialect.steps(body)
        if steps is None:
            return await self.pool.run(lambda: self.dialect.decode(body, known), num_bytes=len(body))
        decoded: Decoded | None = None
        async for step in self.share.pieces(steps):
            decoded = step
        assert decoded is not None, "the last step gives the request"
        return decoded

    def _identity(self, scope: Scope, body: bytes) -> RequestIdentity:
        count = header_value(scope, b"x-stainless-retry-count") or "0"
        return RequestIdentity(
            route=self.dialect.name,
            body=body,
            key=header_value(scope, b"idempotency-key") or None,
            is_retry=count.isascii() and count.isdigit() and count.strip("0") != "",
        )

    async def _whole(self, watch: Watch, client: Client, send: Send) -> None:
        try:
            outcome = await watch.result()
        except TurnAbandoned:
            return  # the client is gone
        except StenographError as error:
            await self._send_error(send, error)
            return
        body = self.dialect.whole(watch.reply_id, watch.request, outcome)
        headers = [*_headers(watch, outcome.reply.stages_s, outcome.remaining), *body.headers]
        content = await self._made(body.content)
        if await client.finish(send_whole(send, 200, content, headers)):
            watch.delivered()

    async def _stream(self, watch: Watch, client: Client, send: Send) -> None:
        pieces = await watch.take()
        if pieces is None:
            # It ended before anything was said: its error, if it has one, can still be a status.
            try:
                await watch.result()
            except TurnAbandoned:
                return
            except StenographError as error:
                await self._send_error(send, error)
                return
        writer = self.dialect.stream(watch.reply_id, watch.request, created=int(self.clock.wall()))
        await _start_stream(watch, send)
        await self._send_more(send, writer.start(watch.prompts))
        while pieces is not None:
            await self._send_more(send, writer.pieces(pieces, watch.prompts))
            pieces = await watch.take()
        await self._end_stream(watch, client, writer, send)

    async def _end_stream(self, watch: Watch, client: Client, writer: StreamWriter, send: Send) -> None:
        """Send what a stream ends with: the finish after the commit, or the error as an event, and then no `[DONE]`."""
        try:
            replies = (await watch.result()).replies
        except TurnAbandoned:
            return
        except StenographError as error:
            count_error(self.metrics, error)
            await send({"type": "http.response.body", "body": data_event(error_body(error))})
            return
        last = await self._made(writer.end(replies))
        if await client.finish(send({"type": "http.response.body", "body": last})):
            watch.delivered()

    async def _send_more(self, send: Send, content: bytes | Iterator[bytes]) -> None:
        if isinstance(content, bytes):
            await _send_piece(send, content)
            return
        async for piece in self.share.pieces(content):
            await _send_piece(send, piece)

    async def _made(self, content: bytes | Iterator[bytes]) -> bytes:
        """Content that is sent at once, however it is made."""
        if isinstance(content, bytes):
            return content
        return b"".join([piece async for piece in self.share.pieces(content)])

    async def _send_error(self, send: Send, error: StenographError) -> None:
        count_error(self.metrics, error)
        await send_error(send, error)


async def _start_stream(watch: Watch, send: Send) -> None:
    headers = [
        ("content-type", "text/event-stream; charset=utf-8"),
        ("cache-control", "no-cache"),
        ("x-accel-buffering", "no"),
        *_headers(watch, watch.timings_s(), watch.remaining),
    ]
    raw = [(name.encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_piece(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _headers(watch: Watch, stages_s: Mapping[Stage, float], remaining: Remaining) -> list[tuple[str, str]]:
    """The headers of every reply. Those of budgets stand where there is one."""
    headers = [("x-request-id", str(watch.request_id)), ("server-timing", _server_timing(stages_s))]
    if remaining.context_tokens is not None:
        headers.append((REMAINING, str(remaining.context_tokens)))
    if remaining.session_tokens is not None:
        headers.append((SESSION_REMAINING, str(remaining.session_tokens)))
    return headers


def _server_timing(stages_s: Mapping[Stage, float]) -> str:
    """Stage times in milliseconds. Source: W3C Server Timing, section 3."""
    return ", ".join(f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in stages_s.items())
