"""HTTP towards engines: requests on the wire, and the accepted parts of replies.

A reply comes back whole, or as `UpstreamUnreachable`. A cancelled wait closes its connection at once: it never
goes back to the pool, so the engine sees the client leave. Statuses are the caller's business. Knows no engine.
"""

import asyncio
import io
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import Struct
from yarl import URL

from stenograph.core.errors import InvalidRequest, UpstreamInvalid
from stenograph.core.sse import EventReader, EventTooLarge
from stenograph.engine.http.connections import Connection, Connections
from stenograph.engine.http.exchange import Pairs
from stenograph.engine.http.inflate import PIECE_BYTES, Inflater, too_large
from stenograph.offload.body_slots import DEFAULT_BODY_SLOTS, LARGE_BODY_BYTES, BodySlots, Slot

T = TypeVar("T")
Headers = tuple[tuple[str, str], ...]

MAX_FORWARDED_VALUE = 4096
"""Longest header value passed on to a client; many take no line of more than 8 KiB."""
DEFAULT_MAX_REPLY_BYTES = 2**27
GATHERED_BYTES = 2**21
"""A body with a slot is taken in parts of this size: to wake its turn for each read costs more than reading."""
TERMINAL = b"[DONE]"
"""The data of a stream's last event."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""About one connection or one way of sending a body (RFC 9110 section 7.6.1): never forwarded, either way."""
_OF_THE_ENGINE = frozenset({"content-type", "date", "server", "set-cookie"})
_NEVER_FORWARDED = HOP_BY_HOP | _OF_THE_ENGINE
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Control characters but for the tab: no server may send them, and no client takes them."""
_OF_THIS_REQUEST = frozenset({"accept-encoding", "expect", "host"})


class HttpReply(Struct, frozen=True, kw_only=True, gc=False):
    """A whole reply. `headers` are those to forward, lower-case, content-type apart; `body` has no encoding left."""

    status: int
    content_type: str
    headers: Headers
    body: bytes


def end_to_end(headers: Iterable[tuple[str, str]]) -> Headers:
    """An engine's headers for its client: lower-case names, in order, without content-type."""
    kept: list[tuple[str, str]] = []
    named: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            named.update(value.lower().replace(" ", "").split(","))
        elif lower not in _NEVER_FORWARDED and len(value) <= MAX_FORWARDED_VALUE and not _CONTROL.search(value):
            kept.append((lower, value))
    return tuple([pair for pair in kept if pair[0] not in named]) if named else tuple(kept)


class EngineTransport:
    """The connections to one engine. Open it inside the loop, close it in the end."""

    def __init__(
        self,
        base_url: str,
        connect_timeout_s: float,
        body_slots: BodySlots | None = None,
        *,
        max_reply_bytes: int = DEFAULT_MAX_REPLY_BYTES,
        reuses_connections: bool = True,
        api_key: str | None = None,
    ) -> None:
        """No reply, as it comes or inflated, and no event of a stream is larger than `max_reply_bytes`. `api_key` goes
        with every request."""
        self._key: Headers = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._body_slots = body_slots or BodySlots(DEFAULT_BODY_SLOTS)
        self._max_reply_bytes = max_reply_bytes
        self._reuses_connections = reuses_connections
        url = URL(base_url.rstrip("/"), encoded=True)
        self._base_url = str(url.with_user(None))
        self._base_path = url.raw_path.rstrip("/")
        self._connections = Connections(url, connect_timeout_s, reuses=reuses_connections)
        self._is_open = False

    def __repr__(self) -> str:
        return f"<EngineTransport {self._base_url} {'open' if self._is_open else 'closed'}>"

    def open(self) -> None:
        """Make ready to connect; connects to nothing yet."""
        assert not self._is_open, "a transport is opened once"
        self._is_open = True
        self._connections.open()

    async def aclose(self) -> None:
        """Close every connection, those in use included."""
        if self._is_open:
            self._is_open = False
            await self._connections.aclose()

    async def post(self, path: str, body: bytes, headers: Headers, decode: Callable[[HttpReply], T]) -> T:
        """POST JSON, and decode the reply while its body slot is held.

        Raises UpstreamUnreachable if no whole reply came, UpstreamInvalid for an unknown encoding, and what `decode`
        raises.
        """
        return await self._exchange("POST", path, (("content-type", "application/json"), *headers), body, decode)

    async def events(self, path: str, body: bytes, headers: Headers) -> AsyncGenerator[HttpReply | bytes, None]:
        """POST JSON, and yield the data of each event until the terminal one, or until the stream ends.

        An answer other than an event stream is yielded instead, whole. Leaving early closes the connection. Raises
        UpstreamUnreachable if the stream is cut, UpstreamInvalid for one that is encoded or has an event without end.
        """
        sent = (("content-type", "application/json"), *headers, *self._key, ("accept-encoding", "identity"))
        exchange = await self._connections.ask("POST", self._base_path + path, sent, body)
        try:
            received, named = exchange.headers, dict(reversed(exchange.headers))
            media_type = named.get("content-type", "").partition(";")[0].strip().lower()
            if exchange.status != 200 or media_type != "text/event-stream":
                async with self._body_slots.slot() as slot:
                    http = _reply(exchange.status, received, await self._gathered(exchange, received, slot))
                yield http
                return
            encoding = named.get("content-encoding") or "identity"
            if encoding.lower() != "identity":
                raise UpstreamInvalid("content_encoding", f"the engine encoded its stream as {encoding[:40]!r}")
            reader = EventReader(max_bytes=self._max_reply_bytes)
            is_over = False
            while not is_over:
                piece = await exchange.piece()
                found = reader.feed(piece) if piece else reader.end()
                is_over = not piece or TERMINAL in found
                for data in itertools.takewhile(TERMINAL.__ne__, found):
                    yield data
        except EventTooLarge as error:
            raise UpstreamInvalid("event_size", f"the engine sent {error} (--max-reply-bytes)") from error
        finally:
            exchange.leave()

    async def forward(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes) -> HttpReply:
        """Send a request on as it came, to the path and query `target`.

        The caller chooses the headers to pass on; hop-by-hop ones never go on. Raises as `post` does, and
        InvalidRequest for a path unfit for a request line.
        """
        if not target.startswith("/") or not all("!" <= char <= "~" for char in target):
            raise InvalidRequest("The path must be percent-encoded, and begin with a slash.")
        lower = [(name.lower(), value) for name, value in headers]
        kept = tuple(pair for pair in _without_hops(lower) if pair[0] not in _OF_THIS_REQUEST)
        return await self._exchange(method, target, kept, body, lambda reply: reply)

    async def _exchange(
        self, method: str, path: str, headers: Headers, body: bytes, decode: Callable[[HttpReply], T]
    ) -> T:
        sent = (*headers, *self._key, ("accept-encoding", "identity"))
        exchange = await self._connections.ask(method, self._base_path + path.partition("#")[0], sent, body)
        try:
            received, num_expected = exchange.headers, exchange.num_expected
            is_small = num_expected is not None and num_expected < min(LARGE_BODY_BYTES, self._max_reply_bytes)
            if is_small and "content-encoding" not in dict(received):
                body = b"".join(await exchange.pieces(LARGE_BODY_BYTES))
                await self._body_slots.small()
                return decode(_reply(exchange.status, received, body))
            async with self._body_slots.slot() as slot:
                return decode(_reply(exchange.status, received, await self._gathered(exchange, received, slot)))
        finally:
            exchange.leave()

    async def _gathered(self, exchange: Connection, received: Pairs, slot: Slot) -> bytes:
        """A whole body, without its encoding. Raises UpstreamInvalid for one too large, or not in that encoding.

        It is inflated in pieces; between them the loop serves others. There is one copy of the result.
        """
        if (exchange.num_expected or 0) > self._max_reply_bytes:
            raise too_large(self._max_reply_bytes)
        encodings = ",".join(value for name, value in received if name == "content-encoding")
        inflater = Inflater(encodings, max_bytes=self._max_reply_bytes)
        body, num_raw = io.BytesIO(), 0
        while pieces := await slot.piece(exchange.pieces(GATHERED_BYTES if slot.is_held else 1), _num_bytes, exchange):
            num_raw += _num_bytes(pieces)
            if num_raw > self._max_reply_bytes:
                raise too_large(self._max_reply_bytes)
            if not encodings:
                body.writelines(pieces)
                continue
            for piece in inflater.feed(b"".join(pieces)):
                body.write(piece)
                if len(piece) == PIECE_BYTES:
                    await asyncio.sleep(0)
        inflater.end()
        await slot.take()  # for what is done with the body
        if body.tell() >= LARGE_BODY_BYTES:
            await self._body_slots.large()
        return body.getvalue()


def _num_bytes(pieces: Sequence[bytes]) -> int:
    return sum(map(len, pieces))


def _reply(status: int, received: Pairs, body: bytes) -> HttpReply:
    """A whole reply. Raises UpstreamInvalid for one that cannot be sent on."""
    content_type = dict(reversed(received)).get("content-type") or "application/octet-stream"  # the first of several
    if not 200 <= status <= 599:
        raise UpstreamInvalid("status", f"the engine answered with the status {status}")
    if len(content_type) > MAX_FORWARDED_VALUE or _CONTROL.search(content_type):
        raise UpstreamInvalid("content_type", "the reply's content-type cannot be sent on")
    return HttpReply(status=status, content_type=content_type, headers=end_to_end(received), body=body)


def _without_hops(lower: list[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Headers of one connection left out, those named by `Connection` included."""
    named = {name.strip().lower() for header, value in lower if header == "connection" for name in value.split(",")}
    return (pair for pair in lower if pair[0] not in HOP_BY_HOP and pair[0] not in named)
