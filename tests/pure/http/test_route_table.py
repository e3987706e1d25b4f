"""The table of routes: each row is whole, checks its key, and says how the answers of several processes become one."""

import re
from collections import Counter
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from stenograph.cli.parts import PARTS
from stenograph.core.errors import Forbidden, StenographError, Unauthorized
from stenograph.core.loaded import entry
from stenograph.dialects.base import DialectRow
from stenograph.dialects.settings import DialectKind, UnknownFields
from stenograph.http.auth import Authenticator, session_named
from stenograph.http.binding import CHECKS, bound
from stenograph.http.dialects import DIALECTS
from stenograph.http.openapi.turns import turn_rows
from stenograph.http.response_route import HeldResponses
from stenograph.http.route import All, Asking, Needs, Route, SessionTokens, Who, route, rows_of, session_paths
from stenograph.http.route_table import GROUPS, rows

TABLE = (*rows(PARTS), *(row for row, _ in rows_of(HeldResponses)))
TURNS = tuple(row for kind in DialectKind for row in turn_rows(kind, forwards=False))
SESSION = "0123456789abcdef" * 2


def scope_of(path: str, *credentials: str) -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {one}".encode()) for one in credentials]
    return {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}


@pytest.mark.parametrize("row", [*TABLE, *TURNS], ids=lambda row: row.name)
def test_a_row_is_whole(row: Route) -> None:
    assert row.path.startswith("/")
    assert row.id.isidentifier()
    assert row.summary
    assert row.method == "HEAD" or row.reply is not None or row.answers
    assert row.method in ("GET", "HEAD", "DELETE") or row.body is not None
    assert all(issubclass(error, StenographError) for error in row.errors)
    assert (Forbidden in row.errors) == (row.needs is Needs.ADMIN)


@pytest.mark.parametrize("of", [lambda row: row.name, lambda row: row.id], ids=["name", "id"])
def test_no_two_rows_are_of_one_route(of: Any) -> None:
    assert set(Counter(map(of, [*TABLE, *TURNS])).values()) == {1}


def test_every_group_has_rows() -> None:
    assert all(list(rows_of(entry(group))) for group in (*GROUPS, *(one for part in PARTS for one in part.routes)))


@pytest.mark.parametrize("row", [*TABLE, *TURNS], ids=lambda row: row.name)
def test_a_session_in_the_path_is_found_and_its_process_answers(row: Route) -> None:
    named = session_named(scope_of(row.path.replace("{id}", SESSION)), by_id=False)
    assert (named == SESSION) == ("{id}" in row.path)
    assert named is None or row.who is Who.PROCESS


@pytest.mark.parametrize("kind", DialectKind)
def test_a_dialect_has_the_endpoints_of_its_rows_and_no_others(kind: DialectKind) -> None:
    """Each row's path is one path of its dialects, and each bound path is a row's."""
    row: DialectRow = entry(DIALECTS[kind])
    spoken = row.speak(token_text=str, model="tiny", unknown_fields=UnknownFields.REFUSE)
    bound_paths = [path for one in (*spoken.turns, *spoken.counters) for path in one.paths]
    calls = [call for group in row.calls for call in group]
    assert sorted(call.pattern for call in calls) == sorted(bound_paths)
    for call in calls:
        assert [bool(re.fullmatch(path, call.shown_path)) for path in bound_paths].count(True) == 1
    assert {one.path.removeprefix("/sessions/{id}") for one in turn_rows(kind, forwards=True)} == {
        call.shown_path for call in calls
    }


@pytest.mark.parametrize("row", TURNS, ids=lambda row: row.name)
def test_a_turn_takes_a_session_s_token(row: Route) -> None:
    assert row.needs is Needs.TOKEN


@pytest.mark.parametrize("row", [row for row in TABLE if isinstance(row.who, All)], ids=lambda row: row.name)
def test_what_all_answer_has_a_way_to_become_one(row: Route) -> None:
    assert isinstance(row.who, All)
    assert "{" not in row.path, "who asks all looks for the path as it is"
    assert bool(row.who.merge) == (row.who.ask is not Asking.PAGES)
    assert not row.who.merge or callable(entry(row.who.merge))


def test_the_paths_of_a_session_are_those_of_the_table() -> None:
    assert {path: sorted(methods) for path, methods in session_paths(TABLE).items() if "{" not in path} == {
        "samples": ["POST"],
        "drift": ["GET", "HEAD"],
        "outcome": ["GET", "HEAD", "PUT"],
        "ledger": ["GET", "HEAD"],
        "why": ["GET", "HEAD"],
        "abort": ["POST"],
        "scores": ["GET", "HEAD", "POST"],
        "fork": ["POST"],
    }


class Kept:
    """Four routes, one for each credential, with one path that takes in others above one that is in it."""

    @route("GET /open/{rest:path}", "open", "Open", needs=Needs.NOTHING)
    @route("GET /open/token", "token", "A token's", needs=Needs.TOKEN)
    @route("GET /open/key", "key", "A key's")
    @route("GET /open/admin", "admin", "An administrator's", needs=Needs.ADMIN)
    async def answer(self, request: Request) -> Response:
        return Response(request.path_params.get("rest", "closed"))


def authenticator_of(manager: Any = None) -> Authenticator:
    return Authenticator(api_keys=("trainer",), manager=manager, admin_keys=("admin",))


LEAST = {Needs.NOTHING: 0, Needs.TOKEN: 1, Needs.KEY: 2, Needs.ADMIN: 3}
CREDENTIALS = (None, SessionTokens(("trainer",)).made_for(SESSION), "trainer", "admin")


@pytest.mark.parametrize("needs", CHECKS)
@pytest.mark.parametrize("level", range(4))
def test_a_credential_opens_what_takes_no_more(needs: Needs, level: int) -> None:
    path = f"/sessions/{SESSION}"
    credential = CREDENTIALS[level]
    scope = scope_of(path) if credential is None else scope_of(path, credential)
    if level >= LEAST[needs]:
        CHECKS[needs](authenticator_of(), scope)
    else:
        with pytest.raises(Unauthorized if credential is None else Forbidden):
            CHECKS[needs](authenticator_of(), scope)


def test_a_token_opens_no_other_session() -> None:
    with pytest.raises(Forbidden):
        CHECKS[Needs.TOKEN](authenticator_of(), scope_of(f"/sessions/{'f' * 32}", str(CREDENTIALS[1])))


def test_bound_routes_check_their_keys_and_a_path_that_takes_in_others_is_last() -> None:
    routes = bound([Kept()], authenticator_of())
    assert [one.path for one in routes] == ["/open/token", "/open/key", "/open/admin", "/open/{rest:path}"]
    refused = (Unauthorized, Forbidden)
    app = Starlette(
        routes=routes, exception_handlers=dict.fromkeys(refused, lambda _, error: Response(status_code=error.status))
    )  # type: ignore[attr-defined]
    client = TestClient(app)
    for needs, path in ((Needs.NOTHING, "x"), (Needs.KEY, "key"), (Needs.ADMIN, "admin")):
        for level in (0, 2, 3):
            headers = {} if CREDENTIALS[level] is None else {"authorization": f"Bearer {CREDENTIALS[level]}"}
            is_open = client.get(f"/open/{path}", headers=headers).status_code == 200
            assert is_open == (level >= LEAST[needs])
