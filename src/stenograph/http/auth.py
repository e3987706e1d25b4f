"""Keys, the tokens of sessions, and the one reader of a request's session.

An API key is a trainer's. A session's token is an agent's: it is made of the session's id by a key, so every process
with this key knows it, and nobody stores it. Reads headers and the query; decides nothing about turns.
"""

import hmac
import re
from collections.abc import Sequence
from urllib.parse import parse_qsl

from starlette.types import Scope

from stenograph.core.errors import Forbidden, SessionNotFound, Unauthorized
from stenograph.http.route import TOKEN, SessionTokens, WithoutTenants
from stenograph.http.wire import header_value
from stenograph.session.manager import SessionManager
from stenograph.session.session import Session

KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""Headers with a key as their value, beside a bearer: Anthropic's clients send the one, Google's the other."""
KEY_QUERY = "key"
"""The query's name for a key. Google's clients may send it there."""
PASSED_ON = b"x-stenograph-passed-on"
"""Header of a request passed on from one server to another; of one for a part of many, its value is the session."""
SESSION_ID = re.compile("[0-9a-f]{32}")
_IN_PATH = re.compile("(?:/console/api)?/sessions/([^/]+)")
_KEY_HEADERS = tuple(name.encode() for name in KEY_HEADERS)


# --- what a request says


def session_named(scope: Scope, *, by_id: bool) -> str | None:
    """A request's session, named in its path, in `X-Session-Id`, or by the first credential that is a token, or
    (`by_id`: on a server without keys) an id. None if there is none. All routing of requests asks here."""
    named = _in_address(scope)
    if named is not None or not scope["path"].startswith("/v1"):
        return named
    for credential in credentials_of(scope):
        text = credential.decode("latin-1")
        if by_id and SESSION_ID.fullmatch(text):
            return text
        if found := TOKEN.fullmatch(text):
            return found[1]
    return None


def _in_address(scope: Scope) -> str | None:
    """The session of the path or the header, whether or not it looks like an id."""
    path: str = scope["path"]
    if path.startswith("/v1"):
        return header_value(scope, b"x-session-id")
    if path == "/samples":
        return header_value(scope, PASSED_ON)
    found = _IN_PATH.match(path)
    return None if found is None else found[1]


def credentials_of(scope: Scope) -> list[bytes]:
    """Every key in a request: SDKs fill in one header, and people set another beside it, or `key` in the query."""
    given: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                given.append(token.strip())
        elif name in _KEY_HEADERS and value:
            given.append(value)
    if scope["query_string"]:
        query = scope["query_string"].decode("latin-1")
        given += [value.encode() for name, value in parse_qsl(query) if name == KEY_QUERY]
    return given


# --- who may do what


class Authenticator(WithoutTenants):
    """Checks keys and tokens, where the server has keys, and finds a request's session."""

    def __init__(self, *, api_keys: Sequence[str], manager: SessionManager, admin_keys: Sequence[str] = ()) -> None:
        """An administrator's key is also one for everything else."""
        self._admin_keys = [key.encode() for key in admin_keys]
        self._keys = [key.encode() for key in api_keys] + (self._admin_keys if api_keys else [])
        self.tokens = SessionTokens(api_keys)
        self.manager = manager

    def check_key(self, scope: Scope) -> None:
        """Raise Unauthorized where the server has keys and the request none, Forbidden for a session's token."""
        if not self._keys:
            return
        given = credentials_of(scope)
        if are_among(given, self._keys):
            return
        self._check_given(given)
        raise Forbidden(
            "A session's token is good for its turns, token counts and list of models alone: this route takes one of"
            " --api-key."
        )

    def check_admin(self, scope: Scope) -> None:
        """Raise Unauthorized or Forbidden unless the request may change the policy, the engines or files: on a server
        with keys, by one of `--admin-key`."""
        given = credentials_of(scope)
        if self._admin_keys and are_among(given, self._admin_keys):
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

    def check_agent(self, scope: Scope) -> str | None:
        """A request's session, if it names one. Raises Unauthorized where the server has keys and the request neither
        a key nor a session's token, and Forbidden for the token of another session than the named one."""
        named = session_named(scope, by_id=not self._keys)
        if not self._keys:
            return named
        given = credentials_of(scope)
        if not are_among(given, self._keys) and named not in self._check_given(given):
            raise Forbidden("This token is of another session than the one that the request names.")
        return named

    async def session_of(self, scope: Scope, *, wakes: bool = True) -> Session | None:
        """A request's session, live, read from the store if need be; where the request `wakes` none, it is only to be
        read.

        None: the request names no session and is served statelessly. Raises as `check_agent`; SessionNotFound for an
        unknown one in a path, header or token, and as `Sessions.wake`. On a server without keys a credential naming no
        session is just a key.
        """
        named = self.check_agent(scope)
        if named is None:
            return None
        try:
            return self.manager.sessions.get(named)
        except SessionNotFound:
            try:
                return await (self.manager.sessions.wake(named) if wakes else self.manager.sessions.peek(named))
            except SessionNotFound:
                if self._keys or _in_address(scope) is not None:
                    raise
                return None

    def _check_given(self, given: Sequence[bytes]) -> list[str]:
        """The sessions of the tokens (not keys) among these. Raises Unauthorized if there are none."""
        sessions = [session for one in given if (session := self.tokens.session_of(one)) is not None]
        if not given:
            raise Unauthorized(
                "This server requires a key: send it as 'Authorization: Bearer …', as 'x-api-key', as"
                " 'x-goog-api-key', or as 'key' in the query."
            )
        if not sessions:
            raise Unauthorized("The key is none of this server's keys, and no token of one of its sessions.")
        return sessions


def are_among(given: Sequence[bytes], keys: Sequence[bytes]) -> bool:
    """Whether one of these is a key. Every key is compared, in constant time: timing tells nothing of any."""
    return sum(hmac.compare_digest(one, key) for one in given for key in keys) > 0
