"""Authenticates a request and finds its session. Reads headers and the query; decides nothing about turns."""

import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from urllib.parse import parse_qsl

from starlette.types import Scope

from stenograph.core.errors import Forbidden, SessionNotFound, Unauthorized
from stenograph.http.wire import headers_of
from stenograph.session.manager import SessionManager
from stenograph.session.session import Session

KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""Headers whose value is a key, beside a bearer: Anthropic's clients send the one, Google's the other."""
SESSION_ID = re.compile(rb"[0-9a-f]{32}")
KEY_QUERY = "key"
"""The query's name for a key. Google's clients may send it there."""


class Doorman:
    """Checks keys, where the server has any, and finds the session that a request names."""

    def __init__(self, *, api_keys: Sequence[str], manager: SessionManager, admin_keys: Sequence[str] = ()) -> None:
        """An administrator's key is also one for everything else."""
        self._admin_keys = [key.encode() for key in admin_keys]
        self._keys = [key.encode() for key in api_keys] + (self._admin_keys if api_keys else [])
        self.manager = manager

    def check_key(self, scope: Scope) -> None:
        """Raise Unauthorized if the server has keys and the request carries none of them."""
        if not self._keys:
            return
        given = _credentials(scope)
        if not given:
            raise Unauthorized(
                "This server requires a key: send it as 'Authorization: Bearer …', as 'x-api-key', as"
                " 'x-goog-api-key', or as 'key' in the query."
            )
        if not _are_among(given, self._keys):
            raise Unauthorized("The key is not one of this server's keys.")

    def check_admin(self, scope: Scope) -> None:
        """Raise Unauthorized or Forbidden unless the request may change the policy, the engines or files.

        On a server without any key everybody may. With keys it takes one of `--admin-key`: who may chat may not.
        """
        given = _credentials(scope)
        if self._admin_keys and _are_among(given, self._admin_keys):
            return
        if self._keys:
            self.check_key(scope)
        elif not self._admin_keys:
            return
        elif not given:
            raise Unauthorized("This route requires an administrator's key: send one of --admin-key as a bearer.")
        raise Forbidden(
            "This key may not do this: it takes one of --admin-key."
            if self._admin_keys
            else "A server with --api-key does this only for a key of --admin-key, and has none."
        )

    async def session_of(self, path_session_id: str | None, scope: Scope, *, wakes: bool = True) -> Session | None:
        """The session of the path, else of `X-Session-Id`, else (on a server without keys) of a credential. Raises
        Unauthorized as `check_key`.

        None means that the request names no session and is served statelessly. It is the live one, read from the store
        if need be; where the request `wakes` none, that is only to be read. Raises SessionNotFound for a path or header
        that names none, and as `SessionManager.wake`; a credential that is no session is just a key.
        """
        if self._keys:
            self.check_key(scope)
        find = self.manager.wake if wakes else self.manager.look
        if path_session_id is not None:
            try:
                return self.manager.get(path_session_id)
            except SessionNotFound:
                return await find(path_session_id)
        found = headers_of(scope)
        if (named := found.get(b"x-session-id")) is not None:
            return await find(named.decode("latin-1"))
        for credential in () if self._keys else _credentials(scope):
            if self.manager.has(credential.decode("latin-1")):
                return self.manager.get(credential.decode("latin-1"))
        return None if self._keys or self.manager.shelf is None else await _asleep(scope, find)


async def _asleep(scope: Scope, find: Callable[[str], Awaitable[Session]]) -> Session | None:
    """The session of the store that a credential is the id of; None if none is."""
    for credential in _credentials(scope):
        if SESSION_ID.fullmatch(credential) is not None:
            with suppress(SessionNotFound):
                return await find(credential.decode())
    return None


def _credentials(scope: Scope) -> list[bytes]:
    """Every key that a request carries: SDKs fill in one header, and people set another beside it."""
    given: list[bytes] = []
    names = [name.encode() for name in KEY_HEADERS]
    for name, value in scope["headers"]:
        scheme, _, token = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer" and token.strip():
            given.append(token.strip())
        elif name in names and value:
            given.append(value)
    query = scope["query_string"].decode("latin-1")
    given += [value.encode() for name, value in parse_qsl(query) if name == KEY_QUERY]
    return given


def _are_among(given: Sequence[bytes], keys: Sequence[bytes]) -> bool:
    """Whether one of these is a key. Every key is compared, in constant time, so that timing tells nothing of any."""
    return sum(hmac.compare_digest(one, key) for one in given for key in keys) > 0


def query_without_key(query: bytes) -> str:
    """A query as it came, but for the keys in it: neither an engine nor a log is to see one."""
    return "&".join(part for part in query.decode("latin-1").split("&") if not _is_key(part))


def keys_in_query(query: bytes) -> str:
    """The keys in a query, as they came."""
    return "&".join(part for part in query.decode("latin-1").split("&") if _is_key(part))


def _is_key(part: str) -> bool:
    return any(name == KEY_QUERY for name, _ in parse_qsl(part, keep_blank_values=True))
