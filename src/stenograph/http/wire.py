"""What every route needs of a socket: a body within its limit, an answer, and word of a client that left."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from stenograph.core.errors import BodyTooLarge, InvalidRequest, StenographError
from stenograph.protocol.openai_errors import error_body, error_headers


class ClientGone(Exception):
    """The client closed its connection before its request was whole; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int) -> bytes:
    """Read the whole body. Raises BodyTooLarge before reading more than `max_bytes`, ClientGone, InvalidRequest."""
    headers = dict(scope["headers"])
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise InvalidRequest("The body must not be compressed (content-encoding).")
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
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


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
    """Send one whole JSON answer."""
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: StenographError) -> None:
    """Send an error in OpenAI's shape."""
    await send_json(send, error.status, error_body(error), error_headers(error))


@asynccontextmanager
async def watching_disconnect(receive: Receive, on_gone: Callable[[], None]) -> AsyncGenerator[None]:
    """While inside, call `on_gone` if the client closes its connection. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    watcher = asyncio.get_running_loop().create_task(watch(), name="watch-disconnect")
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait({watcher})


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes (--max-body-bytes).")
