"""The reading of a request's query: its names, and its values. Pure."""

from starlette.requests import Request

from stenograph.core.errors import InvalidRequest
from stenograph.http.auth import KEY_QUERY

MAX_NUMBER = 10**9
"""Stands for every larger number of a query: no session has as many of anything."""


def check_query(request: Request, *known: str) -> None:
    """Raise InvalidRequest for a query parameter without a meaning here. A key may stand in every query."""
    for name in request.query_params:
        if name not in (*known, KEY_QUERY):
            raise InvalidRequest(f"Unknown query parameter {name[:40]!r}; known are {', '.join(known) or 'none'}.")


def number_of(request: Request, name: str, default: int, *, least: int) -> int:
    """A number of the query. Raises InvalidRequest."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal()) or (len(given) < len(str(MAX_NUMBER)) and int(given) < least):
        raise InvalidRequest(f"{name} must be a number of at least {least}, got {given[:20]!r}.", param=f"/{name}")
    return int(given) if len(given) < len(str(MAX_NUMBER)) else MAX_NUMBER


def is_forced(request: Request) -> bool:
    """Whether the query has `force=true`. Raises InvalidRequest."""
    forced = request.query_params.get("force", "false")
    if forced not in ("true", "false"):
        raise InvalidRequest(f"force must be true or false, got {forced[:20]!r}.", param="/force")
    return forced == "true"
