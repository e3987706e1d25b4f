"""The session that a request names, by the bytes of its head, before anything else reads it. Pure.

It finds what `http/auth.Doorman` finds: the path, `X-Session-Id`, and, on a server without keys, a credential. What is
no id names nothing here: its request is served where it is, and refused there.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

_TARGET = re.compile(rb"([A-Z-]+) +(?:[a-z]+://[^/ ?]*)?([^ ?#]*)(\?[^ ]*)?")
_IN_PATH = re.compile(rb"/sessions/([0-9a-f]{32})(?:/|$)")
_IN_HEADER = re.compile(rb"\nx-session-id:[ \t]*([^\r\n]*)", re.IGNORECASE)
_IN_CREDENTIAL = re.compile(
    rb"\n(?:authorization:[ \t]*bearer[ \t]+|x-api-key:[ \t]*|x-goog-api-key:[ \t]*)([0-9a-f]{32})[ \t]*\r?(?=\n)",
    re.IGNORECASE,
)
_IN_QUERY = re.compile(rb"[?&]key=([0-9a-f]{32})(?:&|$)")
_ID = re.compile(rb"[0-9a-f]{32}")
_OF_SERVER = frozenset(
    (
        *(b"/update_weights_from_disk", b"/update_weight_version", b"/pause_generation", b"/continue_generation"),
        *(b"/flush_cache", b"/model_info", b"/engines"),
    )
)
"""Paths of what one process does for all."""
_KEY = re.compile(rb"\nidempotency-key:[ \t]*([^\r\n]*)", re.IGNORECASE)
_CONSOLE = b"/console/api"
"""Before the path of a session that the console asks for."""
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([0-9]+)[ \t]*\r?\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\ntransfer-encoding:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Named:
    """The parts of a request that say who serves it: method, path, and the session or the key that it names; or that it
    is for the one process that speaks for the server to its engines."""

    method: bytes
    path: bytes
    session_id: str | None
    key: bytes | None
    is_of_server: bool = False


def named_by(head: bytes, *, by_credential: bool) -> Named | None:
    """The names in a request's head, blank line included; None if it has no target. `by_credential`: the server has no
    keys, and so a credential may be a session's id."""
    found = _TARGET.match(head)
    if found is None:
        return None
    method, path, query = found.groups()
    if b"%" in path:
        path = unquote_to_bytes(path)
    if path.startswith((b"/sessions", _CONSOLE)):
        named = _IN_PATH.match(path.removeprefix(_CONSOLE))
        session_id = None if named is None else named[1].decode()
        opens = method == b"POST" and path.strip(b"/") == b"sessions"
        return Named(method, path, session_id, (_last(_KEY, head) or None) if opens else None)
    if path in _OF_SERVER or path.startswith(b"/engines/"):
        return Named(method, path, None, None, is_of_server=True)
    given = _last(_IN_HEADER, head)
    if given is not None:
        return Named(method, path, given.decode() if _ID.fullmatch(given) else None, None)
    if by_credential and path.startswith(b"/v1"):
        credential = _IN_CREDENTIAL.search(head) or _IN_QUERY.search(query or b"")
        if credential is not None and _ID.fullmatch(credential[1]):
            return Named(method, path, credential[1].decode(), None)
    return Named(method, path, None, None)


def body_bytes_of(head: bytes) -> int | None:
    """The length of a request's body; None for a chunked one, whose end only its reader finds."""
    if _CHUNKED.search(head):
        return None
    found = _LENGTH.search(head)
    return 0 if found is None else int(found[1])


def _last(pattern: "re.Pattern[bytes]", head: bytes) -> bytes | None:
    """A header's value; of several with one name the last, as everywhere."""
    values = pattern.findall(head)
    return values[-1].strip() if values else None
