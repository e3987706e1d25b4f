"""The audit log of a server with tenants: which requests have a line, and what a full disk does. What a tenant is
refused tells nothing of others."""

import asyncio
import json
import resource
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.http.route import Needs
from stenograph.tenants.audit import AUDITED, AuditLog

from .conftest import Answer, Live, user
from .test_tenants import CHAT, OPERATOR, all_rows, anns, as_, opened, settings_in

Serve = Callable[..., AbstractAsyncContextManager[Live]]


def lines_of(options: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    lines = map(json.loads, options["audit_log"].read_text().splitlines())
    return [(line["what"], line["who"], line["status"]) for line in lines]


def test_every_route_that_takes_an_administrators_key_and_changes_something_is_audited() -> None:
    rows = {row.id: row for row in all_rows()}
    assert rows.keys() >= AUDITED
    changing = {row.id for row in rows.values() if row.needs is Needs.ADMIN and row.method != "GET"}
    assert changing <= AUDITED


async def test_claims_loras_aborts_and_deletions_with_samples_have_a_line(serve: Serve, tmp_path: Path) -> None:
    options = settings_in(tmp_path)
    async with serve(**options) as live:
        session = await anns(live)
        claim = {"step": 1, "n": 1, "claim": "c"}
        await live.call("POST", "/samples/claim", claim, **as_("ann"))
        await live.call("POST", "/samples/receipt", {"claim": "c", "trained": [session]}, **as_("ann"))
        await live.call("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}, **as_("ann"))
        await live.call("POST", "/unload_lora_adapter", {"lora_name": "x"}, **as_("bob"))
        await live.call("POST", "/abort_request", {"abort_all": True}, **as_("bob"))
        await live.call("POST", f"/sessions/{session}/abort", {}, **as_("bob"))
        for body in ({"sessions": [session]}, {"sessions": [session], "delete": True}):
            assert (await live.call("POST", "/samples", body, **as_("ann"))).status == 200
        await live.call("POST", "/samples", {"sessions": [session]})
    assert lines_of(options) == [
        ("putOutcome", "ann", 200),
        ("claimSamples", "ann", 200),
        ("receiveSamples", "ann", 200),
        ("loadLora", "ann", 403),
        ("unloadLora", "bob", 403),
        ("abortAll", "bob", 200),
        ("abortSession", "bob", 404),
        ("getManySamples", "ann", 200),
        ("getManySamples", None, 401),
    ]


async def test_a_full_disk_stops_no_request_and_the_servers_log_has_the_line(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**settings_in(tmp_path), "audit_log": Path("/dev/full")}
    async with serve(**options) as live:
        session = await anns(live)
        assert (await live.call("DELETE", f"/sessions/{session}", **OPERATOR)).status == 204
    said = [record.getMessage() for record in caplog.records if "audit log" in record.getMessage()]
    assert [("No space left" in one, '"what":"deleteSession"' in one) for one in said] == [(True, False), (True, True)]
    assert '"who":"operator"' in said[1]


def test_a_line_written_in_part_spoils_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", ManualClock())
    log.note("first", {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "audit.jsonl").stat().st_size + 20, before[1]))
    try:
        log.note("cut", {})
        log.note("refused", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.note("last", {})
    first, cut, last = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert (json.loads(first)["what"], len(cut), json.loads(last)["what"]) == ("first", 20, "last")
    assert ["cut" in one.getMessage() for one in caplog.records] == [True, False]
    assert '"what":"refused"' in caplog.text


async def test_a_refusal_tells_nothing_of_what_others_run_and_hold(serve: Serve, tmp_path: Path) -> None:
    async with serve(max_in_flight=64, max_held_tokens=50, request_timeout_s=30.0, **settings_in(tmp_path)) as live:
        many = {"prompt": ["x"] * 63, "max_tokens": 1, "model": "tiny"}
        told: list[Answer] = []
        running: list[asyncio.Task[Answer]] = []
        session = await opened(live, "bob")
        for num in (2, 3):
            while len(running) < num:
                live.says("ann's", paused=True)
                path = f"/sessions/{await opened(live, 'ann')}/v1/chat/completions"
                running.append(asyncio.create_task(live.call("POST", path, CHAT, **as_("ann"))))
            await live.engine.begun(num)
            told.append(await live.call("POST", "/v1/completions", many, **as_("bob")))
        assert [one.status for one in told] == [429, 429]
        assert told[0].json()["error"]["message"] == told[1].json()["error"]["message"]
        live.engine.step(100)
        assert [(await one).status for one in running] == [200] * 3
        for _ in range(2):
            live.says("ann holds more")
            body = {"messages": [user("ann says much " * 20)]}
            path = f"/sessions/{await opened(live, 'ann')}/v1/chat/completions"
            await live.call("POST", path, body, **as_("ann"))
            refused = await live.call("POST", f"/sessions/{session}/v1/chat/completions", CHAT, **as_("bob"))
            message = refused.json()["error"]["message"]
            assert (refused.status, "the 50 tokens" in message) == (429, True)
            assert str(live.manager.sessions.num_held_tokens) not in message
