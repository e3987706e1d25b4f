"""Who asks, and for which session. Reads headers; decides nothing about turns."""

import hmac
from collections.abc import Iterable, Sequence

from stenograph.core.errors import Unauthorized
from stenograph.session.manager import SessionManager
from stenograph.session.session import Session

Headers = Iterable[tuple[bytes, bytes]]


class Doorman:
    """Checks keys, where the server has any, and finds the session that a request names."""

    def __init__(self, *, api_keys: Sequence[str], manager: SessionManager) -> None:
        self._keys = [key.encode() for key in api_keys]
        self._manager = manager

    def check_key(self, headers: Headers) -> None:
        """Raise Unauthorized unless the request carries one of the server's keys; without keys all may enter."""
        if not self._keys:
            return
        given = _credential(dict(headers))
        if given is None:
            raise Unauthorized("This server asks for a key: send it as 'Authorization: Bearer …' or as 'x-api-key'.")
        # Every key is compared, in constant time, so that timing tells nothing of any.
        if sum(hmac.compare_digest(given, key) for key in self._keys) == 0:
            raise Unauthorized("The key is not one of this server's keys.")

    def session_of(self, path_session_id: str | None, headers: Headers) -> Session | None:
        """The session that the path names, else `X-Session-Id`, else (on a server without keys) the bearer.

        None means that the request names no session and is served statelessly. Raises SessionNotFound for a path or
        header that names none; a bearer that is no session is just a key.
        """
        if path_session_id is not None:
            return self._manager.get(path_session_id)
        found = dict(headers)
        if (named := found.get(b"x-session-id")) is not None:
            return self._manager.get(named.decode("latin-1"))
        bearer = None if self._keys else _credential(found)
        if bearer is not None and self._manager.has(bearer.decode("latin-1")):
            return self._manager.get(bearer.decode("latin-1"))
        return None


def _credential(headers: dict[bytes, bytes]) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key")
