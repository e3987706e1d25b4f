"""`GET /openapi.json`: docs/http-api.md for machines (OpenAPI 3.1). Pure: facts of a server to bytes.

Joins operations, their errors and the schemas of bodies (schemas.py) to a document: the rows of the routes, the turns
(turns.py), the paths passed on to the engine. A test compares the operations with the routes really bound.
A test compares it with a live server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import msgspec

from stenograph import __version__
from stenograph.core.errors import (
    BodyTooLarge,
    Forbidden,
    HeadersTooLarge,
    InvalidJson,
    InvalidRequest,
    RequestTimeout,
    SessionNotFound,
    StenographError,
    Unauthorized,
    UnexpectedFailure,
    UnsupportedMediaType,
    UpstreamUnreachable,
    UriTooLong,
)
from stenograph.dialects.common.errors import ErrorBody, error_type
from stenograph.dialects.settings import DialectKind
from stenograph.http.auth import KEY_HEADERS, KEY_QUERY
from stenograph.http.openapi.schemas import Described, components
from stenograph.http.openapi.turns import turn_operations, turn_paths
from stenograph.http.part import Core
from stenograph.http.proxy_route import MODELS, PROXY_METHODS
from stenograph.http.route import (
    ANY,
    ID,
    JSON,
    SESSION_HEADER,
    STORED,
    Needs,
    Route,
    Schema,
    in_json,
    public,
    ref,
    session_paths,
)
from stenograph.http.route_table import rows
from stenograph.trajectory.matching import MATCHERS

_ERROR_HEADERS: dict[str, Schema] = {
    "x-should-retry": {
        "description": "Whether the client should try again.",
        "required": True,
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
    "retry-after": {
        "description": "Seconds to wait before the next try, where waiting helps.",
        "schema": {"type": "integer", "minimum": 1},
    },
}

_ANYWHERE = (Forbidden, RequestTimeout, UriTooLong, HeadersTooLarge, UnexpectedFailure)
"""Errors of every operation."""
_READING_JSON = (InvalidJson, InvalidRequest, BodyTooLarge, UnsupportedMediaType)

_PATH_ID: Schema = {"name": "id", "in": "path", "required": True, "description": "The session.", "schema": ID}

_ABOUT = """Sessions record the tokens that an agent's model sampled, behind the APIs of OpenAI (Chat Completions,
Completions, Responses), Anthropic (Messages) and Gemini.

`HEAD` works wherever `GET` does. The wrong method for a route is 405 `method_not_allowed`, with `allow`. An unknown
route is 404 `route_not_found`, or 403 `forbidden` below `/sessions/{id}/` and `/v1/`. A body whose `content-type` is
not JSON is 415, and a compressed body is 400. Integers are written without a fraction. Bytes that are not an HTTP
request are 400 `invalid_request`.

Where the server has keys, an operation's security names the least credential that it takes: `session-token` is the
`token` of the session that the request names, `api-key` a key of `--api-key`, `admin-key` one of `--admin-key`. Each is
good for what the ones before it are good for."""


def described_by(core: Core) -> Described:
    """The facts of a server for its document."""
    settings, services = core.settings, core.services
    return Described(
        dialects=settings.dialects,
        unknown_fields=settings.unknown_fields,
        matchers=tuple(dict.fromkeys([*MATCHERS, settings.matcher])),
        rewrites=services.rewrite_rules.names,
        vocab_size=services.renderer.tokenizer.vocab_size,
        proxy_allow=settings.proxy_allow,
        forwards=services.engine.forwards,
        has_keys=bool(settings.api_key),
        parts=core.parts,
    )


def document_of(core: Core) -> bytes:
    """The document of a server, as JSON."""
    return openapi_document(described_by(core))


def openapi_document(described: Described) -> bytes:
    """The document, as JSON."""
    listed = list(operations(described))
    # Schemas are those of every dialect, spoken or not: some share parts.
    every = list(operations(replace(described, dialects=tuple(DialectKind))))
    bodies = [kind for operation in every for kind in (operation.body, operation.reply) if kind is not None]
    shapes = {kind for operation in every for kind in (*operation.shapes, operation.error_body)}
    schemas = components(bodies, shapes, described)
    paths: dict[str, dict[str, Schema]] = {}
    for operation in listed:
        entry = _entry(operation, schemas, has_keys=described.has_keys)
        paths.setdefault(operation.shown_path, {})[operation.method.lower()] = entry
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Stenograph",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "headers": _ERROR_HEADERS},
    }
    if described.has_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            **{name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADERS},
            KEY_QUERY: {"type": "apiKey", "in": "query", "name": KEY_QUERY},
        }
    return msgspec.json.encode(document)


def _entry(operation: Route, schemas: dict[str, Schema], *, has_keys: bool) -> Schema:
    """An operation as OpenAPI writes it."""
    entry: Schema = {"operationId": operation.id, "summary": operation.summary}
    errors: set[type[StenographError]] = {*operation.errors, *_ANYWHERE}
    if has_keys and operation.needs is not Needs.NOTHING:
        errors.add(Unauthorized)
        entry["security"] = [{name: [operation.needs]} for name in ("bearer", *KEY_HEADERS, KEY_QUERY)]
    parameters = list(operation.parameters)
    if "{id}" in operation.path:
        errors.add(SessionNotFound)
        parameters.insert(0, _PATH_ID)
    if parameters:
        entry["parameters"] = parameters
    if operation.body is not None:
        errors.update(_READING_JSON)
        is_required = bool(schemas[public(operation.body)]["required"])
        entry["requestBody"] = {"required": is_required, "content": in_json(operation.body)}
    elif set(operation.answers) == {"default"}:  # the engine gets any body as it came
        entry["requestBody"] = {"required": False, "content": ANY}
    answers = dict(operation.answers)
    if operation.reply is not None:
        answers["200"] = _reply(operation, operation.reply, schemas)
    in_order = sorted(errors, key=lambda error: (error.status, error.code))
    for status, kinds in groupby(in_order, key=lambda error: error.status):
        # Readiness is the one answer that shares its status with no error of ours.
        answers[str(status)] = _error_answer(list(kinds), operation)
    entry["responses"] = dict(sorted(answers.items()))
    return entry


def _reply(operation: Route, kind: type, schemas: dict[str, Schema]) -> Schema:
    """The answer with a reply in JSON, described as its schema is."""
    answer: Schema = {"description": schemas[public(kind)]["description"], "content": in_json(kind)}
    if operation.links:
        given = {"path.id": "$response.body#/session_id"}
        answer["links"] = {id_: {"operationId": id_, "parameters": given} for id_ in operation.links}
    return answer


def _error_answer(kinds: Sequence[type[StenographError]], operation: Route) -> Schema:
    """The answer for errors of one status: the one shape, with their codes and types.

    Where an engine's own answers go out as they come, it may have this status too, and any shape. A dialect with a
    shape of its own has it from where the request has come to it; what is refused before has the one shape.
    """
    codes = "\n".join(f"- `{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}" for kind in kinds)
    if "default" in operation.answers:
        return {"description": f"{codes}\n\nOr the engine's own answer.", "content": ANY}
    told = {"code": sorted({kind.code for kind in kinds}), "type": sorted({error_type(kind) for kind in kinds})}
    facts = {name: {"enum": values} for name, values in told.items()}
    narrower: Schema = {"properties": {"error": {"properties": facts}}}
    schema: Schema = {"allOf": [{"$ref": ref(ErrorBody)}, narrower]}
    if operation.error_body is not ErrorBody:
        schema = {"anyOf": [{"$ref": ref(operation.error_body)}, {"$ref": ref(ErrorBody)}]}
    return {
        "description": codes,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in _ERROR_HEADERS},
        "content": {JSON: {"schema": schema}},
    }


_LOCAL = ("GET /v1/models", "POST /tokenize", "POST /detokenize")
"""Routes answered by this server also on a session, if its engine is no server."""


def operations(described: Described) -> Iterator[Route]:
    """Every method of every path of the server, `HEAD` aside."""
    yield from (row for row in rows(described.parts) if row.method != "HEAD")
    yield from turn_operations(described)
    yield from _forwarded(described) if described.forwards else _answered_locally(described)


def _forwarded(described: Described) -> Iterator[Route]:
    """The allow-list's paths, passed on to the engine as they come: on a session, those of `/v1/` also without one."""
    all_rows = rows(described.parts)
    own, on_session, turns = {row.name for row in all_rows}, session_paths(all_rows), turn_paths(described)
    for entry in described.proxy_allow:
        prefixes = ("/sessions/{id}/", "/") if entry.startswith("v1/") else ("/sessions/{id}/",)
        for prefix, method in product(prefixes, PROXY_METHODS):
            path = prefix + entry
            if entry in on_session or f"/{entry}" in turns or method == "HEAD" or f"{method} {path}" in own:
                continue
            yield Route(
                method=method,
                path=path,
                id=_passed_id(method, path),
                summary=f"Forward to the engine's {entry}, unrecorded",
                parameters=(SESSION_HEADER,) if prefix == "/" else (),
                answers={"default": {"description": "The engine's own answer.", "content": ANY}},
                errors=(InvalidRequest, SessionNotFound, BodyTooLarge, UpstreamUnreachable, *STORED),
                needs=Needs.TOKEN if (method, entry) == ("GET", MODELS) else Needs.KEY,
            )


def _answered_locally(described: Described) -> Iterator[Route]:
    """The allow-list's paths on a session answered by this server itself, because its engine is no server."""
    for model in (row for row in rows(described.parts) if row.name in _LOCAL):
        path = "/sessions/{id}" + model.path
        if model.path.removeprefix("/") in described.proxy_allow:
            id_, summary = _passed_id(model.method, path), f"{model.summary}, as {model.path} does"
            yield replace(model, path=path, id=id_, summary=summary)


def _passed_id(method: str, path: str) -> str:
    return "pass_" + method.lower() + path.replace("{id}", "id").replace("/", "_").replace(".", "_")
