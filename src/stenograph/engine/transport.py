"""HTTP towards engines: the one place that speaks aiohttp, and the one that translates what it raises.

A reply comes back whole, or as `UpstreamUnreachable`. A wait that is cancelled closes its connection at once: it never
goes back to the pool, so the engine sees the client leave. Statuses are the caller's business. Knows no engine.

Doubled `server` and `date` headers are fine, except in Python's development mode, where aiohttp's parser is strict.
"""

import zlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from stenograph.core.errors import InvalidRequest, UpstreamInvalid, UpstreamUnreachable
from stenograph.offload.body_slots import DEFAULT_BODY_SLOTS, LARGE_BODY_BYTES, BodySlots, Slot
from stenograph.protocol.sse import EventReader, EventTooLarge

T = TypeVar("T")
Headers = tuple[tuple[str, str], ...]

KEEPALIVE_S = 3.0
"""How long an idle connection is kept; uvicorn, which most engines run on, closes its own after 5 s."""
READ_BUFFER_BYTES = 2**15
"""Small, so that a reply that nobody reads yet waits in the engine's socket."""
MAX_LINE_BYTES = 2**16
MAX_FORWARDED_VALUE = 4096
"""Longest header value that goes on to a client; many take no line of more than 8 KiB."""
MAX_REPLY_BYTES = 2**29
"""Of a reply, also of what a compressed one grows to: routed experts of 128k tokens are 0.3 GiB."""
MAX_GZIP_MEMBERS = 64

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
_OF_THIS_REQUEST = frozenset({"accept-encoding", "expect", "host"})
_BROKEN = (aiohttp.ClientError, HttpProcessingError, OSError)
"""What aiohttp raises of a connection; OSError has TimeoutError below it."""
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReply:
    """A whole reply. `headers` are those to forward, lower-case, content-type apart; `body` has no encoding left."""

    status: int
    content_type: str
    headers: Headers
    body: bytes


def end_to_end(headers: Iterable[tuple[str, str]]) -> Headers:
    """An engine's headers that its client may see: lower-case names, in order, without content-type."""
    lower = [(name.lower(), value) for name, value in headers if _can_be_sent(value)]
    return tuple(pair for pair in _without_hops(lower) if pair[0] not in _OF_THE_ENGINE)


def _can_be_sent(value: str) -> bool:
    """Whether a server may send this value, and a client will take it: no control characters, not too long."""
    return len(value) <= MAX_FORWARDED_VALUE and not any(
        (char < " " and char != "\t") or char == "\x7f" for char in value
    )


def decode_body(body: bytes, encodings: str) -> bytes:
    """Undo `Content-Encoding`. Raises UpstreamInvalid for one that we do not know, or that the body is not in."""
    for encoding in reversed([name for name in encodings.lower().replace(" ", "").split(",") if name]):
        if encoding == "identity" or not body:
            continue
        if encoding not in _WBITS:
            raise UpstreamInvalid("content_encoding", f"the engine encoded its reply as {encoding[:40]!r}, unasked")
        try:
            body = _inflate(body, _WBITS[encoding])
        except zlib.error as error:
            raise UpstreamInvalid("content_encoding", f"the reply says {encoding}, and is not: {error}") from error
    return body


class EngineTransport:
    """The connections to one engine. Open it inside the loop, close it in the end."""

    def __init__(self, base_url: str, connect_timeout_s: float, body_slots: BodySlots | None = None) -> None:
        self._body_slots = body_slots or BodySlots(DEFAULT_BODY_SLOTS)
        self._base_url = base_url.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<EngineTransport {self._base_url} {'closed' if self._session is None else 'open'}>"

    def open(self) -> None:
        """Make ready to connect; connects to nothing yet."""
        assert self._session is None, "a transport is opened once"
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=MAX_LINE_BYTES,
            max_line_size=MAX_LINE_BYTES,
            read_bufsize=READ_BUFFER_BYTES,
            skip_auto_headers=("Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._connect_timeout_s, sock_connect=self._connect_timeout_s
            ),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close every connection, those in use included."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, path: str, body: bytes, headers: Headers, decode: Callable[[HttpReply], T]) -> T:
        """POST JSON, and decode the reply while its body slot is held.

        Raises UpstreamUnreachable if no whole reply came, UpstreamInvalid for an unknown encoding, and what `decode`
        raises.
        """
        return await self._exchange("POST", path, (("content-type", "application/json"), *headers), body, decode)

    async def events(self, path: str, body: bytes, headers: Headers) -> AsyncGenerator[HttpReply | bytes, None]:
        """POST JSON, and yield the data of each event until the terminal one, or until the stream ends.

        An answer that is no event stream is yielded instead, whole. Leaving early closes the connection. Raises
        UpstreamUnreachable if the stream is cut, UpstreamInvalid for one that is encoded or has an event without end.
        """
        assert self._session is not None, "a transport is open while it is used"
        sent = (("content-type", "application/json"), *headers, ("accept-encoding", "identity"))
        reply_began = False
        try:
            async with self._session.post(
                URL(self._base_url + path, encoded=True), data=body, headers=sent, allow_redirects=False
            ) as response:
                reply_began = True
                if response.status != 200 or response.content_type != "text/event-stream":
                    async with self._body_slots.slot() as slot:
                        http = _reply(response, await _gathered(response, slot))
                    yield http
                    return
                encoding = response.headers.get("content-encoding", "identity")
                if encoding.lower() != "identity":
                    raise UpstreamInvalid("content_encoding", f"the engine encoded its stream as {encoding[:40]!r}")
                reader = EventReader(max_bytes=MAX_REPLY_BYTES)
                while True:
                    piece = await response.content.readany()
                    for data in reader.feed(piece) if piece else reader.end():
                        if data == b"[DONE]":
                            return
                        yield data
                    if not piece:
                        return
        except EventTooLarge as error:
            raise UpstreamInvalid("event_size", f"the engine sent {error}") from error
        except _BROKEN as error:
            raise UpstreamUnreachable(_story(error), reply_began=reply_began) from error

    async def forward(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes) -> HttpReply:
        """Send a request on as it came, to the path and query `target`.

        Which headers may go on is the caller's choice; hop-by-hop ones never do. Raises as `post` does, and
        InvalidRequest for a path that cannot be on a request line.
        """
        if not target.startswith("/") or not all("!" <= char <= "~" for char in target):
            raise InvalidRequest("The path must be percent-encoded, and begin with a slash.")
        lower = [(name.lower(), value) for name, value in headers]
        kept = tuple(pair for pair in _without_hops(lower) if pair[0] not in _OF_THIS_REQUEST)
        return await self._exchange(method, target, kept, body, lambda reply: reply)

    async def _exchange(
        self, method: str, path: str, headers: Headers, body: bytes, decode: Callable[[HttpReply], T]
    ) -> T:
        assert self._session is not None, "a transport is open while it is used"
        reply_began = False
        try:
            async with self._session.request(
                method,
                URL(self._base_url + path, encoded=True),
                data=body or None,
                headers=(*headers, ("accept-encoding", "identity")),
                allow_redirects=False,
            ) as response:
                reply_began = True
                if 0 <= (response.content_length or -1) < LARGE_BODY_BYTES:
                    raw = await response.read()
                    await self._body_slots.small()
                    return decode(_reply(response, raw))
                async with self._body_slots.slot() as slot:
                    return decode(_reply(response, await _gathered(response, slot)))
        except _BROKEN as error:
            raise UpstreamUnreachable(_story(error), reply_began=reply_began) from error


async def _gathered(response: aiohttp.ClientResponse, slot: Slot) -> bytes:
    """A whole body, as it came. Raises UpstreamInvalid for one that is larger than any reply is."""
    pieces: list[bytes] = []
    size = 0
    while piece := await slot.piece(response.content.readany()):
        size += len(piece)
        if size > MAX_REPLY_BYTES:
            raise UpstreamInvalid("reply_size", f"the engine sent more than {MAX_REPLY_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _reply(response: aiohttp.ClientResponse, raw: bytes) -> HttpReply:
    """A reply that is whole. Raises UpstreamInvalid for one that cannot be sent on."""
    content_type = response.headers.get("content-type", "application/octet-stream")
    if not 200 <= response.status <= 599:
        raise UpstreamInvalid("status", f"the engine answered with the status {response.status}")
    if not _can_be_sent(content_type):
        raise UpstreamInvalid("content_type", "the reply's content-type cannot be sent on")
    encodings = ",".join(response.headers.getall("content-encoding", ()))
    return HttpReply(
        status=response.status,
        content_type=content_type,
        headers=end_to_end(response.headers.items()),
        body=decode_body(raw, encodings) if encodings else raw,
    )


def _without_hops(lower: list[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Headers of one connection left out, those that `Connection` names included."""
    named = {name.strip().lower() for header, value in lower if header == "connection" for name in value.split(",")}
    return (pair for pair in lower if pair[0] not in HOP_BY_HOP and pair[0] not in named)


def _inflate(body: bytes, wbits: int) -> bytes:
    """All members of a gzip body, or a deflate body with or without its zlib header. Raises zlib.error."""
    if wbits == 15 and (body[0] & 0x0F != 8 or int.from_bytes(body[:2], "big") % 31):
        wbits = -15  # "deflate" without the header that RFC 9110 asks for; common all the same
    members: list[bytes] = []
    left = MAX_REPLY_BYTES
    while body:
        member = zlib.decompressobj(wbits)
        members.append(member.decompress(body, left))
        left -= len(members[-1])
        if not member.eof:
            raise zlib.error("it is cut" if left else f"it grows beyond {MAX_REPLY_BYTES} bytes")
        if len(members) > MAX_GZIP_MEMBERS:
            raise zlib.error(f"it has more than {MAX_GZIP_MEMBERS} members")
        body = member.unused_data
        left = max(left, 1)  # 0 would mean no limit
    return b"".join(members)


_STORIES: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ConnectionTimeoutError, "The engine could not be reached in time"),
    (aiohttp.ClientConnectorError, "The engine could not be reached"),
    (aiohttp.ClientResponseError, "The engine answered what is not HTTP"),
    (HttpProcessingError, "The engine answered what is not HTTP"),
    (aiohttp.ClientPayloadError, "The engine's reply was cut"),
    (Exception, "The connection to the engine broke"),
)


def _story(error: Exception) -> str:
    """What happened, for a client and a log, in one line."""
    told = next(story for kind, story in _STORIES if isinstance(error, kind))
    detail = " ".join(str(error).split())[:300]
    return f"{told}: {detail or type(error).__name__}."
