"""Detects that a client has left, and that an answer has: its last byte is out of the transport's write buffer while
the connection lives.

uvicorn's `send` returns when the bytes are handed to the transport, of which megabytes may wait there for a client that
reads nothing; and of a lost connection it tells only a task that waits for it. A handler finds `has_left` and
`when_gone` in its scope, under ASGI's `extensions`. Knows nothing of what is sent.
"""

from collections.abc import Awaitable, Callable
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "stenograph.delivery"

HasLeft = Callable[[], Awaitable[bool]]
"""To be called after the last write: waits until its last byte has left, and is False if the connection broke first."""

WhenGone = Callable[[Callable[[], None] | None], None]
"""Sets what is called once when the connection is lost, at once if it is lost already; None calls nothing any more."""


class DeliveryConnection(HttpToolsProtocol):
    """A connection that calls a handler when it is lost, and knows when what was written to it has left."""

    _is_lost = False
    _is_gone = False
    _on_gone: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"has_left": self._has_left, "when_gone": self._when_gone}}

    def connection_lost(self, exc: Exception | None) -> None:
        # Lost without an error are connections that were closed, which is after the last byte, or aborted.
        self._is_lost = exc is not None or self.flow.write_paused
        super().connection_lost(exc)
        self._is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def _when_gone(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is None:
            return
        self.flow.resume_reading()  # after a large body nothing is read, not even the connection's end
        if self._is_gone:
            on_gone()

    async def _has_left(self) -> bool:
        if not self._is_lost and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(high=0)  # writing is paused now, and resumed when nothing is left
            await self.flow.drain()
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits()
        return not self._is_lost


def has_left_of(scope: Scope) -> HasLeft:
    """The function that waits until this request's answer has left; under another server it returns True at once."""
    found = scope.get("extensions", {}).get(_EXTENSION)
    return _nobody_knows if found is None else cast("HasLeft", found["has_left"])


def when_gone_of(scope: Scope) -> WhenGone:
    """The function that sets what is called when this request's client is gone; another server calls nothing."""
    found = scope.get("extensions", {}).get(_EXTENSION)
    return _nobody_calls if found is None else cast("WhenGone", found["when_gone"])


async def _nobody_knows() -> bool:
    return True


def _nobody_calls(on_gone: Callable[[], None] | None) -> None:
    """Another server's connection: nothing is set."""
