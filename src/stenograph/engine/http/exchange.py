"""The limits, credentials and TLS of connections to engines; their errors, as UpstreamUnreachable. Owns no socket."""

import os
import ssl
from base64 import b64encode
from collections.abc import Sequence

from stenograph.core.errors import UpstreamUnreachable

Pairs = Sequence[tuple[str, str]]

MAX_LINE_BYTES = 2**16
"""Longest header line of a reply."""
KEEPALIVE_S = 3.0
"""Seconds to keep an idle connection; uvicorn, under most engines, closes its own after 5 s."""


def tls_of_clients() -> ssl.SSLContext:
    """Checks certificates by the system's authorities, or those of `SSL_CERT_FILE` and `SSL_CERT_DIR`."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def basic(name: str, password: str) -> str:
    """The value of `Authorization` for a name and a password. Source: RFC 7617, section 2."""
    return f"Basic {b64encode(f'{name}:{password}'.encode()).decode()}"


def unreachable(text: str, cause: Exception | str, *, reply_began: bool = False) -> UpstreamUnreachable:
    """The error of an unreachable engine, in one line for a client and a log."""
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
