"""Authenticates a request and finds its session. Reads headers; decides nothing about turns."""

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
        """Raise Unauthorized if the server has keys and the request carries none of them."""
        if not self._keys:
            return
        given = _credentials(headers)
        if not given:
            raise Unauthorized("This server requires a key: send it as 'Authorization: Bearer …' or as 'x-api-key'.")
        # Every key is compared, in constant time, so that timing tells nothing of any.
        if sum(hmac.compare_digest(one, key) for one in given for key in self._keys) == 0:
            raise Unauthorized("The key is not one of this server's keys.")

    def session_of(self, path_session_id: str | None, headers: Headers) -> Session | None:
        """The session of the path, else of `X-Session-Id`, else (on a server without keys) of a bearer or `x-api-key`.

        None means that the request names no session and is served statelessly. Raises SessionNotFound for a path or
        header that names none; a credential that is no session is just a key.
        """
        if path_session_id is not None:
            return self._manager.get(path_session_id)
        found = dict(headers)
        if (named := found.get(b"x-session-id")) is not None:
            return self._manager.get(named.decode("latin-1"))
        for credential in () if self._keys else _credentials(headers):
            if self._manager.has(credential.decode("latin-1")):
                return self._manager.get(credential.decode("latin-1"))
        return None


def _credentials(headers: Headers) -> list[bytes]:
    """The bearer and the `x-api-key`, those that are there: SDKs fill in one, and people set the other beside it."""
    given: list[bytes] = []
    for name, value in headers:
        scheme, _, token = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer" and token.strip():
            given.append(token.strip())
        elif name == b"x-api-key" and value:
            given.append(value)
    return given
