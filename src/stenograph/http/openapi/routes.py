"""Every operation of /openapi.json, in its order: the rows of the routes, the turns (turns.py), the paths passed on to
the engine. Pure: facts of a server to rows. A test compares them with the routes really bound.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from stenograph.core.errors import BodyTooLarge, InvalidRequest, SessionNotFound, UpstreamUnreachable
from stenograph.http.openapi.schemas import Described
from stenograph.http.openapi.turns import turn_operations, turn_paths
from stenograph.http.proxy_route import MODELS, PROXY_METHODS
from stenograph.http.route import ANY, SESSION_HEADER, STORED, Needs, Route, session_paths
from stenograph.http.route_table import rows

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
