"""Reads bodies within their limit, sends answers, and notices disconnected clients, for every route.

ASGI's `send` returns when the bytes are handed to the transport, where megabytes may wait for a client reading nothing;
and only a task waiting for it learns of a lost connection. So a handler finds its client's connection in the scope.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, cast

from starlette.types import Message, Receive, Scope, Send

from stenograph.core.errors import (
    BodyTooLarge,
    BudgetSpent,
    InvalidRequest,
    LimitExceeded,
    StenographError,
    UnsupportedMediaType,
)
from stenograph.dialects.base import Refusal
from stenograph.http.metrics import Metrics
from stenograph.offload.body_slots import LARGE_BODY_BYTES, BodySlots

Headers = Iterable[tuple[str, str]]

LINK_EXTENSION = "stenograph.delivery"
"""In a scope, under ASGI's `extensions`: the client's connection. See `delivery_of`."""

HEADERS_BY_NAME = "stenograph.headers"
"""In a scope: the value of `headers_of`."""


class ClientLink(Protocol):
    """A client's connection, as the handler of its request knows it."""

    @property
    def is_gone(self) -> bool:
        """Whether written bytes no longer get to the client."""
        ...

    def answer(self, send: Send, status: int, body: bytes, headers: Headers) -> Awaitable[None]:
        """The write of a whole answer to any request but HEAD, with its length: head and body in one."""
        ...

    async def has_left(self) -> bool:
        """Wait, after the last write, until its last byte has left; False if the connection broke first."""
        ...

    def cut(self) -> None:
        """Break the connection, to show the client an incomplete answer."""
        ...

    def when_gone(self, on_gone: Callable[[], object] | None) -> None:
        """Set a callback for the loss of the connection, called once; at once if it is lost already. None calls
        nothing.

        The request's body must have been read.
        """
        ...

    async def finish(self, last_write: Awaitable[None]) -> bool:
        """Make the last write of an answer; return whether its last byte left through a live connection.

        Waits for a slow reader; closing on a client that reads nothing is the server's task. News of a closed
        connection takes one event-loop iteration; after it nothing comes between the check and the write, unless the
        write has to wait for room, and then the word comes first.
        """
        ...


def header_bytes(name: str, value: str) -> tuple[bytes, bytes]:
    """A header to send. An engine's came as any bytes, was read as UTF-8 with surrogates, and goes out as it came."""
    return name.encode("ascii"), value.encode("utf-8", "surrogateescape")


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send an answer at once, with its length."""
    raw = [header_bytes(name, value) for name, value in headers]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class _AnotherServers:
    """The connection of a server that tells nothing of it: everything has left at once, and no client is gone."""

    def answer(self, send: Send, status: int, body: bytes, headers: Headers) -> Awaitable[None]:
        return send_whole(send, status, body, headers)

    async def has_left(self) -> bool:
        return True

    @property
    def is_gone(self) -> bool:
        return False

    def cut(self) -> None:
        raise ConnectionAbortedError

    def when_gone(self, on_gone: Callable[[], object] | None) -> None:
        """Nothing is ever called."""

    async def finish(self, last_write: Awaitable[None]) -> bool:
        await last_write
        return True


_ANOTHERS = {"connection": _AnotherServers()}


def delivery_of(scope: Scope) -> ClientLink:
    """The connection of a request."""
    return cast("ClientLink", scope.get("extensions", {}).get(LINK_EXTENSION, _ANOTHERS)["connection"])


class ClientGone(Exception):
    """The client closed its connection before its request was whole; there is nobody to answer."""


def _check_type(headers: dict[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType for a body declared as other than JSON, or sent by a web page and without a type.

    With a body without a type (a Blob), a page's request reaches us without its browser asking us first; every other
    client may leave it out.
    """
    given = headers.get(b"content-type")
    if not has_body(headers):
        return
    if given is None and b"origin" not in headers:
        return
    media = (given or b"").partition(b";")[0].strip().lower()
    if media != b"application/json" and not (media.startswith(b"application/") and media.endswith(b"+json")):
        said = "has no content type" if given is None else f"is {media[:80].decode('latin-1')!r}"
        raise UnsupportedMediaType(
            f"The body {said}, but this route takes JSON: send the header 'content-type: application/json'"
            " (with curl: -H 'content-type: application/json')."
        )


def has_body(headers: dict[bytes, bytes]) -> bool:
    """Whether a request's head announces a body."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, body_slots: BodySlots | None = None, is_json: bool = False
) -> bytes:
    """Read the whole body, a large one in a slot. Raises BodyTooLarge before reading more than `max_bytes`,
    ClientGone, InvalidRequest; UnsupportedMediaType where it has to be JSON and is of another type."""
    headers = headers_of(scope)
    if is_json and headers.get(b"content-type") != b"application/json":
        _check_type(headers)
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise InvalidRequest("The body must not be compressed (content-encoding).")
    announced = headers.get(b"content-length", b"0")
    num_announced = int(announced) if announced.isdigit() else 0
    if num_announced > max_bytes:
        raise _too_large(max_bytes)
    if body_slots is None or 0 < num_announced < LARGE_BODY_BYTES:
        return await _gather(receive, max_bytes)
    async with body_slots.slot() as slot:
        return await _gather(lambda: slot.piece(receive(), _num_bytes), max_bytes)


read_json = partial(read_body, is_json=True)
"""`read_body` for a route with a JSON body."""


def _num_bytes(message: Message) -> int:
    return len(message.get("body", b""))


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
            return b"".join(chunks)  # of one it makes no copy


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """The headers of a request by their names in lower case; of several with one name the last. Made once."""
    found: dict[bytes, bytes] | None = scope.get(HEADERS_BY_NAME)
    if found is None:
        found = scope[HEADERS_BY_NAME] = dict(scope["headers"])
    return found


def header_value(scope: Scope, name: bytes) -> str | None:
    """A header of a request; `name` in lower case."""
    value = headers_of(scope).get(name)
    return None if value is None else value.decode("latin-1")


async def send_refusal(send: Send, refusal: Refusal, headers: Sequence[tuple[str, str]] = ()) -> None:
    """Send an error as its dialect writes it, with these headers besides."""
    ours = {name for name, _ in headers}
    theirs = [pair for pair in refusal.headers if pair[0].lower() not in ours]
    await send_whole(send, refusal.status, refusal.content, [*headers, *theirs])


def count_error(metrics: Metrics, error: StenographError) -> None:
    """Count an error sent to a client, and the limit behind it."""
    metrics.error_sent(error.code)
    if isinstance(error, LimitExceeded | BudgetSpent):
        metrics.limit_hit(error.limit)
    elif isinstance(error, BodyTooLarge):
        metrics.limit_hit("body_bytes")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than {max_bytes} bytes, the most that this route accepts (--max-body-bytes, or less)."
    )
