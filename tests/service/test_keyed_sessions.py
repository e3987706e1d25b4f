"""`POST /sessions` that is repeated with its `Idempotency-Key` gets the same session, once and after a restart."""

import asyncio
from typing import Any

import pytest

from stenograph.session.keyed_sessions import MAX_KEYS, KeyedSessions
from stenograph.trajectory.commits import SessionOptions

from .conftest import Answer, Live
from .memory_store import MemoryStore
from .test_durable import Serve, conversation, folder, kept

pytestmark = pytest.mark.timeout(600)

__all__ = ["folder", "kept"]


async def opened(live: Live, body: Any = None, *, key: str = "k") -> Answer:
    return await live.call("POST", "/sessions", {} if body is None else body, idempotency_key=key)


async def test_a_repeat_gets_the_same_session_and_another_key_or_none_another(live: Live) -> None:
    answers = await asyncio.gather(*(opened(live, {"metadata": {"n": 1}}) for _ in range(5)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    ids = {answers[0].json()["session_id"], (await opened(live, key="other")).json()["session_id"]}
    assert len(ids | {await live.open(), await live.open()}) == 4
    assert live.manager.sessions.num_sessions == 4


async def test_another_body_with_the_key_is_422_until_the_session_is_gone(live: Live) -> None:
    session = (await opened(live)).json()["session_id"]
    refused = await opened(live, {"history": "tree"})
    assert (refused.status, refused.json()["error"]["code"]) == (422, "idempotency_mismatch")
    await live.call("DELETE", f"/sessions/{session}")
    again = await opened(live, {"history": "tree"})
    assert again.status == 200
    assert again.json()["session_id"] != session


async def test_an_opening_that_is_refused_leaves_its_key_free(live: Live) -> None:
    assert (await opened(live, {"history": "none"})).status == 400
    assert (await opened(live)).status == 200


async def test_after_an_eviction_and_a_restart_the_key_still_names_its_session(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        session = (await opened(live)).json()["session_id"]
        await conversation(live, session, turns=["one"])
        await live.open()
        assert not live.manager.sessions.has(session)
        answers = await asyncio.gather(*(opened(live) for _ in range(3)), *(opened(live, key="new") for _ in range(3)))
        assert [answer.json()["session_id"] for answer in answers[:3]] == [session] * 3
        assert len({answer.body for answer in answers[3:]}) == 1
    async with kept() as live:
        assert (await opened(live)).json()["session_id"] == session
        assert (await opened(live, {"ttl_s": 5})).status == 422
        assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1
        await live.call("DELETE", f"/sessions/{session}")
        assert (await opened(live, {"ttl_s": 5})).status == 200
    async with kept() as live:
        assert (await opened(live)).status == 422


async def test_the_keys_of_sessions_that_are_gone_are_forgotten(live: Live) -> None:
    keyed = KeyedSessions(live.manager)
    for number in range(3 * MAX_KEYS):
        session = await keyed.open(SessionOptions(), key=str(number), body=b"")
        await live.manager.delete(session)
    assert keyed.num_keys <= MAX_KEYS + 1


async def test_a_store_in_memory_knows_the_keys_too(serve: Serve) -> None:
    async with serve(store=MemoryStore(), max_sessions=1) as live:
        session = (await opened(live)).json()["session_id"]
        await live.open()
        assert (await opened(live)).json()["session_id"] == session
