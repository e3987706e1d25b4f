"""A tenant's keys have names and scopes of their own; how many sessions it may have; what the audit log says."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.cli.main import main
from stenograph.tenants.tenant import hash_of, read_tenants
from stenograph.text.renderer import Renderer

from .conftest import Live
from .test_tenants import CHAT, OPERATOR, settings_in
from .workers_kit import two_workers

Serve = Callable[..., AbstractAsyncContextManager[Live]]

TEAM = (
    f'[team]\n{{quotas}}\n[team.keys.agent]\nsha256 = ["{hash_of(b"agent-key")}"]\nscopes = ["rollout"]\n'
    f'[team.keys.trainer]\nsha256 = ["{hash_of(b"trainer-key")}"]\nscopes = ["train"]\n'
    f'[other]\nkey_sha256 = ["{hash_of(b"other-key")}"]\n'
)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


def settings_of_team(folder: Path, quotas: str = "") -> dict[str, Any]:
    options = settings_in(folder)
    options["tenants"].write_text(TEAM.format(quotas=quotas))
    return options


def lines_of(options: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in options["audit_log"].read_text().splitlines()]


async def rolled_out(live: Live, **options: Any) -> str:
    """A session with a turn and an outcome, by the agent's key."""
    opened = await live.call("POST", "/sessions", options, **key("agent"))
    assert opened.status == 200, opened.body
    session = str(opened.json()["session_id"])
    live.says("done")
    chat = await live.call("POST", f"/sessions/{session}/v1/chat/completions", CHAT, **key("agent"))
    assert chat.status == 200, chat.body
    assert (await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0}, **key("agent"))).status == 200
    return session


async def test_one_tenants_keys_have_scopes_of_their_own_and_one_set_of_sessions(serve: Serve, tmp_path: Path) -> None:
    options = settings_of_team(tmp_path)
    async with serve(**options) as live:
        session = await rolled_out(live, group="g")
        step = {"step": 1, "n": 1, "claim": "c"}
        refused = await live.call("POST", "/samples/claim", step, **key("agent"))
        assert refused.status == 403
        assert "The key of team/agent may not do this: it has not the scope train." in refused.body.decode()
        assert (await live.call("POST", "/sessions", {}, **key("trainer"))).status == 403
        assert (await live.call("POST", "/samples/claim", step, **key("other"))).json()["sessions"] == []
        assert (await live.call("POST", "/samples/claim", step, **key("trainer"))).json()["sessions"] == [session]
        for name in ("agent", "trainer"):
            assert (await live.call("GET", f"/sessions/{session}", **key(name))).status == 200
        by = (await live.call("GET", "/accounts?by=tenant", **OPERATOR)).json()["rows"]
        assert [row["key"] for row in by] == ["team"]
    said = [(line["who"], line["what"], line["status"]) for line in lines_of(options)]
    assert said == [
        ("team/agent", "putOutcome", 200),
        ("team/agent", "claimSamples", 403),
        ("other", "claimSamples", 200),
        ("team/trainer", "claimSamples", 200),
    ]


async def test_a_trainers_key_deletes_what_it_takes_whichever_worker_has_it(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer, **settings_of_team(tmp_path)) as workers:
        sessions = [await rolled_out(live, group="g") for live in workers.lives]
        body = {"sessions": sessions, "delete": True}
        given = await workers.lives[0].call("POST", "/samples", body, **key("trainer"))
        assert b'"deleted":2,"not_deleted":[]' in given.body
        session = await rolled_out(workers.lives[0], group="g")
        for live in workers.lives[::-1]:
            gone = await live.call("DELETE", f"/sessions/{session}", **key("trainer"))
            assert gone.status in (204, 404), gone.body
        await rolled_out(workers.lives[1], group="g")
        deleted = await workers.lives[0].call("DELETE", "/sessions?group=g", **key("trainer"))
        assert deleted.json() == {"deleted": 1, "claimed": 0}


async def filled(lives: Sequence[Live]) -> str:
    """Open as many sessions as the quota of 3 allows, and be refused; one of them."""
    sessions = [await rolled_out(lives[at % len(lives)]) for at in range(2)]
    fork = await lives[0].call("POST", f"/sessions/{sessions[0]}/fork", {"turn": 0}, **key("agent"))
    assert fork.status == 200, "forks are sessions too"
    for live in lives:
        refused = await live.call("POST", "/sessions", {}, **key("agent"))
        assert (refused.status, refused.json()["error"]["code"]) == (429, "limit_exceeded")
        assert "team has 3 of at most 3 sessions" in refused.json()["error"]["message"]
        again = await live.call("POST", f"/sessions/{sessions[1]}/fork", {"turn": 0}, **key("agent"))
        assert again.status == 429
        assert (await live.call("POST", "/sessions", {}, **key("other"))).status == 200
    return sessions[1]


async def test_a_tenant_has_no_more_sessions_than_its_quota(serve: Serve, tmp_path: Path) -> None:
    clock = ManualClock()
    async with serve(clock=clock, **settings_of_team(tmp_path, quotas="sessions = 3")) as live:
        session = await filled([live])
        assert (await live.call("DELETE", f"/sessions/{session}", **key("agent"))).status == 204
        assert (await live.call("POST", "/sessions", {}, **key("agent"))).status == 429, "counted a moment ago"
        clock.advance(1)
        assert (await live.call("POST", "/sessions", {}, **key("agent"))).status == 200


async def test_workers_count_a_tenants_sessions_together(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer, **settings_of_team(tmp_path, quotas="sessions = 3")) as workers:
        await filled(workers.lives)


async def test_the_audit_log_goes_on_in_a_new_file_and_has_the_query_of_a_deletion(
    serve: Serve, tmp_path: Path
) -> None:
    options = settings_of_team(tmp_path)
    before = tmp_path / "audit.jsonl.1"
    async with serve(**options) as live:
        await rolled_out(live, group="g")
        options["audit_log"].rename(before)
        os.kill(os.getpid(), signal.SIGHUP)
        path = "/sessions?group=g&state=ended&k%65y=agent-key&key=agent-key"
        assert (await live.call("DELETE", path)).json()["deleted"] == 1
    assert [json.loads(line)["what"] for line in before.read_text().splitlines()] == ["putOutcome"]
    (line,) = lines_of(options)
    assert (line["what"], line["query"]) == ("deleteSessions", "group=g&state=ended")
    assert "agent-key" not in options["audit_log"].read_text()


def test_the_command_adds_keys_with_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.toml"
    add = ["tenant", "add", "team", "--tenants", str(file)]
    keys = list[str]()
    for more in (["--key", "agent", "--scope", "rollout"], ["--key", "trainer", "--scope", "train"]):
        assert main([*add, *more]) == 0
        told = capsys.readouterr()
        keys.append(told.out.strip())
        assert f"team/{more[1]} is in" in told.err
    found = read_tenants(file.read_text())
    shown = [one.shown for one in map(found.key_among, ([key.encode()] for key in keys)) if one is not None]
    assert shown == ["team/agent", "team/trainer"]
    assert {name: [*map(str, one.scopes)] for name, one in found.by_name["team"].keys.items()} == {
        "agent": ["rollout"],
        "trainer": ["train"],
    }
    assert main([*add, "--key", "agent"]) == 2
    assert "has team/agent already" in capsys.readouterr().err
    assert main(add) == 2
    assert "--key KEY adds a further key" in capsys.readouterr().err
