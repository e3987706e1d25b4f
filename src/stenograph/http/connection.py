"""One client connection: uvicorn's HTTP protocol, with two limits that it has not.

A pipelined request would hide a hang-up: uvicorn queues it, reads no further, and never learns that the client left,
so that a turn would be drawn to its end for nobody. No client of these routes pipelines; one that does is hung up on.
Request headers are limited in all: uvicorn limits only the target.
"""

from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 * 1024
"""Names and values together."""


class ClientConnection(HttpToolsProtocol):
    """A connection that takes one request at a time."""

    _is_refused = False
    _num_header_bytes = 0

    def on_message_begin(self) -> None:
        running = cast("RequestResponseCycle | None", self.cycle)
        if running is not None and not running.response_complete:
            self._is_refused = True
            self.transport.close()
        if not self._is_refused:
            self._num_header_bytes = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_refused:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self._is_refused:
            self._is_refused = True
            self.send_400_response(f"The request's headers have more than {MAX_HEADER_BYTES} bytes.")
        if not self._is_refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()
