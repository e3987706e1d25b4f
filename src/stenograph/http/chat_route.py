"""`POST …/v1/chat/completions`, as raw ASGI: socket to turn, turn to socket.

A handler watches a turn; the manager runs it. However the handler ends, it leaves its watch, and the last watcher's
leaving stops a turn that still runs. The terminal event of a stream is sent after the commit. A reply that the engine
wrote goes out as it came.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from stenograph.core.chat import ChatReply, ChatRequest, KnownMessages, ReplyOptions
from stenograph.core.clock import Clock
from stenograph.core.errors import StenographError
from stenograph.core.settings import ReplyMode, UnknownFields
from stenograph.core.types import EngineReply, Stage, StageTimes
from stenograph.engine.sglang_wire import cut_replay
from stenograph.http.auth import Doorman
from stenograph.http.metrics import Metrics
from stenograph.http.wire import Client, ClientGone, count_error, header_value, read_body, send_error, send_whole
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.pool import CpuPool
from stenograph.protocol.openai_chat import decode_chat, request_json
from stenograph.protocol.openai_chat_reply import StreamEncoder, TokenText, encode_reply, with_token_ids
from stenograph.protocol.openai_errors import error_body
from stenograph.protocol.sse import data_event
from stenograph.session.manager import SessionManager
from stenograph.session.retries import RequestIdentity
from stenograph.session.running import TurnAbandoned, Watch

DECODED_OFF_LOOP_BYTES = 128 * 1024
"""A body from this size on is decoded on a worker: a tenth of a millisecond for the hop, against several."""

_OURS = frozenset({"x-request-id", "server-timing"})
"""Headers of an engine's reply that ours replace."""
_OF_THE_BYTES = frozenset({"etag", "content-md5", "content-digest", "repr-digest", "digest"})
"""Headers that are true of the engine's bytes alone, not of another copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRoute:
    """The chat route of one server."""

    manager: SessionManager
    doorman: Doorman
    metrics: Metrics
    clock: Clock
    token_text: TokenText
    model: str
    max_body_bytes: int
    unknown_fields: UnknownFields
    reply_mode: ReplyMode
    pool: CpuPool
    body_slots: BodySlots

    async def handle(self, scope: Scope, receive: Receive, send: Send, *, session_id: str | None) -> None:
        """Serve one request; `session_id` is what the path names."""
        stages = StageTimes(start=self.clock.monotonic())
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
        identity = None if session is None else _identity(scope, body)
        known = None if session is None else session.recent.known
        decode = lambda: self._decode(body, known)  # noqa: E731
        num_unread = len(body) - (0 if known is None else known.text_print.length)
        if num_unread >= DECODED_OFF_LOOP_BYTES and self.manager.is_new(session, identity):
            # What msgspec does holds the GIL wherever it runs; the Python around it lets the loop in between.
            async with self.body_slots.decoding():
                decoded = await self.pool.run(decode, num_bytes=len(body))
            decode = lambda: decoded  # noqa: E731
        return self.manager.start(session, decode, started=stages, identity=identity)

    def _decode(self, body: bytes, known: KnownMessages | None) -> tuple[ChatRequest, bytes]:
        request = decode_chat(body, unknown_fields=self.unknown_fields, known=known)
        return request, request_json(request)

    async def _whole(self, watch: Watch, client: Client, send: Send) -> None:
        try:
            outcome = await watch.result()
        except TurnAbandoned:
            return  # the client is gone
        except StenographError as error:
            await self._send_error(send, error)
            return
        headers = [("x-request-id", watch.request_id), ("server-timing", _server_timing(outcome.reply.stages_s))]
        written = outcome.reply.written
        if written is None:
            body = encode_reply(outcome.reply, watch.request.reply, self.token_text)
            headers.append(("content-type", "application/json"))
        else:
            body = self._client_copy(written, outcome.reply, watch.request.reply)
            headers.append(("content-type", written.content_type))
            replaced = _OURS if body is written.body else _OURS | _OF_THE_BYTES
            headers += [(name, value) for name, value in written.headers if name not in replaced]
        if await client.finish(send_whole(send, 200, body, headers)):
            watch.delivered()

    def _client_copy(self, written: EngineReply, reply: ChatReply, options: ReplyOptions) -> bytes:
        """The engine's own bytes, but for what the server's settings leave out and the client asks to be added."""
        body = written.body if self.reply_mode is ReplyMode.PASSTHROUGH else cut_replay(written.body)
        return with_token_ids(body, reply) if options.return_token_ids else body

    async def _stream(self, watch: Watch, client: Client, send: Send) -> None:
        piece = await watch.take()
        if piece is None:
            # It ended before anything was said: its error, if it has one, can still be a status.
            try:
                await watch.result()
            except TurnAbandoned:
                return
            except StenographError as error:
                await self._send_error(send, error)
                return
        encoder = StreamEncoder(
            reply_id=watch.reply_id,
            created=int(self.clock.wall()),
            model=self.model,
            options=watch.request.reply,
            token_text=self.token_text,
        )
        await _start_stream(watch, send)
        await _send_more(send, encoder.start(watch.prompts[0]))
        while piece is not None:
            if event := encoder.piece(piece[0]):
                await _send_more(send, event)
            piece = await watch.take()
        await self._end_stream(watch, client, encoder, send)

    async def _end_stream(self, watch: Watch, client: Client, encoder: StreamEncoder, send: Send) -> None:
        """Send what a stream ends with: the finish after the commit, or the error as an event, and then no `[DONE]`."""
        try:
            last = encoder.end((await watch.result()).reply)
        except TurnAbandoned:
            return
        except StenographError as error:
            count_error(self.metrics, error)
            await send({"type": "http.response.body", "body": data_event(error_body(error))})
            return
        if await client.finish(send({"type": "http.response.body", "body": last})):
            watch.delivered()

    async def _send_error(self, send: Send, error: StenographError) -> None:
        count_error(self.metrics, error)
        await send_error(send, error)


def _identity(scope: Scope, body: bytes) -> RequestIdentity:
    count = header_value(scope, b"x-stainless-retry-count") or "0"
    return RequestIdentity(
        route="chat",
        body=body,
        key=header_value(scope, b"idempotency-key") or None,
        is_retry=count.isascii() and count.isdigit() and count.strip("0") != "",
    )


async def _start_stream(watch: Watch, send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"x-request-id", watch.request_id.encode()),
        (b"server-timing", _server_timing(watch.timings_s()).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _server_timing(stages_s: Mapping[Stage, float]) -> str:
    """Stage times in milliseconds. Source: W3C Server Timing, section 3."""
    return ", ".join(f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in stages_s.items())
