"""Answers of routes served by Starlette: values as JSON, whole or in pieces, and streams closed with their client."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from itertools import chain, islice

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from stenograph.core.json_pieces import joined, json_pieces
from stenograph.http.wire import ClientLink
from stenograph.offload.pool import LoopShare

WHOLE_PIECES = 2
"""An answer of no more pieces than this is sent whole, with its length."""


def json_response(value: object, *, status: int = 200) -> Response:
    """A value as a Starlette response."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def in_pieces(share: LoopShare, pieces: Iterator[bytes], *, media_type: str) -> Response:
    """An answer made a piece at a time while it is sent; between two pieces the loop serves others."""
    first = list(islice(pieces, WHOLE_PIECES + 1))
    if len(first) <= WHOLE_PIECES:
        return Response(b"".join(first), media_type=media_type)
    return StreamingResponse(share.pieces(chain(first, pieces)), media_type=media_type)


def json_in_pieces(share: LoopShare, value: object) -> Response:
    """A value as `json_pieces` writes it; like `json_response`, for large values."""
    return in_pieces(share, joined(json_pieces(value)), media_type="application/json")


class ClosedStream(StreamingResponse):
    """An answer with its source closed at its end, and once the client has left: later writes go nowhere, and nothing
    else says so before the next event-loop iteration."""

    def __init__(
        self,
        link: ClientLink,
        content: AsyncGenerator[bytes | memoryview, None],
        *,
        media_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._link = link
        self._content = content

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._content) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if self._link.is_gone:
                    return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
