"""Tenants: what one has is to another as what nobody has, on every route; scopes, the audit log, and SIGHUP."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from standins.clock import ManualClock
from stenograph.cli.main import main
from stenograph.cli.parts import PARTS
from stenograph.core.errors import StartupError
from stenograph.core.stated_options import TAG, tag_of
from stenograph.dialects.settings import DialectKind
from stenograph.http.openapi.turns import turn_rows
from stenograph.http.response_route import HeldResponses
from stenograph.http.route import Needs, Route, rows_of
from stenograph.http.route_table import rows
from stenograph.session.kept_media import keep_media
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.tenants.tenant import hash_of, read_tenants
from stenograph.text.renderer import Renderer
from tests.store_laws import medium

from .conftest import Answer, Live, user
from .workers_kit import two_workers

Serve = Callable[..., AbstractAsyncContextManager[Live]]

KEYS = {"ann": "ann-key", "bob": "bob-key", "olga": "olga-key", "trainer": "trainer-key"}
OPERATOR = {"authorization": "Bearer operator-key"}
SCOPES = {"olga": '["admin"]', "trainer": '["train", "weights"]'}
GROUP, GHOST_GROUP = "anns-secret-group", "nobodys-group----"
SECRETS = ("anns-secret", "ann secretly")
PICTURE = medium(b"\x89PNG anns-secret-picture")


def file_of(folder: Path, **more: str) -> Path:
    """A file of tenants, with more lines for some of them."""
    file = folder / "tenants.toml"
    tables: list[str] = []
    for name, key in KEYS.items():
        scopes = f"scopes = {SCOPES[name]}\n" if name in SCOPES else ""
        tables.append(f'[{name}]\nkey_sha256 = ["{hash_of(key.encode())}"]\n{scopes}{more.get(name, "")}\n')
    file.write_text("\n".join(tables))
    return file


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def settings_in(folder: Path, **more: str) -> dict[str, Any]:
    return {
        "api_key": ("operator-key",),
        "admin_key": ("admin-key",),
        "tenants": file_of(folder, **more),
        "audit_log": folder / "audit.jsonl",
    }


async def opened(live: Live, name: str, **options: Any) -> str:
    answer = await live.call("POST", "/sessions", options, **as_(name))
    assert answer.status == 200, answer.body
    return str(answer.json()["session_id"])


async def anns(live: Live) -> str:
    """A session of Ann's with a turn, an outcome, a group and metadata."""
    session = await opened(live, "ann", group=GROUP, metadata={"task": "anns-secret-task"})
    live.says("ann secretly replies")
    body = {"messages": [user("ann secretly asks")]}
    assert (await live.call("POST", f"/sessions/{session}/v1/chat/completions", body, **as_("ann"))).status == 200
    outcome = {"reward": 1.0, "detail": "anns-secret-detail"}
    assert (await live.call("PUT", f"/sessions/{session}/outcome", outcome, **as_("ann"))).status == 200
    return session


def all_rows() -> Sequence[Route]:
    turns = [row for kind in DialectKind for row in turn_rows(kind, forwards=False)]
    return [*rows(PARTS), *(row for row, _ in rows_of(HeldResponses)), *turns]


CHAT = {"messages": [user("hi")], "max_tokens": 40}
BODIES: dict[str, Any] = {
    "getManySamples": [{"sessions": ["SESSION"]}, {"group": "GROUP"}, {"sessions": ["SESSION"], "delete": True}],
    "claimSamples": [
        {"step": 1, "n": 9, "claim": "c", "sessions": ["SESSION"]},
        {"step": 1, "n": 9, "claim": "c", "group": "GROUP"},
        {"step": 1, "n": 9, "claim": "c"},
    ],
    "receiveSamples": [{"claim": "c", "trained": ["SESSION"]}, {"claim": "c", "trained": [], "left_out": ["SESSION"]}],
    "abandonSessions": [{"sessions": ["SESSION"]}, {"group": "GROUP"}, {"group": "GROUP", "first": 1}],
    "scoreSessions": [{"name": "s", "sessions": ["SESSION"]}, {"name": "s", "group": "GROUP"}],
    "scoreSession": [{"name": "s"}],
    "abortAll": [{"abort_all": True}, {"group": "GROUP"}],
    "putOutcome": [{"reward": 0.0}],
    "openSession": [{}],
}
"""Bodies of requests that need one."""
QUERIES: dict[str, Sequence[str]] = {
    "listSessions": ("", "?group=GROUP", "?after=SESSION", "?metadata.task=anns-secret-task", "?state=ended"),
    "deleteSessions": ("?group=GROUP", "?state=ended", "?metadata.task=anns-secret-task"),
    "getAccounts": ("?by=group", "?by=session", "?by=step", "?by=cause", "?by=tenant", "?group=GROUP"),
    "getGroupWhy": ("?group=GROUP",),
    "getGroup": ("?name=GROUP",),
    "getGroups": ("", "?passes_at=0.5"),
}
FREE = {"openSession", "tokenize", "detokenize"}
"""Routes of the caller's own content alone: nothing in them names a session."""
PATH_PARTS = {
    "{id}": "SESSION", "{sha256}": "0" * 64, "{response}": "resp_0", "{hash}": "0" * 64, "{file}": "console.js",
    "{name}": "http://nowhere:1", "{version}": "v1beta", "{model}": "tiny", "{method}": "generateContent",
}  # fmt: skip


def requests_of(row: Route) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Requests for a route, in which SESSION and GROUP stand for Ann's or for nobody's."""
    path = row.shown_path
    for part, value in PATH_PARTS.items():
        path = path.replace(part, value)
    assert "{" not in path, f"{row.name}: say in PATH_PARTS what stands for its part"
    bodies = BODIES.get(row.id, [None if row.body is None else CHAT if row.needs is Needs.TOKEN else {}])
    for query in QUERIES.get(row.id, ("",)):
        for body in bodies:
            yield row.method, path + query, body, {}
            if path.startswith("/v1"):
                yield row.method, path + query, body, {"x_session_id": "SESSION"}


async def asked(live: Live, request: tuple[str, str, Any, dict[str, str]], session: str, group: str) -> Answer:
    method, path, body, headers = request
    text = json.dumps([path, body, headers]).replace("SESSION", session).replace("GROUP", group)
    path, body, headers = json.loads(text)
    return await live.call(method, path, body, **headers, **as_("bob"))


def shown(answer: Answer, session: str, group: str) -> tuple[int, bytes]:
    content = answer.body.replace(session.encode(), b"SESSION").replace(group.encode(), b"GROUP")
    return answer.status, re.sub(rb'"until":[0-9.]+', b"", content)


@asynccontextmanager
async def kept_or_not(serve: Serve, folder: Path, is_kept: bool) -> AsyncIterator[Live]:
    """A server with tenants, in memory or on disk. Its time stands still: equal answers are equal bytes."""
    options = settings_in(folder)
    if not is_kept:
        async with serve(clock=ManualClock(), **options) as live:
            yield live
        return
    data = DataFolder(folder / "data", address="here")
    store = await SqliteStore.open(data)
    try:
        async with serve(clock=ManualClock(), store=store, **options) as live:
            yield live
    finally:
        await store.aclose()
        data.close()


class Anns(NamedTuple):
    """What Ann has: a session with a claim, an image and a response, and a fork of it."""

    session: str
    fork: str
    response: str

    @staticmethod
    async def made(live: Live) -> "Anns":
        session = await anns(live)
        await keep_media(live.manager.sessions.get(session), live.manager.sessions.storage, [PICTURE])
        live.says("ann secretly responds")
        body = {"input": "ann secretly asks again", "model": "tiny"}
        held = await live.call("POST", f"/sessions/{session}/v1/responses", body, **as_("ann"))
        assert held.status == 200, held.body
        path = f"/sessions/{session}/fork"
        fork = await live.call("POST", path, {"turn": 0}, idempotency_key="k", **as_("ann"))
        assert fork.status == 200, fork.body
        gone = await anns(live)  # its tokens stay in the accounts
        assert (await live.call("DELETE", f"/sessions/{gone}", **as_("ann"))).status == 204
        claim = {"step": 1, "n": 9, "claim": "c", "sessions": [session]}
        assert (await live.call("POST", "/samples/claim", claim, **as_("ann"))).json()["sessions"] == [session]
        return Anns(session, fork.json()["forks"][0]["session_id"], held.json()["id"])


@asynccontextmanager
async def with_anns(serve: Serve, renderer: Renderer, folder: Path, how: str) -> AsyncIterator[tuple[list[Live], Anns]]:
    """Servers of each kind, and what Ann has there. `restarted`: it is in the store alone."""
    if how.startswith("workers"):
        data_dir = folder / "data" if how == "workers-disk" else None
        async with two_workers(folder, renderer, data_dir=data_dir, **settings_in(folder)) as workers:
            yield workers.lives, await Anns.made(workers.lives[0])
        return
    async with kept_or_not(serve, folder, is_kept=how != "memory") as live:
        made = await Anns.made(live)
        if how != "restarted":
            yield [live], made
    if how == "restarted":
        async with kept_or_not(serve, folder, is_kept=True) as live:
            yield [live], made


@pytest.mark.parametrize("how", ["memory", "disk", "restarted", "workers", "workers-disk"])
async def test_on_every_route_what_another_tenant_has_is_as_what_nobody_has(
    serve: Serve, renderer: Renderer, tmp_path: Path, how: str
) -> None:
    async with with_anns(serve, renderer, tmp_path, how) as (lives, made):
        session = made.session
        ghost = session[: TAG.start] + tag_of("ann") + "4" + session[13:-1] + ("0" if session[-1] != "0" else "1")
        assert ghost != session
        for live in lives:
            await walked(live, session, ghost)
        for live in lives:
            await check_own_sessions(live, made)
        live = lives[-1]
        told = (await live.call("GET", f"/sessions/{session}", **as_("ann"))).json()
        outcome = (await live.call("GET", f"/sessions/{session}/outcome", **as_("ann"))).json()
        assert (bool(told["records"]), outcome["outcome"]["reward"]) == (True, 1.0)
        receipt = {"claim": "c", "trained": [session]}
        trained = await live.call("POST", "/samples/receipt", receipt, **as_("ann"))
        assert trained.json()["trained"] == [session], "nobody has claimed, abandoned or deleted it"
        assert (await live.call("GET", f"/sessions/{made.fork}", **as_("ann"))).status == 200
        bobs = (await live.call("GET", "/sessions", **as_("bob"))).json()["sessions"]
        assert all(one["session_id"][TAG] == tag_of("bob") for one in bobs)


async def walked(live: Live, session: str, ghost: str) -> None:
    """Ask each route as Bob for Ann's session and for nobody's."""
    names: set[str] = set()
    for row in all_rows():
        names.add(row.name)
        if row.id in FREE:
            continue
        for request in requests_of(row):
            if row.needs is Needs.TOKEN and "SESSION" not in str(request):
                continue  # a turn without a session, or the list of models
            theirs = await asked(live, request, session, GROUP)
            nobodys = await asked(live, request, ghost, GHOST_GROUP)
            assert shown(theirs, session, GROUP) == shown(nobodys, ghost, GHOST_GROUP), (row.name, request)
            said = theirs.body.replace(b"anns-secret-group", b"").replace(b"anns-secret-task", b"")
            assert not any(secret.encode() in said for secret in SECRETS), (row.name, request, theirs.body)
            assert session.encode() not in theirs.body or "SESSION" in str(request), (row.name, theirs.body)
    assert {"GET /sessions", "POST /samples/claim", "GET /metrics", "POST /backup", "GET /console/api/now"} <= names


async def check_own_sessions(live: Live, made: Anns) -> None:
    """From a session of his own, and beside another key, Bob gets at nothing of Ann's."""
    own = await opened(live, "bob", group=GROUP, metadata={"task": "anns-secret-task"})
    tries = [
        ("GET", f"/sessions/{own}/media/{PICTURE.ref.sha256}", None, {}),
        ("GET", f"/sessions/{own}/v1/responses/{made.response}", None, {}),
        ("GET", f"/v1/responses/{made.response}", None, {"x_session_id": own}),
        ("GET", f"/v1/responses/{made.response}", None, {}),
        ("GET", f"/v1/responses/{made.response}", None, {"x_session_id": made.session}),
        ("GET", f"/v1/responses/{made.response}", None, {"x_api_key": f"stg-{made.session}-{'0' * 32}"}),
        ("POST", f"/sessions/{own}/v1/responses", {"input": "x", "previous_response_id": made.response}, {}),
        ("POST", "/v1/responses", {"input": "x", "previous_response_id": made.response}, {}),
        ("POST", f"/sessions/{made.fork}/fork", {"turn": 0}, {"idempotency_key": "k"}),
        ("GET", f"/sessions/{own[:2]}{made.fork[2:]}", None, {}),
        ("GET", f"/sessions/%{ord(made.session[0]):x}{made.session[1:]}", None, {}),
        ("GET", f"/console/api/sessions/{made.session.upper()}", None, {}),
        ("DELETE", f"/sessions/{made.session}", None, {"x_stenograph_revision": "2 1 0"}),
        ("POST", f"/sessions/{made.session}/abort", {}, {"x_stenograph_passed_on": "1"}),
    ]  # fmt: skip
    for method, path, body, headers in tries:
        answer = await live.call(method, path, body, **headers, **as_("bob"))
        assert answer.status in (400, 403, 404), (method, path, body, answer.status, answer.body)
        assert not any(secret.encode() in answer.body for secret in SECRETS), (method, path, answer.body)
    for path in ("/sessions", f"/sessions?group={GROUP}", "/accounts?by=session", f"/console/api/group?name={GROUP}"):
        answer = await live.call("GET", path, **as_("bob"))
        assert answer.status == 200
        assert not any(id_.encode() in answer.body for id_ in (made.session, made.fork)), (path, answer.body)
    assert (await live.call("DELETE", f"/sessions?group={GROUP}", **as_("bob"))).json() == {"deleted": 1, "claimed": 0}


async def test_an_abort_of_all_turns_ends_the_tenants_own(serve: Serve, tmp_path: Path) -> None:
    async with serve(**settings_in(tmp_path)) as live:
        session = await opened(live, "ann", group=GROUP)
        live.says("ann goes on", paused=True)
        chat = live.call("POST", f"/sessions/{session}/v1/chat/completions", CHAT, **as_("ann"))
        turn = asyncio.create_task(chat)
        await live.engine.begun(1)
        for body in ({"abort_all": True}, {"group": GROUP}):
            assert (await live.call("POST", "/abort_request", body, **as_("bob"))).json() == {"aborted": 0}
        assert (await live.call("POST", "/abort_request", {"group": GROUP}, **as_("ann"))).json() == {"aborted": 1}
        assert (await turn).status == 200


async def test_only_the_operator_and_an_admin_see_all(serve: Serve, tmp_path: Path) -> None:
    async with serve(**settings_in(tmp_path)) as live:
        session, own = await anns(live), await opened(live, "bob")
        for headers in (OPERATOR, as_("olga")):
            listed = (await live.call("GET", "/sessions", **headers)).json()["sessions"]
            assert [one["session_id"] for one in listed] == [session, own]
            assert b"stenograph_turns_total" in (await live.call("GET", "/metrics", **headers)).body
            assert (await live.call("GET", "/ready", **headers)).json()["engines"] != []
            tenants = (await live.call("GET", "/accounts?by=tenant", **headers)).json()["rows"]
            assert [row["key"] for row in tenants] == ["ann", "bob"]
        for headers in (as_("bob"), as_("trainer"), {}):
            status = 403 if headers else 401
            assert (await live.call("GET", "/metrics", **headers)).status == status
            assert (await live.call("GET", "/console/api/now", **headers)).status == status
            assert (await live.call("GET", "/ready", **headers)).json() == {
                "ready": True, "paused": False, "engines": []
            }  # fmt: skip
        assert (await live.call("DELETE", f"/sessions/{session}", **as_("olga"))).status == 204
        rows_now = (await live.call("GET", "/accounts?by=tenant", **as_("ann"))).json()
        assert rows_now["rows"][0]["key"] == "ann", "an ended session's tokens stay its tenant's"
        assert rows_now["ended_sessions"] == 1
        assert (await live.call("GET", "/accounts?by=tenant", **as_("bob"))).json()["whole"]["sampled"] == 0


async def test_scopes_bound_a_key_and_say_which_is_missing(serve: Serve, tmp_path: Path) -> None:
    async with serve(**settings_in(tmp_path)) as live:
        refused = await live.call("POST", "/sessions", {}, **as_("trainer"))
        assert (refused.status, "rollout" in refused.json()["error"]["message"]) == (403, True)
        assert (await live.call("POST", "/samples/claim", {"step": 1, "n": 1}, **as_("trainer"))).status == 200
        paused = await live.call("POST", "/pause_generation", {"mode": "abort"}, **as_("ann"))
        assert (paused.status, b"weights" in paused.body) == (403, True)
        assert (await live.call("POST", "/pause_generation", {"mode": "abort"}, **as_("trainer"))).status == 200
        assert (await live.call("POST", "/continue_generation", {}, **as_("trainer"))).status == 200
        assert (await live.call("GET", "/engines", **as_("trainer"))).status == 403
        assert (await live.call("GET", "/engines", **as_("olga"))).status == 200
        assert (await live.call("GET", "/sessions", authorization="Bearer no-key")).status == 401


async def test_a_session_and_its_token_are_its_tenants_for_ever(serve: Serve, tmp_path: Path) -> None:
    async with kept_or_not(serve, tmp_path, is_kept=True) as live:
        answer = (await live.call("POST", "/sessions", {"group": "g"}, idempotency_key="k", **as_("ann"))).json()
        session, token = answer["session_id"], {"authorization": f"Bearer {answer['token']}"}
        again = await live.call("POST", "/sessions", {"group": "g"}, idempotency_key="k", **as_("ann"))
        assert again.json()["session_id"] == session
        bobs = await live.call("POST", "/sessions", {"group": "g"}, idempotency_key="k", **as_("bob"))
        assert bobs.json()["session_id"] != session, "a key for retries is its tenant's own"
        live.says("hello")
        assert (await live.call("POST", f"/sessions/{session}/v1/chat/completions", CHAT, **token)).status == 200
        assert (await live.call("GET", f"/sessions/{session}", **token)).status == 403
        live.manager.sessions.evict(10, 0)
        assert (await live.manager.sessions.peek(session)).options.tenant == "ann"
        (tmp_path / "tenants.toml").write_text(f'[bob]\nkey_sha256 = ["{hash_of(b"bob-key")}"]\n')
        os.kill(os.getpid(), signal.SIGHUP)
        gone = await live.call("POST", f"/sessions/{session}/v1/chat/completions", CHAT, **token)
        assert (gone.status, "tenant" in gone.json()["error"]["message"]) == (401, True)
        assert (await live.call("GET", f"/sessions/{session}", **OPERATOR)).status == 200


async def test_a_bad_file_keeps_the_one_before_and_says_so(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = settings_in(tmp_path)
    async with serve(**options) as live:
        options["tenants"].write_text("[ann\n")
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await live.call("GET", "/sessions", **as_("ann"))).status == 200
        assert "the one before holds" in caplog.text
        options["tenants"].write_text(f'[carl]\nkey_sha256 = ["{hash_of(b"carl-key")}"]\n')
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await live.call("GET", "/sessions", **as_("ann"))).status == 401
        assert (await live.call("GET", "/sessions", authorization="Bearer carl-key")).status == 200
    lines = [json.loads(line) for line in options["audit_log"].read_text().splitlines()]
    assert "error" in lines[0]
    assert (lines[1]["added"], lines[1]["removed"]) == (["carl"], ["ann", "bob", "olga", "trainer"])
    options["tenants"].write_text("[ann\n")
    with pytest.raises(StartupError, match="not TOML"):
        async with serve(**options):
            pass


async def test_the_audit_log_says_who_changed_what_when_and_from_where(serve: Serve, tmp_path: Path) -> None:
    options, clock = settings_in(tmp_path), ManualClock()
    async with serve(clock=clock, weight_version="7", **options) as live:
        session = await anns(live)
        await live.call("POST", "/pause_generation", {"mode": "abort"}, **as_("ann"))
        await live.call("POST", "/continue_generation", {}, **as_("trainer"))
        await live.call("POST", "/abandon", {"sessions": [session]}, **as_("ann"))
        await live.call("DELETE", f"/sessions/{session}", **OPERATOR)
        await live.call("POST", "/backup", {"path": "/tmp/x"})
    lines = [json.loads(line) for line in options["audit_log"].read_text().splitlines()]
    assert [(line["who"], line["what"], line["status"]) for line in lines] == [
        ("ann", "putOutcome", 200),
        ("ann", "pauseGeneration", 403),
        ("trainer", "continueGeneration", 200),
        ("ann", "abandonSessions", 200),
        ("operator", "deleteSession", 204),
        (None, "backUp", 401),
    ]
    assert {(line["from"], line["at"], line["weights"]) for line in lines} == {("127.0.0.1", clock.wall(), "7")}
    assert lines[0]["path"] == f"/sessions/{session}/outcome"
    assert options["audit_log"].stat().st_mode & 0o077 == 0


async def test_a_tenants_turns_beyond_its_quota_wait_for_its_own_and_keep_nobody(serve: Serve, tmp_path: Path) -> None:
    async with serve(max_in_flight=8, **settings_in(tmp_path, ann="in_flight = 1\nwaiting = 1\n")) as live:
        live.says("one", paused=True)
        sessions = [await opened(live, "ann") for _ in range(3)]

        def chat(session: str, name: str) -> "asyncio.Task[Answer]":
            path = f"/sessions/{session}/v1/chat/completions"
            return asyncio.ensure_future(live.call("POST", path, CHAT, **as_(name)))

        first = chat(sessions[0], "ann")
        await live.engine.begun(1)
        second = chat(sessions[1], "ann")
        done, _ = await asyncio.wait({second, third := chat(sessions[2], "ann")}, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert refused.status == 429
        assert refused.json()["error"]["code"] == "limit_exceeded"
        live.says("bob's")
        assert (await chat(await opened(live, "bob"), "bob")).status == 200
        live.says("two")
        live.engine.step(100)
        assert sorted([(await one).status for one in (first, second, third)]) == [200, 200, 429]


async def test_workers_agree_on_whose_a_session_is_and_count_quotas_together(
    renderer: Renderer, tmp_path: Path
) -> None:
    options = settings_in(tmp_path, ann="tokens_a_minute = 8\n")
    async with two_workers(tmp_path, renderer, **options) as workers:
        one, other = workers.lives
        session = await anns(one)
        for live in (one, other):
            assert (await live.call("GET", f"/sessions/{session}", **as_("ann"))).status == 200
            assert (await live.call("GET", f"/sessions/{session}", **as_("bob"))).status == 404
            for path in (
                "/sessions",
                "/accounts?by=session",
                "/console/api/groups",
                f"/console/api/group?name={GROUP}",
            ):
                assert session.encode() not in (await live.call("GET", path, **as_("bob"))).body, path
            for path, body in (
                ("/samples", {"sessions": [session]}),
                ("/samples", {"group": GROUP}),
                ("/samples/claim", {"step": 1, "n": 9}),
                ("/abandon", {"sessions": [session]}),
            ):
                answer = await live.call("POST", path, body, **as_("bob"))
                assert not any(secret.encode() in answer.body for secret in SECRETS), (path, answer.body)
            for passed_on in ("1", "0" * 32, await opened(live, "bob")):
                headers = {"x_stenograph_passed_on": passed_on, **as_("bob")}
                forged = await live.call("POST", "/samples", {"sessions": [session]}, **headers)
                assert session.encode() not in forged.body or b"session_not_found" in forged.body
                assert not any(secret.encode() in forged.body for secret in SECRETS)
            refused = await live.call("POST", "/v1/chat/completions", CHAT, **as_("ann"))
            assert (refused.status, "tokens a minute" in refused.json()["error"]["message"]) == (429, True)
        claimed = await other.call("POST", "/samples/claim", {"step": 1, "n": 9}, **as_("ann"))
        assert claimed.json()["sessions"] == [session]


def test_the_command_prints_a_key_once_and_writes_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.toml"
    assert main(["tenant", "add", "ann", "--tenants", str(file)]) == 0
    key = capsys.readouterr().out.strip()
    assert key not in file.read_text()
    assert hash_of(key.encode()) in file.read_text()
    file.write_text("# ours\n" + file.read_text())
    assert main(["tenant", "add", "bob", "--scope", "weights", "--tenants", str(file)]) == 0
    assert file.read_text().startswith("# ours\n")
    assert 'scopes = ["weights"]' in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert main(["tenant", "add", "ann", "--tenants", str(file)]) == 2
    assert "has ann already" in capsys.readouterr().err
    assert main(["tenant", "add", "a/b", "--tenants", str(file)]) == 2
    assert main(["tenant", "add", "carl"]) == 2


def test_the_file_on_the_page_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accounts.md").read_text()
    found = read_tenants(page.split("```toml\n")[1].split("```")[0]).by_name["team-a"]
    assert (found.in_flight, found.tokens_a_minute, found.waiting) == (64, 1_000_000, 1000)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--audit-log", "a.jsonl"], "--tenants"),
        (["--tenants", "t.toml"], "--api-key"),
        (["--tenants", "t.toml", "--api-key", "k", "--play", "at-once", "--data-dir", "d"], "--play"),
    ],
)
def test_settings_in_conflict_are_refused(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert problem in capsys.readouterr().err
