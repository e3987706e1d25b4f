"""Streamed answers whose source is closed with their client."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Send

from stenograph.http.wire import ClientLink


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
