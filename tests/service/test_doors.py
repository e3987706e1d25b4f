"""Who may do what: each route with each credential, by a table that has every route; and one reader of credentials."""

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from standins.scripted_engine import ScriptedEngine
from stenograph.cli.parts import PARTS
from stenograph.core.clock import SystemClock
from stenograph.http.app import make_app
from stenograph.http.route import SessionTokens
from stenograph.http.settings import Settings
from stenograph.offload.pool import CpuPool
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, user
from .test_openapi import operations_in, routes_of
from .workers_kit import Workers, two_workers

pytestmark = pytest.mark.timeout(600)

Serve = Callable[..., AbstractAsyncContextManager[Live]]

NOTHING, TOKEN, KEY, ADMIN = "nothing", "session-token", "api-key", "admin-key"
TURNS = ("v1/chat/completions", "v1/completions", "v1/messages", "v1/messages/count_tokens", "v1/responses")
PROXIED = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
GEMINI = ("generateContent", "streamGenerateContent", "countTokens")

LEAST: dict[str, str] = {
    **dict.fromkeys(("GET /", "GET /health", "GET /ready", "GET /metrics", "GET /openapi.json"), NOTHING),
    **dict.fromkeys(("GET /console", "GET /console/{file}"), NOTHING),
    **{f"POST {at}{turn}": TOKEN for at in ("/", "/sessions/{id}/") for turn in TURNS},
    **{f"POST {at}v1beta/models/{{model}}:{do}": TOKEN for at in ("/", "/sessions/{id}/") for do in GEMINI},
    **{f"GET {at}v1/responses/{{response}}": TOKEN for at in ("/", "/sessions/{id}/")},
    **{f"GET {at}v1/models": TOKEN for at in ("/", "/sessions/{id}/")},
    "HEAD /sessions/{id}": TOKEN,
    "HEAD /sessions/{id}/api/hello": TOKEN,
    "POST /tokenize": KEY,
    "POST /detokenize": KEY,
    "POST /sessions/{id}/tokenize": KEY,
    "POST /sessions/{id}/detokenize": KEY,
    "GET /model_info": KEY,
    "POST /sessions": KEY,
    "GET /sessions": KEY,
    "DELETE /sessions": KEY,
    "POST /samples": KEY,
    "GET /accounts": KEY,
    "GET /accounts/why": KEY,
    "POST /samples/claim": KEY,
    "POST /samples/receipt": KEY,
    "POST /abandon": KEY,
    "POST /abort_request": KEY,
    "GET /sessions/{id}": KEY,
    "DELETE /sessions/{id}": KEY,
    "POST /sessions/{id}/samples": KEY,
    "GET /sessions/{id}/drift": KEY,
    "GET /sessions/{id}/ledger": KEY,
    "GET /sessions/{id}/media/{sha256}": TOKEN,
    "GET /sessions/{id}/scores": KEY,
    "POST /sessions/{id}/scores": KEY,
    "POST /scores": KEY,
    "GET /sessions/{id}/why": KEY,
    "PUT /sessions/{id}/outcome": KEY,
    "GET /sessions/{id}/outcome": KEY,
    "POST /sessions/{id}/abort": KEY,
    "POST /sessions/{id}/fork": KEY,
    "GET /console/api/now": KEY,
    "GET /console/api/group": KEY,
    "GET /console/api/groups": KEY,
    "GET /console/api/vocabulary/{hash}": KEY,
    "GET /console/api/sessions/{id}": KEY,
    "GET /console/api/sessions/{id}/turns": KEY,
    "GET /console/api/sessions/{id}/drift": KEY,
    "GET /console/api/sessions/{id}/tokens": KEY,
    "POST /backup": ADMIN,
    "POST /update_weights_from_disk": ADMIN,
    "POST /pause_generation": ADMIN,
    "POST /continue_generation": ADMIN,
    "POST /flush_cache": ADMIN,
    "POST /update_weight_version": ADMIN,
    "POST /load_lora_adapter": ADMIN,
    "POST /unload_lora_adapter": ADMIN,
    "GET /engines": ADMIN,
    "POST /engines": ADMIN,
    "DELETE /engines/{name}": ADMIN,
    **{f"{method} {path}": KEY for path in ("/sessions/{id}/{path}", "/v1/{path}") for method in PROXIED},
}  # fmt: skip
"""The least credential that each route takes; a route that is not here fails the test below."""

KEYS: dict[str, Any] = {"api_key": ("trainer", "before"), "admin_key": ("admin",)}
CARRIERS: dict[str, Callable[[str], tuple[dict[str, str], str]]] = {
    "bearer": lambda key: ({"authorization": f"Bearer {key}"}, ""),
    "x-api-key": lambda key: ({"x_api_key": key}, ""),
    "x-goog-api-key": lambda key: ({"x_goog_api_key": key}, ""),
    "query": lambda key: ({}, f"?key={key}"),
    "encoded query": lambda key: ({}, f"?key=%{ord(key[0]):x}{key[1:]}"),
}


def bound(renderer: Renderer) -> set[str]:
    """Every method and path of a server, from its routing tables; `HEAD` where there is no `GET` beside it."""
    pool, engine = CpuPool(1), ScriptedEngine(vocab_size=320)
    app, _ = make_app(
        Settings(), engine=engine, renderer=renderer, pool=pool, model="tiny", clock=SystemClock(), parts=PARTS
    )
    found: set[str] = set()
    for route in routes_of(app):
        methods = set(route.methods or ())
        is_all = route.path.endswith("{path:path}")
        methods -= {"HEAD"} if "GET" in methods and not is_all else set()
        found |= {f"{method} {route.path.replace(':path}', '}')}" for method in methods}
    pool.close()
    document = json.loads(openapi_of(app))
    return found | set(operations_in(document))


def openapi_of(app: Any) -> bytes:
    (served,) = (route.endpoint for route in app._control.app.routes if route.path == "/openapi.json")
    return bytes(served.__self__.openapi())


async def asked(live: Live, name: str, session: str, credential: str | None, carrier: str = "bearer") -> Answer:
    """Ask a route about a session with a credential, with the least body that there is."""
    method, path = name.split()
    for part, value in (("{id}", session), ("{path}", "v1/embeddings"), ("{model}", "m"), ("{name}", "e")):
        path = path.replace(part, value.removeprefix("v1/") if path.startswith("/v1/{path}") else value)
    path = (
        path.replace("{file}", "x")
        .replace("{hash}", "0" * 64)
        .replace("{sha256}", "0" * 64)
        .replace("{response}", "resp_0")
    )
    headers, query = ({}, "") if credential is None else CARRIERS[carrier](credential)
    body = {} if method in ("POST", "PUT") else None
    if name == "POST /pause_generation":  # of an administrator it would hold up all that comes after it
        body = {"mode": "none"}
    return await live.call(method, path + query, body, **headers)


def test_every_route_is_in_the_table(renderer: Renderer) -> None:
    assert bound(renderer) == set(LEAST)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_each_route_opens_to_the_credentials_that_the_table_says(serve: Serve, carrier: str) -> None:
    async with serve(**KEYS) as live:
        others = await opened(live)
        for name, least in LEAST.items():
            session = await opened(live)
            given = {
                "none": None, "junk": "junk", "own": session["token"], "other": others["token"],
                "forged": forged(session), "trainer": "trainer", "before": "before", "admin": "admin",
            }  # fmt: skip
            for who, credential in given.items():
                answer = await asked(live, name, session["session_id"], credential, carrier)
                expected = status_for(least, who, named="{id}" in name)
                shown = f"{name} with {who}: {answer.status} {answer.body[:200]!r}"
                if expected is None:
                    assert is_past(answer), shown
                else:
                    assert answer.status == expected, shown


def status_for(least: str, who: str, *, named: bool) -> int | None:
    """The refusal that a credential gets where `least` is asked for; None: it is let in. Without a session in the path
    another session's token names its own."""
    if least == NOTHING or who == "admin":
        return None
    if who in ("none", "junk", "forged"):
        return 401
    if who in ("trainer", "before"):
        return 403 if least == ADMIN else None
    return None if least == TOKEN and (who == "own" or not named) else 403


def is_past(answer: Answer) -> bool:
    """Whether a request was let in, whatever became of it: the proxy's refusal of a path is none of a key."""
    return answer.status != 401 and not (
        answer.status == 403 and any(word in answer.body for word in (b"token", b"key"))
    )


async def opened(live: Live, **headers: str) -> dict[str, str]:
    answer = await live.call("POST", "/sessions", {}, authorization="Bearer trainer", **headers)
    assert answer.status == 200, answer.body
    return dict(answer.json())


def forged(session: dict[str, str]) -> str:
    """A token of the session with one digit changed."""
    last = session["token"][-1]
    return session["token"][:-1] + ("1" if last == "0" else "0")


async def test_of_a_server_without_an_administrators_key_nobody_changes_policy_engines_or_disk(serve: Serve) -> None:
    async with serve(api_key=("trainer",)) as live:
        session = await opened(live)
        for name, least in LEAST.items():
            if least == ADMIN:
                for credential in ("trainer", session["token"]):
                    answer = await asked(live, name, session["session_id"], credential)
                    assert answer.status == 403, name


async def test_a_server_without_keys_hands_out_no_token_and_asks_for_none(serve: Serve, live: Live) -> None:
    answer = await live.call("POST", "/sessions", {})
    assert answer.json().keys() == {"session_id", "base_url", "root_url"}
    for name in LEAST:
        assert is_past(await asked(live, name, await live.open(), None)), name


async def test_the_document_says_of_each_operation_what_it_takes(serve: Serve) -> None:
    async with serve(**KEYS) as live:
        document = (await live.call("GET", "/openapi.json")).json()
        for name, operation in operations_in(document).items():
            roles = {tuple(roles) for one in operation.get("security", []) for roles in one.values()}
            assert roles == (set() if LEAST[name] == NOTHING else {(LEAST[name],)}), name


async def test_a_password_is_no_key(serve: Serve) -> None:
    """`Basic` is a proxy's: beside it a key still counts."""
    async with serve(**KEYS) as live:
        for text in (b"user:trainer", b"trainer:", b":trainer", b"trainer"):
            basic = f"Basic {b64encode(text).decode()}"
            assert (await live.call("GET", "/sessions", authorization=basic)).status == 401
            assert (await live.call("GET", "/sessions", authorization=basic, x_api_key="trainer")).status == 200
        assert (await live.call("GET", "/sessions", authorization="Basic trainer")).status == 401


# --- a session's token


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user("hi")]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 20},
    "/v1/messages": {"messages": [user("hi")], "model": "m", "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": [user("hi")], "model": "m"},
    "/v1/responses": {"input": "hi"},
    "/v1beta/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "/v1beta/models/m:streamGenerateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "/v1beta/models/m:countTokens": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


async def num_requests(live: Live, session: str) -> int:
    answer = await live.call("GET", f"/sessions/{session}/ledger", x_api_key="trainer")
    return int(answer.json()["num_requests"])


async def check_dialects(live: Live, session: dict[str, str]) -> None:
    """Each dialect takes a session's token, with and without its path, wherever the token stands."""
    session_id, token, num = session["session_id"], session["token"], await num_requests(live, session["session_id"])
    for route, body in ASKED.items():
        for at in ("", f"/sessions/{session_id}"):
            for carrier in CARRIERS.values():
                headers, query = carrier(token)
                if "ount" not in route:
                    live.says("yes")
                answer = await live.call("POST", at + route + query, body, **headers)
                assert answer.status == 200, (route, answer.body)
                num += 1
                assert await num_requests(live, session_id) == num
    models = await live.call("GET", "/v1/models", authorization=f"Bearer {token}")
    assert (await live.call("GET", f"/sessions/{session_id}/v1/models", x_api_key=token)).json() == models.json()


async def test_a_token_is_good_for_the_turns_of_its_session_in_every_dialect(serve: Serve) -> None:
    async with serve(**KEYS) as live:
        await check_dialects(live, await opened(live))


async def test_a_token_is_good_at_every_worker(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer, **KEYS) as workers:
        mine, other = await opened(workers.lives[1]), await opened(workers.lives[0])
        assert {int(one["session_id"][:2], 16) for one in (mine, other)} == {0, 1}
        for live in workers.lives:
            await check_dialects(live, mine)
            for path in (
                f"/sessions/{other['session_id']}/v1/messages/count_tokens",
                f"/sessions/{mine['session_id']}",
            ):
                answer = await live.call("POST", path, {}, authorization=f"Bearer {mine['token']}")
                assert answer.status in (403, 405), answer.body
            for name in ("GET /sessions", "DELETE /sessions", "GET /accounts", "POST /abort_request", "POST /samples"):
                assert (await asked(live, name, "", mine["token"])).status == 403, name
                assert (await asked(live, name, "", forged(mine))).status == 401, name
            for name in ("GET /engines", "POST /backup", "POST /pause_generation"):
                assert (await asked(live, name, "", "trainer")).status == 403, name


async def test_the_token_of_a_deleted_session_is_404(serve: Serve) -> None:
    async with serve(**KEYS) as live:
        session = await opened(live)
        at, token = f"/sessions/{session['session_id']}", session["token"]
        assert (await live.call("DELETE", at, authorization="Bearer trainer")).status == 204
        for path in ("/v1/chat/completions", f"{at}/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
            answer = await live.call("POST", path, {"messages": []}, authorization=f"Bearer {token}")
            assert answer.status == 404, answer.body
        for path in ("/v1/models", f"{at}/v1/models", "/v1/responses/resp_1"):
            assert (await live.call("GET", path, authorization=f"Bearer {token}")).status == 404
        assert (await live.call("DELETE", at, authorization=f"Bearer {token}")).status == 403


async def test_a_token_and_another_name_is_refused_and_with_a_key_the_address_decides(serve: Serve) -> None:
    async with serve(**KEYS) as live:
        mine, other = await opened(live), await opened(live)
        body = ASKED["/v1/messages/count_tokens"]
        count = partial(live.call, "POST", "/v1/messages/count_tokens", body)
        bearer = f"Bearer {mine['token']}"
        assert (await count(authorization=bearer, x_session_id=other["session_id"])).status == 403
        assert (await count(authorization=bearer, x_session_id=mine["session_id"])).status == 200
        assert (await count(authorization=bearer, x_api_key="trainer")).status == 200
        assert await num_requests(live, mine["session_id"]) == 2
        assert (await count(authorization=bearer, x_api_key="trainer", x_session_id=other["session_id"])).status == 200
        assert await num_requests(live, other["session_id"]) == 1
        assert (await count(authorization=f"Bearer {mine['session_id']}")).status == 401


async def test_a_repeated_opening_has_the_same_token(serve: Serve) -> None:
    async with serve(**KEYS) as live:
        first, again = [await opened(live, idempotency_key="once") for _ in range(2)]
        assert first == again


def test_a_token_holds_for_every_process_with_its_key_and_for_no_other() -> None:
    session = "5" * 32
    token = SessionTokens(["one"]).made_for(session)
    assert token is not None
    assert token.startswith(f"stg-{session}-")
    assert SessionTokens(["new", "one"]).session_of(token.encode()) == session, "a key that is replaced later"
    assert SessionTokens(["one"]).made_for(session) == token
    for tokens in (SessionTokens(["other"]), SessionTokens([])):
        assert tokens.session_of(token.encode()) is None
    swapped = token.replace(session, "6" * 32)
    assert SessionTokens(["one"]).session_of(swapped.encode()) is None
    assert SessionTokens([]).made_for(session) is None


# --- one reader


@pytest.mark.parametrize("keyed", [False, True])
async def test_whichever_worker_is_asked_the_same_session_gets_the_request(
    keyed: bool, tmp_path: Path, renderer: Renderer
) -> None:
    """Whoever passes a request on, and whoever serves it, read the same name in it."""
    async with two_workers(tmp_path, renderer, **(KEYS if keyed else {})) as workers:
        loop = asyncio.get_running_loop()
        sessions = [await opened(live) for live in workers.lives]
        assert [int(one["session_id"][:2], 16) for one in sessions] == [0, 1]

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(request=requests(sessions))
        def same(request: bytes) -> None:
            asking = [seen(workers, at, request, sessions) for at in (0, 1)]
            first, second = [asyncio.run_coroutine_threadsafe(one, loop).result() for one in asking]
            assert first == second, request

        await asyncio.to_thread(same)


def requests(sessions: Sequence[dict[str, str]]) -> st.SearchStrategy[bytes]:
    """Heads that name sessions in every way that there is, and in some that there are not."""
    texts = [text for one in sessions for text in (one["session_id"], one.get("token", "x"), forged_or(one))]
    texts += ["trainer", "f" * 32, "", "x y"]
    value = st.sampled_from(texts)
    encoded = value.flatmap(lambda text: st.integers(0, max(0, len(text) - 1)).map(partial(percent, text)))
    schemes = st.sampled_from(["Bearer ", "bearer  ", "Basic ", "Token ", "", "Bearer\t"])
    header = st.one_of(
        st.tuples(st.sampled_from(["Authorization", "authorization"]), st.tuples(schemes, value).map("".join)),
        st.tuples(st.sampled_from(["x-api-key", "X-Goog-Api-Key", "X-Session-Id"]), value),
    )
    names = st.sampled_from(["key", "%6bey", "Key", "x"])
    query = st.lists(st.tuples(names, st.one_of(value, encoded)).map("=".join), max_size=2).map("&".join)
    prefix = st.one_of(st.just(""), st.one_of(value, encoded).filter(bool).map("/sessions/{}".format))
    # Nothing of an engine: a count is noted in the ledger of the session that it was for.
    return st.builds(head, prefix, query, st.lists(header, max_size=3))


def forged_or(session: dict[str, str]) -> str:
    return forged(session) if "token" in session else session["session_id"].upper()


def percent(text: str, at: int) -> str:
    return text if not text else f"{text[:at]}%{ord(text[at]):02x}{text[at + 1 :]}"


def head(prefix: str, query: str, headers: Sequence[tuple[str, str]]) -> bytes:
    path = f"{prefix}/v1/messages/count_tokens".replace(" ", "%20")
    body = json.dumps(ASKED["/v1/messages/count_tokens"]).encode()
    lines = [f"POST {path}?{query.replace(' ', '+')} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers] + [f"content-length: {len(body)}", "connection: close"]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def seen(
    workers: Workers, at: int, request: bytes, sessions: Sequence[dict[str, str]]
) -> tuple[bytes, list[int]]:
    """The status of the answer at a worker, and how many requests each session has more."""

    def counts() -> list[int]:
        pairs = zip(workers.lives, sessions, strict=True)
        found = [live.manager.sessions.get(one["session_id"]) for live, one in pairs]
        return [session.ledger.num_requests for session in found]

    before = counts()
    address = workers.lives[at].url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(address[0], int(address[1]))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer.split(b" ", 2)[1], [after - first for after, first in zip(counts(), before, strict=True)]
