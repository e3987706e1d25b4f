"""What every route needs of a socket: a body within its limit, an answer, and word of a client that left."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain, islice

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stenograph.core.errors import BodyTooLarge, InvalidRequest, LimitExceeded, StenographError, UpstreamRefused
from stenograph.core.json_pieces import joined, json_pieces
from stenograph.http.metrics import Metrics
from stenograph.offload.body_slots import LARGE_BODY_BYTES, BodySlots
from stenograph.offload.loop_share import LoopShare
from stenograph.protocol.openai_errors import error_body, error_headers

Headers = Iterable[tuple[str, str]]


WHOLE_PIECES = 2
"""An answer of no more pieces than this is sent whole, with its length."""


class ClientGone(Exception):
    """The client closed its connection before its request was whole; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, body_slots: BodySlots | None = None) -> bytes:
    """Read the whole body, a large one in a slot. Raises BodyTooLarge before reading more than `max_bytes`,
    ClientGone, InvalidRequest."""
    headers = dict(scope["headers"])
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise InvalidRequest("The body must not be compressed (content-encoding).")
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    if body_slots is None or (announced.isdigit() and 0 < int(announced) < LARGE_BODY_BYTES):
        return await _gather(receive, max_bytes)
    async with body_slots.slot() as slot:
        return await _gather(lambda: slot.piece(receive()), max_bytes)


async def _gather(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def header_value(scope: Scope, name: bytes) -> str | None:
    """A header of a request; `name` in lower case."""
    value = dict(scope["headers"]).get(name)
    return None if value is None else value.decode("latin-1")


def header_bytes(name: str, value: str) -> tuple[bytes, bytes]:
    """A header to send. An engine's came as any bytes, was read as UTF-8 with surrogates, and goes out as it came."""
    return name.encode("ascii"), value.encode("utf-8", "surrogateescape")


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send an answer at once, with its length."""
    raw = [header_bytes(name, value) for name, value in headers]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: StenographError) -> None:
    """Send an error in OpenAI's shape; an engine's refusal as the engine wrote it."""
    if isinstance(error, UpstreamRefused):
        headers = [("content-type", error.content_type), *error.headers]
        await send_whole(send, error.engine_status, error.body, headers)
    else:
        headers = [("content-type", "application/json"), *error_headers(error)]
        await send_whole(send, error.status, error_body(error), headers)


def json_response(value: object, *, status: int = 200) -> Response:
    """A value as a Starlette response."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def in_pieces(share: LoopShare, pieces: Iterator[bytes], *, media_type: str) -> Response:
    """An answer that is made a piece at a time while it is sent; between two pieces the loop serves others."""
    first = list(islice(pieces, WHOLE_PIECES + 1))
    if len(first) <= WHOLE_PIECES:
        return Response(b"".join(first), media_type=media_type)
    return StreamingResponse(share.pieces(chain(first, pieces)), media_type=media_type)


def json_in_pieces(share: LoopShare, value: object) -> Response:
    """A value as `json_pieces` writes it; like `json_response`, for what may be large."""
    return in_pieces(share, joined(json_pieces(value)), media_type="application/json")


def count_error(metrics: Metrics, error: StenographError) -> None:
    """Count an error that a client is told of, and the limit that it ran into."""
    metrics.error_sent(error.code)
    if isinstance(error, LimitExceeded):
        metrics.limit_hit(error.limit)
    elif isinstance(error, BodyTooLarge):
        metrics.limit_hit("body_bytes")


class Client:
    """Whoever waits for an answer. `is_gone` turns true when it closes its connection."""

    def __init__(self, receive: Receive, *, on_gone: Callable[[], None]) -> None:
        self.is_gone = False
        self._receive = receive
        self._on_gone = on_gone

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """While inside, notice when the client leaves. Its body must have been read."""
        watcher = asyncio.get_running_loop().create_task(self._watch(), name="watch-disconnect")
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})

    async def finish(self, last_write: Awaitable[None]) -> bool:
        """Make the last write of an answer; tell whether it was handed to a connection that was alive.

        Word of a closed connection is one pass of the loop on its way; after that pass nothing comes between the
        check and the write, unless the write has to wait for room, and then the word comes first.
        """
        await asyncio.sleep(0)
        gone_before = self.is_gone
        await last_write
        return not (gone_before or self.is_gone)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._on_gone()


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than the {max_bytes} bytes that this route takes (--max-body-bytes, or less)."
    )
