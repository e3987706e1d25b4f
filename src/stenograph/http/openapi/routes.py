"""Every route and method of /openapi.json but for the turns (turns.py), with its errors. Pure: facts of a server to
`Operation`s. A test compares them with the routes that are really bound.

Owns the documentation of a route. schemas.py owns the shape of a body, and document.py writes the document.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from stenograph.core.errors import (
    BodyTooLarge,
    Draining,
    IdempotencyMismatch,
    InvalidRequest,
    LimitExceeded,
    SamplesInconsistent,
    SessionNotFound,
    StorageUnavailable,
    TokenizationFailed,
    UpstreamUnreachable,
)
from stenograph.dialects.sessions import (
    SESSION_STATES,
    AbortRequest,
    BulkSamplesRequest,
    CreateSession,
    Detokenize,
    Nothing,
    PutOutcome,
    SamplesRequest,
    Tokenize,
)
from stenograph.export.arrow import MEDIA_TYPE as ARROW
from stenograph.export.ledger_rows import LedgerPage
from stenograph.export.records import SessionView
from stenograph.export.session_samples import JsonSamples
from stenograph.export.why import SessionFindings
from stenograph.http.bulk_routes import FRAMES_TYPE, Deleted
from stenograph.http.control_routes import Health, ModelList, Readiness, Text, Tokens
from stenograph.http.front_page import FrontPage
from stenograph.http.line_drifts import DriftReports
from stenograph.http.openapi.admin import ADMIN
from stenograph.http.openapi.console import CONSOLE
from stenograph.http.openapi.operation import (
    ANY,
    ID,
    JSON,
    SESSION_HEADER,
    STORED,
    Needs,
    Operation,
    in_json,
    one_answer,
    operation,
    parameter,
)
from stenograph.http.openapi.schemas import Described, Schema
from stenograph.http.openapi.turns import turn_operations, turn_paths
from stenograph.http.proxy_route import MODELS, OWN_PATHS, PROXY_METHODS
from stenograph.http.session_routes import (
    MAX_PAGE,
    Aborted,
    OpenedSession,
    OutcomeView,
    SessionPage,
)
from stenograph.http.waste_route import Waste


def operations(described: Described) -> Iterator[Operation]:
    """Every method of every path that the server has, `HEAD` aside."""
    yield from _PROBES
    yield from _TOKENS
    yield from _SESSIONS
    yield from ADMIN
    yield from CONSOLE
    yield from (replace(turn, needs=Needs.TOKEN) for turn in turn_operations(described))
    yield from _forwarded(described) if described.forwards else _answered_locally(described)


_TEXT: Schema = {"type": "string"}

open_to_all = partial(operation, needs=Needs.NOTHING)

_PROBES = (
    open_to_all(
        "GET /",
        "getFrontPage",
        "Get links to the server's pages",
        answers=one_answer(
            "A page for a browser, which accepts `text/html`; JSON for other clients.",
            {**in_json(FrontPage), "text/html": {"schema": _TEXT}},
        ),
    ),
    open_to_all("GET /health", "getHealth", "Check whether the server is alive", Health),
    open_to_all(
        "GET /ready",
        "getReadiness",
        "Check whether an engine is usable",
        Readiness,
        answers={"503": {"description": "No engine is usable.", "content": in_json(Readiness)}},
    ),
    open_to_all(
        "GET /metrics",
        "getMetrics",
        "Get the metrics",
        answers=one_answer("The metrics in Prometheus' text format.", {"text/plain": {"schema": _TEXT}}),
    ),
    open_to_all(
        "GET /openapi.json",
        "getOpenApi",
        "Get this document",
        answers=one_answer("The document, in OpenAPI 3.1.", {JSON: {"schema": {"type": "object"}}}),
    ),
)

_TOKENS = (
    operation(
        "GET /v1/models",
        "listModels",
        "List the one model",
        ModelList,
        errors=(SessionNotFound, *STORED),
        needs=Needs.TOKEN,
    ),
    operation("POST /tokenize", "tokenize", "Tokenize a text", Tokens, body=Tokenize, errors=(TokenizationFailed,)),
    operation(
        "POST /detokenize", "detokenize", "Detokenize tokens", Text, body=Detokenize, errors=(TokenizationFailed,)
    ),
)

_ON_OPENED = (
    "getSession", "chatOnSession", "completeOnSession", "getSamples", "getDrift", "getLedger", "abortSession",
    "putOutcome", "getOutcome", "deleteSession",
)  # fmt: skip
_LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 100}
_STATE: Schema = {"type": "string", "enum": list(SESSION_STATES)}
_FILTER = (
    parameter(
        "query",
        "group",
        "Only sessions of this group. `metadata.KEY=VALUE`, for each of some keys, is a filter too: only sessions whose"
        " metadata has these values, of which those that are no text are written as JSON.",
        _TEXT,
    ),
    parameter("query", "state", "Only sessions in this state.", _STATE),
)
_PAGE = (
    parameter("query", "limit", "The most sessions that a page has.", _LIMIT),
    parameter("query", "after", "The page begins after this session.", ID),
)
_FULL_OR_DELTA: Schema = {"type": "string", "enum": ["full", "delta"], "default": "full"}
_RECORDS = parameter("query", "records", "`delta` leaves out what earlier records contain.", _FULL_OR_DELTA)
_STRAND = parameter(
    "query", "strand", "The strand whose line is shown, the main one's by default.", {"type": "integer", "minimum": 0}
)
_LEDGER_PAGE = (
    parameter("query", "limit", "The most requests that a page has.", {**_LIMIT, "default": MAX_PAGE}),
    parameter("query", "after", "The page begins after this number.", {"type": "integer", "minimum": 0}),
)

_SESSIONS = (
    operation(
        "POST /sessions",
        "openSession",
        "Open a session",
        OpenedSession,
        parameters=(
            parameter(
                "header",
                "Idempotency-Key",
                "A retry sends the key and the body of its first request, and gets the same session.",
                {"type": "string"},
            ),
        ),
        body=CreateSession,
        links=_ON_OPENED,
        errors=(LimitExceeded, Draining, IdempotencyMismatch, *STORED),
    ),
    operation(
        "GET /sessions",
        "listSessions",
        "List sessions, oldest first",
        SessionPage,
        parameters=(*_PAGE, *_FILTER),
        errors=(InvalidRequest, SessionNotFound, *STORED),
    ),
    operation(
        "DELETE /sessions",
        "deleteSessions",
        "Delete the sessions that a filter selects",
        Deleted,
        parameters=_FILTER,
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "POST /samples",
        "getManySamples",
        "Get the training samples of many sessions",
        body=BulkSamplesRequest,
        answers=one_answer(
            "A safetensors payload for each session, behind a head and sizes (docs/samples.md), or one Arrow stream.",
            {FRAMES_TYPE: {}, ARROW: {}},
        ),
    ),
    operation(
        "GET /waste",
        "getWaste",
        "Get what became of sampled tokens, by group",
        Waste,
        parameters=(parameter("query", "group", "Only this group.", _TEXT),),
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /sessions/{id}",
        "getSession",
        "Get a session's records and metadata",
        SessionView,
        parameters=(_RECORDS, _STRAND),
        errors=(InvalidRequest, TokenizationFailed, *STORED),
    ),
    operation(
        "DELETE /sessions/{id}",
        "deleteSession",
        "Delete a session",
        answers={"204": {"description": "The session is deleted."}},
        errors=(StorageUnavailable,),
    ),
    operation(
        "POST /sessions/{id}/samples",
        "getSamples",
        "Get a session's training samples",
        body=SamplesRequest,
        answers=one_answer(
            "The samples in the requested `format`: safetensors, Arrow, or JSON.",
            {"application/octet-stream": {}, ARROW: {}, **in_json(JsonSamples)},
        ),
        errors=(SamplesInconsistent, TokenizationFailed, *STORED),
    ),
    operation(
        "GET /sessions/{id}/drift",
        "getDrift",
        "Get the drift of each line",
        DriftReports,
        errors=(TokenizationFailed, *STORED),
    ),
    operation(
        "GET /sessions/{id}/ledger",
        "getLedger",
        "Get the ledger: the requests for turns that named the session",
        LedgerPage,
        parameters=_LEDGER_PAGE,
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /sessions/{id}/why",
        "getFindings",
        "Get what there is to say about a session's samples, the worst first",
        SessionFindings,
        errors=(TokenizationFailed, *STORED),
    ),
    operation(
        "PUT /sessions/{id}/outcome",
        "putOutcome",
        "Set the rollout's outcome, or replace it",
        OutcomeView,
        body=PutOutcome,
        errors=(LimitExceeded, *STORED),
    ),
    operation("GET /sessions/{id}/outcome", "getOutcome", "Get the rollout's outcome", OutcomeView, errors=STORED),
    operation(
        "POST /sessions/{id}/abort",
        "abortSession",
        "End the session's running turns",
        Aborted,
        body=Nothing,
        errors=STORED,
    ),
    operation(
        "POST /abort_request", "abortAll", "End every running turn, or those of a group", Aborted, body=AbortRequest
    ),
)


def _forwarded(described: Described) -> Iterator[Operation]:
    """The allow-list's paths, which go to the engine as they come: on a session, those of `/v1/` also without one."""
    own, turns = {one.name for one in (*_TOKENS, *_SESSIONS)}, turn_paths(described)
    for entry in described.proxy_allow:
        prefixes = ("/sessions/{id}/", "/") if entry.startswith("v1/") else ("/sessions/{id}/",)
        for prefix, method in product(prefixes, PROXY_METHODS):
            path = prefix + entry
            if entry in OWN_PATHS or f"/{entry}" in turns or method == "HEAD" or f"{method} {path}" in own:
                continue
            yield Operation(
                method=method,
                path=path,
                id=_passed_id(method, path),
                summary=f"Forward to the engine's {entry}, unrecorded",
                parameters=(SESSION_HEADER,) if prefix == "/" else (),
                answers={"default": {"description": "The engine's own answer.", "content": ANY}},
                errors=(InvalidRequest, SessionNotFound, BodyTooLarge, UpstreamUnreachable, *STORED),
                needs=Needs.TOKEN if (method, entry) == ("GET", MODELS) else Needs.KEY,
            )


def _answered_locally(described: Described) -> Iterator[Operation]:
    """The allow-list's paths on a session that this server answers itself, because its engine is no server."""
    for model in _TOKENS:
        path = "/sessions/{id}" + model.path
        if model.path.removeprefix("/") in described.proxy_allow:
            id_, summary = _passed_id(model.method, path), f"{model.summary}, as {model.path} does"
            yield replace(model, path=path, id=id_, summary=summary)


def _passed_id(method: str, path: str) -> str:
    return "pass_" + method.lower() + path.replace("{id}", "id").replace("/", "_").replace(".", "_")
