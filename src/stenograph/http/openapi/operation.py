"""One method of one path in /openapi.json, and what such entries are made of. Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stenograph.core.errors import SessionDamaged, SessionElsewhere, StenographError, StorageUnavailable
from stenograph.dialects.common.errors import ErrorBody
from stenograph.http.openapi.schemas import Schema, ref

Errors = tuple[type[StenographError], ...]

STORED: Errors = (SessionDamaged, StorageUnavailable, SessionElsewhere)
"""Faults of a session that is read from the store."""

JSON = "application/json"
ID: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
ANY: dict[str, Schema] = {"*/*": {}}


class Needs(enum.StrEnum):
    """The least credential that an operation takes on a server with keys, as the document names it."""

    NOTHING = "nothing"
    TOKEN = "session-token"
    KEY = "api-key"
    ADMIN = "admin-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `body` and `reply` are the types of a request and of its 200 in JSON.

    `answers` are further ones without an error, by status; `links` the operations that a reply's `session_id` leads
    to. `errors` and `parameters` leave out those that follow from the path and from a body in JSON. `error_body` is the
    shape of its errors.
    """

    method: str
    path: str
    id: str
    summary: str
    reply: type | None = None
    body: type | None = None
    answers: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    links: tuple[str, ...] = ()
    errors: Errors = ()
    parameters: tuple[Schema, ...] = ()
    error_body: type = ErrorBody
    needs: Needs = Needs.KEY

    @property
    def name(self) -> str:
        """As docs/http-api.md names it: `POST /sessions`."""
        return f"{self.method} {self.path}"


def in_json(kind: type) -> dict[str, Schema]:
    """JSON content with the schema of a type."""
    return {JSON: {"schema": {"$ref": ref(kind)}}}


def operation(name: str, id_: str, summary: str, reply: type | None = None, **more: Any) -> Operation:
    method, path = name.split()
    return Operation(method=method, path=path, id=id_, summary=summary, reply=reply, **more)


def one_answer(description: str, content: Schema) -> dict[str, Schema]:
    """The one answer of an operation whose reply is not JSON alone."""
    return {"200": {"description": description, "content": content}}


def parameter(where: str, name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": where, "description": description, "schema": schema}


SESSION_HEADER = parameter(
    "header",
    "X-Session-Id",
    "The session, where the path names none. docs/http-api.md says what happens without it.",
    ID,
)
