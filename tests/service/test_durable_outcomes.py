"""A rollout's outcome survives as its turns do, and each token's fate is told once, wherever its session is."""

import asyncio
import sqlite3
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.session.said import put_outcome
from stenograph.store.folder import DataFolder

from .conftest import Live, user
from .test_durable import Failing, Serve, conversation, folder, kept, shown
from .test_outcomes import FATES, counted

pytestmark = pytest.mark.timeout(600)

__all__ = ["folder", "kept"]


async def put(live: Live, session: str, **said: Any) -> int:
    return (await live.call("PUT", f"/sessions/{session}/outcome", said)).status


async def outcome(live: Live, session: str) -> Any:
    return (await live.call("GET", f"/sessions/{session}/outcome")).json()["outcome"]


async def evicted(live: Live, session: str) -> None:
    """Have another session push this one out of memory."""
    await live.open()
    assert not live.manager.sessions.has(session)


async def test_an_answered_outcome_is_there_after_an_eviction_and_a_restart(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        session = await live.open(group="g")
        await conversation(live, session, turns=["one"])
        assert await put(live, session, reward=0.25, verdict="aborted") == 200
        assert await put(live, session, reward={"tests": 1, "style ☃": -0.5}, detail="good") == 200
        said = {"reward": {"tests": 1.0, "style ☃": -0.5}, "verdict": "ok", "detail": "good"}
        before = await shown(live, session)
        await evicted(live, session)
        assert await outcome(live, session) == said
        listed = (await live.call("GET", "/sessions")).json()["sessions"][0]
        assert (listed["outcome"], listed["group"]) == (said, "g")
        assert not live.manager.sessions.has(session), "whoever looks wakes nothing"
    async with kept() as live:
        assert (await shown(live, session))["samples"] == before["samples"]
        assert await outcome(live, session) == said
        assert await put(live, session, verdict="infra_failed") == 200, "it is replaced after a restart too"
        live.says("two")
        assert (await live.chat(session, user("another"))).status == 200
    async with kept() as live:
        assert (await outcome(live, session))["verdict"] == "infra_failed"
        made = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()
        assert (made["samples"], made["empty_reason"]) == ([], "infra_failed")


async def test_an_outcome_that_cannot_be_kept_is_503_and_the_one_before_holds(kept: Serve) -> None:
    async with kept(connect=Failing) as live:
        session = await live.open()
        assert await put(live, session, reward=0.5) == 200
        Failing.made.code = sqlite3.SQLITE_FULL
        assert await put(live, session, reward=1) == 503
        assert (await outcome(live, session))["reward"] == 0.5
        Failing.made.code = None
    async with kept() as live:
        assert (await outcome(live, session))["reward"] == 0.5


async def test_an_outcome_whose_client_leaves_is_kept_all_the_same(kept: Serve) -> None:
    async with kept() as live:
        session = await live.open()
        putting = asyncio.ensure_future(put_outcome(live.manager.sessions, session, SessionOutcome(reward=0.75)))
        await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait({putting})
        await conversation(live, session, turns=["one"])  # its row comes after the outcome's
        assert (await outcome(live, session))["reward"] == 0.75
    async with kept() as live:
        assert (await outcome(live, session))["reward"] == 0.75


async def test_an_outcome_makes_no_session_younger(kept: Serve) -> None:
    clock = ManualClock()
    async with kept(clock=clock) as live:
        session = await live.open(ttl_s=100)
        await conversation(live, session, turns=["one"])
        clock.advance(99)
        assert await put(live, session, reward=1) == 200
    clock.advance(1)
    async with kept(clock=clock) as live:
        assert (await live.call("GET", f"/sessions/{session}/outcome")).status == 404
        assert await put(live, session, reward=1) == 404


async def test_the_fates_of_sessions_that_are_not_in_memory_count_when_they_are_deleted(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        sessions = [await live.open() for _ in range(3)]
        trained, failed, left = sessions
        for session in sessions:
            await conversation(live, session, turns=["four"])
        await put(live, failed, verdict="infra_failed")
        await evicted(live, failed)
        assert (await live.call("POST", f"/sessions/{trained}/samples", {})).status == 200
        assert not live.manager.sessions.has(trained)
        metrics = await live.call("GET", "/metrics")
        assert sum(counted(metrics).values()) == 0, "to be evicted is no end"
        for session in sessions:
            assert (await live.call("DELETE", f"/sessions/{session}")).status == 204
            assert (await live.call("DELETE", f"/sessions/{session}")).status == 404
        metrics = await live.call("GET", "/metrics")
        told = {**dict.fromkeys(FATES, 0), "trained": 5, "infra": 5, "discarded": 5}
        assert counted(metrics) == told, left
        page = metrics.body.decode()
        assert 'stenograph_session_outcomes_total{verdict="infra_failed"} 1.0' in page
        assert 'stenograph_session_outcomes_total{verdict="none"} 2.0' in page


@pytest.mark.parametrize("asleep", [False, True])
async def test_the_fates_of_a_session_that_expires_count_once(kept: Serve, asleep: bool) -> None:
    clock = ManualClock()
    async with kept(max_sessions=1, clock=clock) as live:
        session = await live.open(ttl_s=100)
        await conversation(live, session, turns=["four"])
        if asleep:
            await evicted(live, session)
        clock.advance(100)
        for _ in range(2):
            assert (await live.call("GET", f"/sessions/{session}")).status == 404
            live.manager.sessions.expire()
            await live.manager.sessions.expire_kept()
        assert counted(await live.call("GET", "/metrics"))["discarded"] == 5
        assert "stenograph_store_sessions_damaged_total 0.0" in (await live.call("GET", "/metrics")).body.decode()


async def test_whoever_wakes_a_session_that_is_being_deleted_finds_it_gone(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        session = await live.open()
        await conversation(live, session, turns=["one"])
        for _ in range(20):
            await evicted(live, session)
            calls = [("GET", ""), ("PUT", "/outcome"), ("DELETE", ""), ("PUT", "/outcome"), ("GET", "/outcome")]
            answers = await asyncio.gather(
                *(live.call(way, f"/sessions/{session}{path}", {} if way == "PUT" else None) for way, path in calls)
            )
            assert {answer.status for answer in answers} <= {200, 204, 404}
            assert answers[2].status == 204
            assert (await live.call("GET", f"/sessions/{session}")).status == 404
            assert not live.manager.sessions.has(session)
            session = await live.open()
            await conversation(live, session, turns=["one"])


async def test_an_echo_is_not_written(kept: Serve, folder: DataFolder) -> None:
    asked = {"role": "user", "content": "Look."}
    async with kept() as live:
        session = await live.open()
        live.says("one")
        path = f"/sessions/{session}/v1/responses"
        first = (await live.call("POST", path, {"input": [asked]})).json()
        echo = {"input": [asked, *first["output"]]}
        assert (await live.call("POST", path, echo)).json()["output"] == []
        before = await shown(live, session)
    raw = sqlite3.connect(folder.file())
    assert raw.execute("SELECT count(*) FROM rows").fetchone() == (1,)
    raw.close()
    async with kept() as live:
        assert (await live.call("POST", path, echo)).json()["output"] == []
        assert live.engine.requests == []
        assert await shown(live, session) == before


async def test_every_verdict_has_a_name_that_a_row_keeps(kept: Serve) -> None:
    for verdict in RolloutVerdict:
        async with kept() as live:
            session = await live.open()
            assert await put(live, session, verdict=verdict) == 200
        async with kept() as live:
            assert (await outcome(live, session))["verdict"] == verdict
