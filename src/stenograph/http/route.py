"""A route is one row above its endpoint: method, path, bodies, errors, the required key, the answering process.

From the row come its binding and the check of the key, its operation in /openapi.json, its required row in
docs/http-api.md (a test compares), its forwarding to another process, and the gathering of the answers of all. Pure.
"""

import enum
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from stenograph.core.errors import SessionDamaged, SessionElsewhere, StenographError, StorageUnavailable
from stenograph.core.stated_options import TAG
from stenograph.dialects.common.errors import ErrorBody

Errors = tuple[type[StenographError], ...]
Schema = dict[str, Any]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])

STORED: Errors = (SessionDamaged, StorageUnavailable, SessionElsewhere)
"""Faults of a session read from the store."""

JSON = "application/json"
ID: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
ANY: dict[str, Schema] = {"*/*": {}}
TEXT: Schema = {"type": "string"}
REF = "#/components/schemas/"


class Needs(enum.StrEnum):
    """The least credential for a route on a server with keys, as the document names it."""

    NOTHING = "nothing"
    TOKEN = "session-token"
    KEY = "api-key"
    ADMIN = "admin-key"


class Who(enum.Enum):
    """The answering process, where a server has several."""

    PROCESS = enum.auto()
    """The one with the connection; where the request names a session, the one with the session."""
    SERVER = enum.auto()
    """The first: it acts for all."""


class Asking(enum.Enum):
    """The way to ask all processes."""

    EACH = enum.auto()
    """To all at once; each has as long as a turn, and the first failure is the answer."""
    BRIEFLY = enum.auto()
    """The same, in a few seconds."""
    IN_TURN = enum.auto()
    """To one after the other, until one refuses."""
    WHOEVER = enum.auto()
    """To all at once; absent ones are left out."""
    READINESS = enum.auto()
    """The same; an absent one is not ready."""
    PAGES = enum.auto()
    """To one after the other, as a page of the list wants more."""


class Reach(enum.Enum):
    """Whose answers are gathered where servers share a database."""

    NOBODY = enum.auto()
    """The database has them all."""
    SERVER = enum.auto()
    """Those of the server's own processes."""
    SERVERS = enum.auto()
    """Those of all servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class All:
    """Every process answers; `merge`, an entry of http/merging.py, makes one answer of theirs."""

    merge: str = ""
    ask: Asking = Asking.EACH
    reach: Reach = Reach.SERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path, spelled as Starlette binds it. `body` and `reply` are the types of a request and of its
    200 in JSON.

    `answers` are further ones without an error, by status, and `shapes` the types named there; `links` the operations
    for a reply's `session_id`. `errors` and `parameters` leave out those implied by the path and by a body in JSON.
    `error_body` is the shape of its errors.
    """

    method: str
    path: str
    id: str
    summary: str
    reply: type | None = None
    body: type | None = None
    answers: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    shapes: tuple[type, ...] = ()
    links: tuple[str, ...] = ()
    errors: Errors = ()
    parameters: tuple[Schema, ...] = ()
    error_body: type = ErrorBody
    needs: Needs = Needs.KEY
    who: Who | All = Who.PROCESS

    @property
    def shown_path(self) -> str:
        """The path as a document shows it."""
        return self.path.replace(":path}", "}")

    @property
    def name(self) -> str:
        """As docs/http-api.md names it: `POST /sessions`."""
        return f"{self.method} {self.shown_path}"


def operation(name: str, id_: str, summary: str, reply: type | None = None, **more: Any) -> Route:
    """A row."""
    method, path = name.split()
    return Route(method=method, path=path, id=id_, summary=summary, reply=reply, **more)


def route(name: str, id_: str, summary: str, reply: type | None = None, **more: Any) -> Callable[[Endpoint], Endpoint]:
    """Put a row above an endpoint; its further arguments are the fields of `Route`."""

    def with_row(endpoint: Endpoint) -> Endpoint:
        rows = (operation(name, id_, summary, reply, **more), *getattr(endpoint, _ROWS, ()))
        setattr(endpoint, _ROWS, rows)
        return endpoint

    return with_row


_ROWS = "rows_of_routes"


def rows_of(group: type) -> Iterator[tuple[Route, str]]:
    """The rows of a class, in their order, each with the name of its endpoint."""
    for name, member in vars(group).items():
        for row in getattr(member, _ROWS, ()):
            yield row, name


def session_paths(rows: Iterable[Route]) -> Mapping[str, Collection[str]]:
    """The paths below `/sessions/{id}/` of these rows, each with its methods."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if row.path.startswith(_ON_SESSION) and row.method != "HEAD":
            methods = {row.method, "HEAD"} if row.method == "GET" else {row.method}
            found.setdefault(row.path.removeprefix(_ON_SESSION), set()).update(methods)
    return found


_ON_SESSION = "/sessions/{id}/"


# --- what rows are made of


def public(kind: type) -> str:
    """The public name of a type: its own without `Wire`."""
    return kind.__name__.removeprefix("Wire")


def ref(kind: type) -> str:
    """The `$ref` of a type's schema."""
    return REF + public(kind)


def in_json(kind: type) -> dict[str, Schema]:
    """JSON content with the schema of a type."""
    return {JSON: {"schema": {"$ref": ref(kind)}}}


def one_answer(description: str, content: Schema) -> dict[str, Schema]:
    """The one answer of a route with other replies than JSON alone."""
    return {"200": {"description": description, "content": content}}


def parameter(where: str, name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": where, "description": description, "schema": schema}


SESSION_HEADER = parameter(
    "header",
    "X-Session-Id",
    "The session, where the path names none. docs/http-api.md says what happens without it.",
    ID,
)


# --- the sender of a request: its tenant, and the tokens of sessions

TOKEN = re.compile("stg-([0-9a-f]{32})-([0-9a-f]{32})")
Handler = Callable[[Request], Awaitable[Response]]

TENANT, TAG_SEEN = "stenograph.tenant", "stenograph.tag"
"""In a scope, on a server with tenants: the request's tenant, and the tag of the only sessions shown to it."""
DELETES = "stenograph.deletes"
"""In a scope: the request reads sessions and deletes them."""


def tag_seen_by(scope: Scope) -> str:
    """The tag of the only sessions that a request may see; empty: it may see all."""
    tag: str = scope.get(TAG_SEEN, "")
    return tag


def sees(scope: Scope, session_id: str) -> bool:
    """Whether a request may know of a session with this id."""
    tag = tag_seen_by(scope)
    return not tag or session_id[TAG] == tag


class WithoutTenants:
    """An authenticator's part for tenants, on a server without any."""

    checks_open = False
    """Whether requests without a key are checked as well, by `check_open`."""
    admitted: Callable[..., Awaitable[Any]] | None = None
    """Admits a request for turns once its tenant has a place. As `SessionManager.admit`, behind the request's scope."""

    noted: Callable[[str, Handler], Handler] | None = None
    """An endpoint whose answers are noted, by the id of its route."""

    def check_open(self, scope: Scope) -> None:
        """Check a request without need of a key."""

    def own_key(self, scope: Scope, key: str | None) -> str | None:
        """A request's `Idempotency-Key` among those of all tenants."""
        return key


class SessionTokens:
    """The tokens of sessions: `stg-`, the session's id, and an HMAC of it by a secret made of an API key.

    The secret is slow to make (scrypt): trying keys against a token costs as much for each. The first key makes tokens;
    those of the others are good as long as their key is one of the server's.
    """

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._secrets = [_secret_of(key) for key in api_keys]

    def __repr__(self) -> str:
        return f"<SessionTokens of {len(self._secrets)} keys>"

    def made_for(self, session_id: str) -> str | None:
        """The session's token; None on a server without keys."""
        return f"stg-{session_id}-{_mac(self._secrets[0], session_id)}" if self._secrets else None

    def session_of(self, credential: bytes) -> str | None:
        """The session whose token this is; None if it is no token, or of no key of this server."""
        found = TOKEN.fullmatch(credential.decode("latin-1"))
        if found is None:
            return None
        is_good = sum(hmac.compare_digest(found[2], _mac(secret, found[1])) for secret in self._secrets)
        return found[1] if is_good else None


@lru_cache(maxsize=64)
def _secret_of(api_key: str) -> bytes:
    """About 50 ms and 16 MiB. The salt is the same everywhere: so must the secret be."""
    return hashlib.scrypt(api_key.encode(), salt=b"stenograph session token", n=2**14, r=8, p=1, dklen=32)


def _mac(secret: bytes, session_id: str) -> str:
    """128 bits in hex."""
    return hmac.digest(secret, session_id.encode(), "sha256")[:16].hex()
