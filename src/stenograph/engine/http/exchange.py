"""The interface between an engine's transport and its connections: a request goes out, and its reply comes in pieces.

`Connections` has two implementations: `OwnConnections` for http, and `AiohttpConnections` for https. Both raise
UpstreamUnreachable and nothing else for what happens to a connection. Owns no socket.
"""

import os
import ssl
from collections.abc import Sequence
from typing import Protocol

from stenograph.core.errors import UpstreamUnreachable

Pairs = Sequence[tuple[str, str]]

MAX_LINE_BYTES = 2**16
"""Longest header line of a reply."""
KEEPALIVE_S = 3.0
"""Seconds for which an idle connection is kept; uvicorn, which most engines run on, closes its own after 5 s."""


class Exchange(Protocol):
    """A reply whose head has come. Whoever got it calls `leave` in the end."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Pairs:
        """Names in lower case, in the order in which they came."""
        ...

    @property
    def num_expected(self) -> int | None:
        """Length of the body in bytes, None if only its end will show it."""
        ...

    async def piece(self) -> bytes:
        """The next bytes of the body; empty at its end. Nothing is read while nobody waits, but for one buffer.

        Raises UpstreamUnreachable if the body is cut.
        """
        ...

    async def pieces(self, num_bytes: int) -> Sequence[bytes]:
        """The same in pieces, at least `num_bytes` unless the body ends before; none at its end."""
        ...

    @property
    def num_pending(self) -> int:
        """Bytes of the body that have come, and wait to be taken."""
        ...

    def hand_over(self) -> None:
        """Let `pieces` return with what has come, at the latest once more comes."""
        ...

    def leave(self) -> None:
        """Keep the connection for another request if the reply is whole, else close it at once."""
        ...


class Connections(Protocol):
    """The connections to one address."""

    def open(self) -> None: ...

    async def aclose(self) -> None:
        """Close every connection, those in use included."""
        ...

    async def ask(self, method: str, target: str, headers: Pairs, body: bytes) -> Exchange:
        """Send a request and wait for the head of its reply. `target` begins with the address's own path.

        Raises UpstreamUnreachable. Cancelling it closes the connection.
        """
        ...


def unreachable(text: str, cause: Exception | str, *, reply_began: bool = False) -> UpstreamUnreachable:
    """The error of an engine that cannot be reached, in one line for a client and a log."""
    return UpstreamUnreachable(f"{text}: {reason_of(cause)}.", reply_began=reply_began)


def not_connected(host: str, port: int, cause: Exception | str) -> UpstreamUnreachable:
    """No connection could be made."""
    reason = reason_of(cause)
    return UpstreamUnreachable(f"The engine at {host}:{port} could not be reached: {reason}.", reason=reason)


def reason_of(cause: Exception | str) -> str:
    """The operating system's words where it is its error, else the library's."""
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError):
        # Of a failed connect strerror has the address, of a failed lookup errno is none of the system's.
        text = os.strerror(cause.errno) if cause.errno is not None and cause.errno > 0 else cause.strerror or ""
        text = text[:1].lower() + text[1:]
    else:
        text = str(cause).rstrip(".")
    return " ".join(text.split())[:300] or type(cause).__name__
