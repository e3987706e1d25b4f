"""`GET /openapi.json`: what docs/http-api.md says, for machines (OpenAPI 3.1). Pure: facts of a server to bytes.

Owns how operations (openapi_routes.py), their errors and the schemas of bodies (openapi_schemas.py) become a document.
A test holds it against a live server.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from stenograph import __version__
from stenograph.core.errors import StenographError, Unauthorized, UnexpectedFailure
from stenograph.http.openapi_routes import ANY, JSON, Described, Operation, operations
from stenograph.http.openapi_schemas import REF, Schema, components

_ERROR_HEADERS: dict[str, Schema] = {
    "x-should-retry": {
        "description": "Whether to try again.",
        "required": True,
        "schema": {"type": "string", "enum": ["true", "false"]},
    },
    "retry-after": {
        "description": "Where waiting helps: seconds.",
        "schema": {"type": "integer", "minimum": 1},
    },
}

_ABOUT = """Sessions that record what an agent's model sampled, token by token, behind an OpenAI-compatible API.

Each `GET` is answered to `HEAD` too. A route that exists for another method is 405 `method_not_allowed` with `allow`;
what is no route is 404 `route_not_found`, and below `/sessions/{id}/` and `/v1/` 403 `forbidden`. Bodies are read as
JSON whatever their `content-type` says, and must not be compressed; integers are written without a fraction. Bytes
that are no HTTP request are answered with a 400 in plain text."""


def openapi_document(described: Described) -> bytes:
    """The document, as JSON."""
    paths: dict[str, dict[str, Schema]] = {}
    for operation in operations(described):
        paths.setdefault(operation.path, {})[operation.method.lower()] = _entry(operation, described)
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
        "components": {
            "schemas": components(
                unknown_fields=described.unknown_fields,
                matchers=described.matchers,
                vocab_size=described.vocab_size,
            ),
            "headers": _ERROR_HEADERS,
        },
    }
    if described.has_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return msgspec.json.encode(document)


def _entry(operation: Operation, described: Described) -> Schema:
    """An operation as OpenAPI writes it."""
    keyed = operation.asks_key and described.has_keys
    errors = (*operation.errors, *((Unauthorized,) if keyed else ()), UnexpectedFailure)
    entry: Schema = {"operationId": operation.id, "summary": operation.summary}
    if keyed:
        entry["security"] = [{"bearer": []}, {"x-api-key": []}]
    if operation.parameters:
        entry["parameters"] = list(operation.parameters)
    if operation.body is not None:
        entry["requestBody"] = operation.body
    answers = dict(operation.answers)
    for status, kinds in groupby(sorted(errors, key=_status), key=_status):
        # Readiness is the one answer that shares its status with no error of ours.
        answers[str(status)] = _error_answer(list(kinds), or_engines="default" in operation.answers)
    entry["responses"] = dict(sorted(answers.items()))
    return entry


def _status(error: type[StenographError]) -> int:
    return error.status


def _error_answer(kinds: Sequence[type[StenographError]], *, or_engines: bool) -> Schema:
    """The answer for errors of one status: the one shape, with their codes and types.

    Where an engine's own answers go out as they come, it may have this status too, and any shape.
    """
    codes = "\n".join(f"- `{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}" for kind in kinds)
    if or_engines:
        return {"description": f"{codes}\n\nOr the engine's own answer.", "content": ANY}
    told = {"code": sorted({kind.code for kind in kinds}), "type": sorted({kind.type for kind in kinds})}
    facts = {name: {"enum": values} for name, values in told.items()}
    narrower: Schema = {"properties": {"error": {"properties": facts}}}
    return {
        "description": codes,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in _ERROR_HEADERS},
        "content": {JSON: {"schema": {"allOf": [{"$ref": f"{REF}ErrorBody"}, narrower]}}},
    }
