"""The routes that make turns, as raw ASGI: socket to turns, turns to socket. Dialects own the content.

A handler watches turns; the manager runs them. However the handler ends, it leaves its watch, and the last watcher's
leaving stops the turns still running. The terminal event of a stream is sent after the commit.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from stenograph.core.chat import ChatRequest, Remaining, Spelling, StreamPiece
from stenograph.core.errors import StenographError
from stenograph.core.kinds import Compat
from stenograph.core.loaded import entry
from stenograph.core.messages import MEDIA_LIMITS, MediaLimits
from stenograph.core.stages import Stage, StageTimes
from stenograph.dialects.base import Decoded, Dialect, Incoming, StreamWriter
from stenograph.dialects.common.errors import refusal_in_miles
from stenograph.dialects.openai.spelling import CHAT, COMPLETIONS
from stenograph.http.keep_alive import Pulse
from stenograph.http.part import Core
from stenograph.http.routing_hints import RANK_HEADER, with_hints
from stenograph.http.wire import (
    ClientGone,
    ClientLink,
    count_error,
    delivery_of,
    headers_of,
    read_json,
    send_refusal,
)
from stenograph.offload.body_slots import BodySlots
from stenograph.session.admission import Admission, Caller, RequestTrace
from stenograph.session.ledger import NO_ROW, OpenRow
from stenograph.session.retries import RequestIdentity
from stenograph.session.turn import TurnOutcome
from stenograph.session.watch import TurnAbandoned, Watch

DECODED_OFF_LOOP_BYTES = 32 * 1024
"""A body from this size on is decoded on a worker: a tenth of a millisecond for the hop, against several for a body of
small parts."""

MAX_CLIENT_CHARS = 60
"""Of a client's name, in the log."""

REMAINING = "x-stenograph-remaining-tokens"
SESSION_REMAINING = "x-stenograph-session-remaining-tokens"

OPENAIS_OWN = frozenset({CHAT, COMPLETIONS})
"""The dialects of the miles session server too."""

OUR_HEADERS = frozenset({"x-request-id", "server-timing", REMAINING, SESSION_REMAINING})
"""Headers of a reply, never replaced by an engine's."""

log = logging.getLogger(__name__)


class RequestPath(Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a request's path: its session, if it names one, the rest as `route`, and the route's named groups.
    `trace` is the request's, where traces are made."""

    session_id: str | None
    route: str
    at: Mapping[str, str]
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRoute:
    """One dialect's turns on one server. `sought_headers` are the headers read by rules, in lower case."""

    dialect: Dialect
    core: Core
    body_slots: BodySlots
    sought_headers: frozenset[bytes]
    media: MediaLimits = MEDIA_LIMITS

    async def handle(self, scope: Scope, receive: Receive, send: Send, path: RequestPath) -> None:
        """Serve one request to `path`."""
        stages = StageTimes(start=self.core.services.clock.monotonic())
        reading = _Reading(NO_ROW, as_miles=self.core.settings.compat is Compat.MILES)
        await self.body_slots.small()
        try:
            watch = await self._admit(scope, receive, stages, path, reading)
        except StenographError as error:
            log.debug("refused before a turn began (session %s): %s: %s", path.session_id, error.code, error)
            if path.trace is not None:
                path.trace.refused(error)
            await self._send_error(send, error, reading)
            return
        except ClientGone:
            reading.row.close()
            return
        except BaseException:
            reading.row.close()
            raise
        client = delivery_of(scope)
        try:
            client.when_gone(watch.leave)
            await (self._stream if watch.options.stream else self._whole)(watch, client, send, reading.row)
        finally:
            client.when_gone(None)
            watch.leave()
            if reading.row.is_open:
                reading.row.close()

    async def _admit(
        self, scope: Scope, receive: Receive, stages: StageTimes, path: RequestPath, reading: "_Reading"
    ) -> Watch:
        clock, manager = self.core.services.clock, self.core.authenticator.manager
        session = await self.core.authenticator.session_of(scope)
        headers = headers_of(scope)
        name = client_name(headers)
        if session is not None:
            reading.as_miles = session.options.compat is Compat.MILES
            reading.row = session.ledger.open_row(clock, path=path.route, dialect=self.dialect.name, client=name)
        body = await read_json(scope, receive, max_bytes=self.core.settings.max_body_bytes, body_slots=self.body_slots)
        stages.receive = clock.monotonic()
        if session is not None and session.is_busy:
            await manager.settle(session)
        identity = None if session is None else _identity(headers, path, body)
        admits = self.core.authenticator.admitted
        if admits is None:
            admitted = manager.admit(session, stages=stages, identity=identity)
        else:
            admitted = await admits(scope, session, stages=stages, identity=identity)
        if not isinstance(admitted, Admission):
            return admitted
        with admitted:
            incoming = Incoming(
                body=body,
                at=path.at,
                known=() if session is None else session.strands.known(self.dialect.name, body),
                past=None if session is None else session.strands,
                query=scope["query_string"].decode("latin-1"),
                headers=scope["headers"],
                media=self.media,
            )
            if self.media.fetches:
                make = entry("stenograph.http.fetch_media:MediaFetcher")
                fetcher = make(self.core.settings.fetch_media, most_bytes=self.media.max_named_bytes)
                decoded = await fetcher.decoded(self._decoded, incoming)
            else:
                decoded = await self._decoded(incoming)
            request = decoded[0]
            reading.spelling = request.spelling
            if isinstance(request, ChatRequest) and request.earlier_media:
                found = entry("stenograph.session.kept_media:with_earlier_media")
                decoded = await found(decoded, session, manager.sessions.storage)
            if request.routing is not None or RANK_HEADER in headers:
                decoded = with_hints(decoded, scope, self.core.authenticator, self.core.services.engine.capabilities)
            caller = Caller(
                name=name,
                path=path.route,
                headers=sought_headers(headers, self.sought_headers),
                row=reading.row,
                trace=path.trace,
            )
            return manager.begin(admitted, decoded, caller)

    async def _decoded(self, incoming: Incoming) -> Decoded:
        num_known = max((one.text_print.length for one in incoming.known), default=0)
        if len(incoming.body) - num_known < DECODED_OFF_LOOP_BYTES:
            return self.dialect.decode(incoming)
        async with self.body_slots.decoding():
            return await self._decode_large(incoming)

    async def _decode_large(self, incoming: Incoming) -> Decoded:
        """Decode without holding the loop for long. msgspec holds the GIL on every thread."""
        steps = self.dialect.steps(incoming)
        if steps is None:
            return await self.core.services.pool.run(
                lambda: self.dialect.decode(incoming), num_bytes=len(incoming.body)
            )
        decoded: Decoded | None = None
        async for step in self.core.services.share.pieces(steps):
            decoded = step
        assert decoded is not None, "the last step gives the request"
        return decoded

    async def _whole(self, watch: Watch, client: ClientLink, send: Send, row: OpenRow) -> None:
        try:
            outcome = await watch.result()
        except TurnAbandoned:
            return  # the client is gone
        except StenographError as error:
            await self._send_turn_error(send, error, row, watch)
            return
        self._answered(row, outcome)
        body = self.dialect.whole(outcome.reply_id, watch.options, outcome.replies, spelling=watch.spelling)
        headers = _headers(watch, outcome.replies[0].stages_s, outcome.remaining)
        for header in body.headers:
            if header[0] not in OUR_HEADERS:
                headers.append(header)
        content = body.content if isinstance(body.content, bytes) else await self._joined(body.content)
        if await client.finish(client.answer(send, 200, content, headers)):
            watch.delivered()

    async def _stream(self, watch: Watch, client: ClientLink, send: Send, row: OpenRow) -> None:
        with Pulse(self.core.services.clock, watch.call) as pulse:
            pieces = await watch.take()
            if pieces is None:
                # It ended before anything was said: its error, if it has one, can still be a status.
                try:
                    self._answered(row, await watch.result())
                except TurnAbandoned:
                    return
                except StenographError as error:
                    await self._send_turn_error(send, error, row, watch)
                    return
            writer = self._writer(watch)
            await _start_stream(watch, writer, send)
            if pieces == []:
                pieces = await self._wait(watch, writer, send, pulse)
                if watch.spelling.keeps_engine_id:
                    writer = self._writer(watch)
            await self._send_more(send, writer.start(watch.prompts))
            pulse.sent()
            while pieces is not None:
                content = writer.pieces(pieces, watch.prompts)
                if content:
                    await self._send_more(send, content)
                    pulse.sent()
                elif pulse.is_due:
                    await _send_piece(send, writer.alive(watch.prompts))
                    pulse.sent()
                pieces = await watch.take()
        await self._end_stream(watch, client, writer, send, row)

    def _writer(self, watch: Watch) -> StreamWriter:
        return self.dialect.stream(
            watch.reply_id, watch.options, created=watch.created, spelling=watch.spelling, params=watch.params
        )

    async def _wait(self, watch: Watch, writer: StreamWriter, send: Send, pulse: Pulse) -> list[StreamPiece] | None:
        """The first pieces of a turn with a slow beginning; meanwhile its client gets signs of life."""
        pieces: list[StreamPiece] | None = []
        while pieces == []:
            await _send_piece(send, writer.alive(watch.prompts))
            pulse.sent()
            pieces = await watch.take()
        return pieces

    async def _end_stream(
        self, watch: Watch, client: ClientLink, writer: StreamWriter, send: Send, row: OpenRow
    ) -> None:
        """Send the end of a stream: the finish after the commit, or the error."""
        try:
            outcome = await watch.result()
        except TurnAbandoned:
            return
        except StenographError as error:
            row.refused(error)
            count_error(self.core.metrics, error)
            await send({"type": "http.response.body", "body": writer.failed(error)})
            return
        self._answered(row, outcome)
        end = writer.end(outcome.replies)
        last = end if isinstance(end, bytes) else await self._joined(end)
        if await client.finish(send({"type": "http.response.body", "body": last})):
            watch.delivered()

    async def _send_more(self, send: Send, content: bytes | Iterator[bytes]) -> None:
        if isinstance(content, bytes):
            await _send_piece(send, content)
            return
        async for piece in self.core.services.share.pieces(content):
            await _send_piece(send, piece)

    async def _joined(self, pieces: Iterator[bytes]) -> bytes:
        """Content made in pieces, and sent at once."""
        return b"".join([piece async for piece in self.core.services.share.pieces(pieces)])

    async def _send_turn_error(self, send: Send, error: StenographError, row: OpenRow, watch: Watch) -> None:
        """Send the error of a turn, with the request id of the log."""
        reading = _Reading(row, spelling=watch.spelling, as_miles=watch.options.as_miles)
        await self._send_error(send, error, reading, request_id=str(watch.request_id))

    def _answered(self, row: OpenRow, outcome: TurnOutcome) -> None:
        """Note a reply, and the limit behind an empty one. Only the first time counts."""
        if row.is_open and outcome.spent is not None:
            self.core.metrics.limit_hit(outcome.spent.limit)
        row.answered(outcome)

    async def _send_error(
        self, send: Send, error: StenographError, reading: "_Reading", *, request_id: str | None = None
    ) -> None:
        """Note an error, and send it."""
        reading.row.refused(error)
        count_error(self.core.metrics, error)
        headers = () if request_id is None else (("x-request-id", request_id),)
        if reading.as_miles and self.dialect.name in OPENAIS_OWN:
            await send_refusal(send, refusal_in_miles(error), headers)
        else:
            await send_refusal(send, self.dialect.refusal(error, reading.spelling, request_id), headers)


class _Reading(Struct):
    """A request that may yet be refused: its row in the ledger, the client's names for its fields once it is decoded,
    and whether its session's errors are miles' own."""

    row: OpenRow
    spelling: Spelling | None = None
    as_miles: bool = False


def _identity(headers: Mapping[bytes, bytes], path: RequestPath, body: bytes) -> RequestIdentity:
    count = headers.get(b"x-stainless-retry-count", b"0")
    return RequestIdentity(
        route=path.route,
        body=body,
        key=headers.get(b"idempotency-key", b"").decode("latin-1") or None,
        is_retry=count.isdigit() and count.strip(b"0") != b"",
    )


def sought_headers(headers: Mapping[bytes, bytes], sought: frozenset[bytes]) -> dict[str, str]:
    """The headers read by rules."""
    if sought.isdisjoint(headers):
        return {}
    return {name.decode(): headers[name].decode("latin-1") for name in headers.keys() & sought}


def client_name(headers: Mapping[bytes, bytes]) -> str:
    """The client's own name, shortened. Nothing checks it."""
    return headers.get(b"user-agent", b"").decode("latin-1")[:MAX_CLIENT_CHARS]


async def _start_stream(watch: Watch, writer: StreamWriter, send: Send) -> None:
    headers = [*writer.headers, *_headers(watch, watch.timings_s(), watch.remaining)]
    raw = [(name.encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_piece(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _headers(watch: Watch, stages_s: Mapping[Stage, float], remaining: Remaining) -> list[tuple[str, str]]:
    """The headers of every reply: its stages in milliseconds, and those of budgets where there is one.

    Source: W3C Server Timing, section 3.
    """
    times = _timing_format(tuple(stages_s)) % tuple([1e3 * one_s for one_s in stages_s.values()])
    headers = [("x-request-id", str(watch.request_id)), ("server-timing", times)]
    if remaining.context_tokens is not None:
        headers.append((REMAINING, str(remaining.context_tokens)))
    if remaining.session_tokens is not None:
        headers.append((SESSION_REMAINING, str(remaining.session_tokens)))
    return headers


@lru_cache(maxsize=64)
def _timing_format(stages: tuple[Stage, ...]) -> str:
    """Its value, with a place for the time of each stage: few turns differ in the stages they have."""
    return ", ".join(f"{stage};dur=%.3f" for stage in stages)
