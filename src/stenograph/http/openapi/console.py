"""The console's page and its data in /openapi.json. Pure."""

from stenograph.console.groups import GroupView
from stenograph.console.now import ConsoleNow
from stenograph.console.steps import StepsView
from stenograph.console.tokens import MAX_PAGE_TOKENS
from stenograph.console.views import MAX_TURNS, ConsoleSession, DriftCounts, TurnPage
from stenograph.core.errors import InvalidRequest, RouteNotFound
from stenograph.http.console_routes import BYTES_TYPE, EVENTS_TYPE, MOST_COMPARED_TOKENS
from stenograph.http.openapi.operation import STORED, Needs, in_json, one_answer, operation, parameter
from stenograph.http.openapi.schemas import Schema

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_HASH: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_START: Schema = {"type": "integer", "minimum": 0, "default": 0}
_LEAF = parameter(
    "query", "leaf", "The turn with which the line ends; by default that of the session's own line.",
    {"type": "integer", "minimum": 0},
)  # fmt: skip

CONSOLE = (
    operation(
        "GET /console",
        "getConsole",
        "Get the console, a page for a browser",
        answers=one_answer("The page.", {"text/html": {"schema": _TEXT}}),
        needs=Needs.NOTHING,
    ),
    operation(
        "GET /console/{file}",
        "getConsoleFile",
        "Get a file of the console's page",
        parameters=({**parameter("path", "file", "The file's path.", _TEXT), "required": True},),
        answers=one_answer("The file.", {"*/*": {}}),
        errors=(RouteNotFound,),
        needs=Needs.NOTHING,
    ),
    operation(
        "GET /console/api/now",
        "getNow",
        "Get what runs now, and figures of the last minute",
        answers=one_answer(
            "The moment; where the client accepts `text/event-stream`, one each second.",
            {**in_json(ConsoleNow), EVENTS_TYPE: {"schema": _TEXT}},
        ),
        errors=(InvalidRequest,),
    ),
    operation(
        "GET /console/api/sessions/{id}",
        "getSessionShape",
        "Get a session's shape: strands, lines and turns in columns",
        ConsoleSession,
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /console/api/sessions/{id}/turns",
        "getTurns",
        "Get turns of a line with their texts",
        TurnPage,
        parameters=(
            _LEAF,
            parameter("query", "start", "The first turn, counted from 0.", _START),
            parameter(
                "query", "limit", "The most turns.",
                {"type": "integer", "minimum": 1, "maximum": MAX_TURNS, "default": 50},
            ),
            parameter("query", "whole", "`true` leaves no text out.", {"type": "string", "enum": ["true", "false"]}),
        ),
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /console/api/sessions/{id}/tokens",
        "getTokens",
        "Get tokens of a line, nine bytes each",
        parameters=(
            _LEAF,
            parameter("query", "start", "The first token, counted from 0.", _START),
            parameter(
                "query", "limit", "The most tokens.",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_TOKENS, "default": MAX_PAGE_TOKENS},
            ),
        ),
        answers=one_answer("Ids, then log-probabilities, then flags (docs/console.md).", {BYTES_TYPE: {}}),
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /console/api/sessions/{id}/drift",
        "getDriftCounts",
        "Get a session's drift, counted, if it is known or quickly found",
        DriftCounts,
        parameters=(
            parameter(
                "query", "most_tokens", "The most tokens of lines that are compared for it.",
                {"type": "integer", "minimum": 0, "default": MOST_COMPARED_TOKENS},
            ),
        ),
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /console/api/vocabulary/{hash}",
        "getVocabulary",
        "Get the bytes of every token; by its hash it never changes",
        parameters=(
            {**parameter("path", "hash", "The hash in a session's shape.", _HASH), "required": True},
        ),
        answers=one_answer("The vocabulary (docs/console.md).", {BYTES_TYPE: {}}),
        errors=(RouteNotFound,),
    ),
    operation(
        "GET /console/api/group",
        "getGroup",
        "Get a group's rollouts, and where their tokens part",
        GroupView,
        parameters=({**parameter("query", "name", "The group.", _TEXT), "required": True},),
        errors=(InvalidRequest, *STORED),
    ),
    operation(
        "GET /console/api/groups",
        "getGroups",
        "Get all groups and steps in figures: rewards, lengths, staleness, pass@k",
        StepsView,
        parameters=(parameter("query", "passes_at", "The least reward of a rollout that passes; 1.", _NUMBER),),
        errors=(InvalidRequest, *STORED),
    ),
)  # fmt: skip
