"""A session's samples are trained once: claims are leases, receipts are durable, and nobody's tokens are let go of."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import ScriptedEngine
from stenograph.cli.main import main
from stenograph.client.claims import SampleReceipt
from stenograph.client.sync import SyncClient
from stenograph.dialects.sessions import MAX_LISTED
from stenograph.offload.pool import CpuPool
from stenograph.session.session import Session
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer

from .conftest import Live, running, user
from .test_accounts import accounts, rollout, until

Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def ended(live: Live, text: str = "done", **options: Any) -> tuple[str, int]:
    """A session with an outcome, and its sampled tokens."""
    session, num_tokens = await rollout(live, text, **options)
    assert (await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0})).status == 200
    return session, num_tokens


async def claim(live: Live, step: int = 1, n: int = 10, **fields: Any) -> Any:
    answer = await live.call("POST", "/samples/claim", {"step": step, "n": n, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


async def receipt(live: Live, claim_id: str, *trained: str, **fields: Any) -> Any:
    answer = await live.call("POST", "/samples/receipt", {"claim": claim_id, "trained": trained, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


async def test_a_sample_is_trained_once_and_counted_by_its_step(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock) as live:
        one, num_one = await ended(live, "one", group="g")
        two, num_two = await ended(live, "another", group="g")
        running_still, _ = await rollout(live, "no outcome", group="g")
        failed, _ = await rollout(live, "failed", group="g")
        await live.call("PUT", f"/sessions/{failed}/outcome", {"verdict": "infra_failed"})
        first = await claim(live, step=3, lease_s=60)
        assert (first["sessions"], first["step"], first["until"]) == ([one, two], 3, clock.wall() + 60)
        assert (await claim(live, step=3))["sessions"] == [], "they are claimed"
        assert (await live.call("POST", "/samples", {"sessions": [one]})).status == 200
        tokens = (await accounts(live, "?by=cause"))["whole"]["tokens"]
        assert (tokens["trained"], running_still != one) == (0, True), "to be read is not to be trained"
        assert await receipt(live, first["claim"], one) == {
            "trained": [one], "tokens": num_one, "left_out": [], "lost": []
        }  # fmt: skip
        assert (await receipt(live, first["claim"], one))["trained"] == [one], "the same word again"
        clock.advance(61)
        second = await claim(live, step=4)
        assert second["sessions"] == [two], "the first trainer died: its samples come back"
        assert (await receipt(live, first["claim"], two))["lost"] == [two]
        assert (await receipt(live, second["claim"], two))["tokens"] == num_two
        by_step = {row["key"]: row["tokens"]["trained"] for row in (await accounts(live, "?by=step"))["rows"]}
        assert by_step == {3: num_one, 4: num_two, None: 0}
        assert (await claim(live))["sessions"] == []


async def test_what_a_trainer_leaves_out_is_discarded_and_what_it_cuts_is_cut(live: Live) -> None:
    one, num_one = await ended(live, "a long reply to be cut", group="g")
    two, num_two = await ended(live, "left", group="g")
    num_prompt = len(live.engine.requests[0].prompt.ids)
    mine = await claim(live, max_seq_len=num_prompt + 3)
    told = await receipt(live, mine["claim"], one, left_out=[two])
    assert told == {"trained": [one], "tokens": 3, "left_out": [two], "lost": []}
    tokens = (await accounts(live))["whole"]["tokens"]
    assert (tokens["trained"], tokens["cut"], tokens["discarded"]) == (3, num_one - 3, num_two)


async def test_a_decided_group_ends_its_other_rollouts(live: Live) -> None:
    await ended(live, "one", group="g")
    late = await live.open(group="g")
    assert (await live.call("POST", "/abandon", {"group": "g", "first": 2})).json() == {"abandoned": []}
    await ended(live, "two", group="g")
    live.says("never to be read", paused=True)
    chat = asyncio.ensure_future(live.chat(late, user("a")))
    await live.engine.begun(3)
    live.engine.step(2)
    await until(lambda: live.manager.sessions.get(late).running[0].run.turns[0].meter.num_sampled == 2)
    assert (await live.call("POST", "/abandon", {"group": "g", "first": 2})).json() == {"abandoned": [late]}
    answer = await chat
    assert (answer.status, answer.json()["error"]["code"]) == (410, "session_abandoned")
    later = await live.chat(late, user("b"))
    assert later.status == 410
    assert "its group is decided without it" in later.json()["error"]["message"]
    await until(lambda: not live.manager.sessions.get(late).is_busy)
    causes = {row["key"]: row["sampled"] for row in (await accounts(live, "?by=cause"))["rows"]}
    assert causes["decided"] == 2
    assert (await claim(live, sessions=[late]))["sessions"] == []


async def test_a_session_too_many_versions_behind_is_abandoned_at_the_update(serve: Serve) -> None:
    async with serve(max_staleness=1, weight_version="7") as live:
        old, num_old = await rollout(live, "old", group="g")
        assert (await live.call("POST", "/update_weight_version", {"new_version": "8"})).status == 200
        new, _ = await rollout(live, "new", group="g")
        assert (await live.chat(old, user("a"), user("b"))).status != 410
        assert (await live.call("POST", "/update_weight_version", {"new_version": "9"})).status == 200
        live.says("on it goes")
        assert (await live.chat(new, user("c"))).status == 200
        answer = await live.chat(old, user("d"))
        assert (answer.status, answer.json()["error"]["code"]) == (410, "session_abandoned")
        assert (await accounts(live))["whole"]["tokens"]["stale"] >= num_old


@asynccontextmanager
async def stored(folder: Path, renderer: Renderer, clock: ManualClock, pool: CpuPool | None = None) -> Any:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    with closing(DataFolder(folder, address="")) as held:
        async with (
            aclosing(await SqliteStore.open(held)) as store,
            running(engine, renderer, store=store, clock=clock, pool=pool) as (url, manager),
            aiohttp.ClientSession() as client,
        ):
            yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


async def test_claims_receipts_and_abandonments_survive_a_restart(tmp_path: Path, renderer: Renderer) -> None:
    clock = ManualClock()
    async with stored(tmp_path, renderer, clock) as live:
        one, num_one = await ended(live, "one")
        two, num_two = await ended(live, "two")
        gone, num_gone = await rollout(live, "gone")
        mine = await claim(live, step=5, lease_s=60)
        assert (await receipt(live, mine["claim"], one))["trained"] == [one]
        assert (await live.call("POST", "/abandon", {"sessions": [gone]})).json() == {"abandoned": [gone]}
    async with stored(tmp_path, renderer, clock) as live:
        assert (await live.chat(gone, user("a"))).status == 410
        assert (await claim(live))["sessions"] == []
        assert (await receipt(live, mine["claim"], two))["trained"] == [two]
        tokens = (await accounts(live, "?by=step"))["whole"]["tokens"]
        assert (tokens["trained"], tokens["discarded"]) == (num_one + num_two, num_gone)
        assert (await live.call("DELETE", f"/sessions/{one}")).status == 204
        rows = (await accounts(live, "?by=step"))["rows"]
        assert {row["key"]: row["tokens"]["trained"] for row in rows} == {5: num_one + num_two, None: 0}


class HeldPool(CpuPool):
    """A pool that lets one work wait: the next one after `is_next_held`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.is_next_held = False
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def run(self, work: Callable[[], Any], *, num_bytes: int) -> Any:
        if self.is_next_held:
            self.is_next_held = False
            self.asked.set()
            await self.goes_on.wait()
        return await super().run(work, num_bytes=num_bytes)


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_receipt_harms_no_session_that_left_memory_meanwhile(
    tmp_path: Path, renderer: Renderer, is_deleted: bool
) -> None:
    pool = HeldPool()
    async with stored(tmp_path, renderer, ManualClock(), pool=pool) as live:
        one, num_tokens = await ended(live, "one")
        mine = await claim(live)
        pool.is_next_held = True
        told = asyncio.ensure_future(receipt(live, mine["claim"], one))
        await pool.asked.wait()
        if is_deleted:
            assert (await live.call("DELETE", f"/sessions/{one}?force=true")).status == 204
        else:
            live.manager.sessions.evict(100, 0)
            assert (await live.call("PUT", f"/sessions/{one}/outcome", {"reward": 2.0})).status == 200
        pool.goes_on.set()
        assert (await told)["lost"] == ([one] if is_deleted else [])
        assert live.manager.sessions.storage is not None
        assert live.manager.sessions.storage.store.failure is None
    with closing(sqlite3.connect(tmp_path / "00.sqlite3")) as raw:
        orphans = raw.execute("SELECT count(*) FROM rows WHERE session NOT IN (SELECT number FROM sessions)")
        assert orphans.fetchone() == (0,)
    async with stored(tmp_path, renderer, ManualClock()) as live:
        tokens = (await accounts(live))["whole"]["tokens"]
        assert tokens["discarded" if is_deleted else "trained"] == num_tokens


async def test_a_damaged_session_keeps_no_other_from_a_trainer(tmp_path: Path, renderer: Renderer) -> None:
    async with stored(tmp_path, renderer, ManualClock()) as live:
        damaged, _ = await ended(live, "one")
        whole, num_tokens = await ended(live, "two")
    with closing(sqlite3.connect(tmp_path / "00.sqlite3", isolation_level=None)) as raw:
        raw.execute("UPDATE rows SET digest = zeroblob(length(digest)) WHERE session = 1 AND seq = 1")
    async with stored(tmp_path, renderer, ManualClock()) as live:
        mine = await claim(live)
        assert mine["sessions"] == [whole]
        told = await receipt(live, mine["claim"], damaged, whole)
        assert (told["trained"], told["lost"]) == ([whole], [damaged])
        assert (await accounts(live))["whole"]["tokens"]["trained"] == num_tokens


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/samples/claim", "sessions", {"step": 1, "n": 1}),
        ("/samples/receipt", "trained", {"claim": "c"}),
        ("/abandon", "sessions", {}),
    ],
)
async def test_as_many_ids_as_a_request_may_have_leave_the_loop_to_others(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, field: str, fields: dict[str, Any]
) -> None:
    sessions, looked_at, num_turns = live.manager.sessions, set[int](), 0
    wake = sessions.wake

    async def seen(session_id: str) -> Session:
        looked_at.add(num_turns)
        return await wake(session_id)

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    monkeypatch.setattr(sessions, "wake", seen)
    counting = asyncio.ensure_future(count())
    answer = await live.call("POST", path, {field: [f"{num:032x}" for num in range(MAX_LISTED)], **fields})
    counting.cancel()
    assert answer.status == 200
    assert len(looked_at) >= MAX_LISTED / 100


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/samples/claim", {"step": 1, "n": 0}, "/n"),
        ("/samples/claim", {"step": 1, "n": 1, "group": "g", "sessions": []}, "/group"),
        ("/samples/receipt", {"claim": "c", "trained": ["a"], "left_out": ["a"]}, "/left_out"),
        ("/abandon", {}, "/sessions"),
        ("/abandon", None, "/sessions"),
        ("/abandon", {"sessions": [], "first": 1}, "/first"),
        ("/abandon", {"group": "g", "cause": "bored"}, "/cause"),
    ],
)
async def test_a_request_that_means_nothing_is_refused(live: Live, path: str, body: Any, param: str) -> None:
    answer = await live.call("POST", path, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_a_client_claims_trains_and_counts(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    one, num_one = await ended(live, "one", group="g")
    two, num_two = await ended(live, "two", group="g")
    open_still, num_open = await rollout(live, "open", group="g")

    def trained() -> tuple[SampleReceipt, int, list[dict[str, object]]]:
        with SyncClient(live.url) as client:
            mine = client.claim(7, 2, lease_s=60)
            assert (mine.step, mine.sessions) == (7, (one, two))
            assert [len(client.claimed_samples(mine, session).samples) for session in mine.sessions] == [1, 1]
            told = client.receipt(mine, [one], left_out=[two])
            return told, client.abandon("g", first=2), client.accounts(by="step")

    told, num_abandoned, (told_all,) = await asyncio.to_thread(trained)
    assert (told.trained, told.left_out, told.lost, told.tokens) == ((one,), (two,), (), num_one)
    assert num_abandoned == 1, open_still
    assert cast("dict[str, Any]", told_all)["whole"]["tokens"]["discarded"] == num_two + num_open
    assert await asyncio.to_thread(main, ["accounts", live.url, "--by", "step"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "sampled", "trained", "discarded"]
    assert lines[-1].split() == ["in", "all", str(num_one + num_two + num_open), str(num_one), str(num_two + num_open)]
