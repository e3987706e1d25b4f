"""A claim holds its sessions: until the receipt or the end of the lease they do not expire, are not deleted and take no
turns, so that what was claimed is what is trained."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.accounts import claims
from stenograph.core.errors import SessionClaimed, StorageUnavailable
from stenograph.session import stale
from stenograph.text.renderer import Renderer

from .conftest import Live, user
from .test_accounts import accounts, rollout
from .test_claims import claim, ended, receipt, stored
from .workers_kit import two_workers

Serve = Callable[..., AbstractAsyncContextManager[Live]]


@asynccontextmanager
async def kept(how: str, serve: Serve, folder: Path, renderer: Renderer, clock: ManualClock) -> AsyncIterator[Live]:
    """A server with its sessions in memory, or also on disk."""
    async with serve(clock=clock) if how == "memory" else stored(folder, renderer, clock) as live:
        yield live


def let_go(live: Live, how: str) -> None:
    """Keep the sessions in the store alone, if that is how they are kept."""
    if how == "evicted":
        live.manager.sessions.evict(100, 0)


async def swept(live: Live) -> None:
    """Drop what has expired, as the server does now and then."""
    live.manager.sessions.expire()
    await live.manager.sessions.expire_kept()


KEPT = pytest.mark.parametrize("how", ["memory", "disk", "evicted"])


@KEPT
async def test_a_claimed_session_is_neither_deleted_nor_goes_on(
    serve: Serve, tmp_path: Path, renderer: Renderer, how: str
) -> None:
    clock = ManualClock()
    async with kept(how, serve, tmp_path, renderer, clock) as live:
        one, num_one = await ended(live, "one", group="g")
        mine = await claim(live, step=3, lease_s=60)
        let_go(live, how)
        refused = await live.call("DELETE", f"/sessions/{one}")
        assert (refused.status, refused.json()["error"]["code"]) == (409, "session_claimed")
        assert "claimed the session, for 60 s" in refused.json()["error"]["message"]
        chat = await live.chat(one, user("more"))
        assert (chat.status, chat.json()["error"]["code"]) == (409, "session_claimed")
        let_go(live, how)
        assert (await live.call("DELETE", "/sessions?group=g")).json() == {"deleted": 0, "claimed": 1}
        given = await live.call("POST", "/samples", {"sessions": [one], "delete": True})
        assert b'"deleted":0' in given.body
        assert (await live.call("POST", "/abandon", {"sessions": [one]})).json() == {"abandoned": []}
        let_go(live, how)
        assert (await receipt(live, mine["claim"], one))["tokens"] == num_one
        assert (await live.call("DELETE", f"/sessions/{one}")).status == 204, "its trainer has had it"
        assert (await accounts(live))["whole"]["tokens"]["trained"] == num_one


async def test_a_claimed_session_is_found_beside_a_deletion_that_is_refused(
    serve: Serve, tmp_path: Path, renderer: Renderer
) -> None:
    async with kept("evicted", serve, tmp_path, renderer, ManualClock()) as live:
        one, _ = await ended(live, "one")
        await claim(live)
        let_go(live, "evicted")
        found, deleted = asyncio.create_task(live.manager.sessions.wake(one)), live.manager.delete(one)
        await asyncio.sleep(0)  # it is being read
        with pytest.raises(SessionClaimed):
            await deleted
        assert (await found).id == one


@KEPT
@pytest.mark.parametrize("path", ["/sessions/{}?force=true", "/sessions?group=g&force=true"])
async def test_a_claimed_session_is_deleted_by_force(
    serve: Serve, tmp_path: Path, renderer: Renderer, how: str, path: str
) -> None:
    async with kept(how, serve, tmp_path, renderer, ManualClock()) as live:
        one, num_one = await ended(live, "one", group="g")
        mine = await claim(live)
        let_go(live, how)
        assert (await live.call("DELETE", path.format(one))).status in (200, 204)
        assert (await live.call("GET", f"/sessions/{one}")).status == 404
        assert (await receipt(live, mine["claim"], one))["lost"] == [one]
        assert (await accounts(live))["whole"]["tokens"]["discarded"] == num_one
        for wrong in ("/sessions/{}?force=maybe", "/sessions?group=g&force=1"):
            assert (await live.call("DELETE", wrong.format(one))).status == 400


@KEPT
async def test_the_time_to_live_of_a_claimed_session_begins_again_after_its_lease(
    serve: Serve, tmp_path: Path, renderer: Renderer, how: str
) -> None:
    clock = ManualClock()
    async with kept(how, serve, tmp_path, renderer, clock) as live:
        one, num_one = await ended(live, "one", ttl_s=10)
        trained, num_trained = await ended(live, "trained", ttl_s=10)
        mine = await claim(live, lease_s=60)
        let_go(live, how)
        clock.advance(50)
        await swept(live)
        assert (await live.call("GET", f"/sessions/{one}")).status == 200, "the lease holds it"
        assert (await receipt(live, mine["claim"], trained))["tokens"] == num_trained
        let_go(live, how)
        clock.advance(11)
        await swept(live)
        assert (await live.call("GET", f"/sessions/{trained}")).status == 404, "its time began at the receipt"
        assert (await live.call("GET", f"/sessions/{one}")).status == 200, "its time began at the end of the lease"
        clock.advance(10)
        await swept(live)
        assert (await live.call("GET", f"/sessions/{one}")).status == 404
        tokens = (await accounts(live))["whole"]["tokens"]
        assert (tokens["trained"], tokens["discarded"]) == (num_trained, num_one)


async def test_a_restart_does_not_end_the_hold_of_a_claim(tmp_path: Path, renderer: Renderer) -> None:
    clock = ManualClock()
    async with stored(tmp_path, renderer, clock) as live:
        one, _ = await ended(live, "one", ttl_s=10)
        mine = await claim(live, lease_s=60)
    clock.advance(59)
    async with stored(tmp_path, renderer, clock) as live:
        await swept(live)
        assert (await live.call("DELETE", f"/sessions/{one}")).status == 409
        assert (await live.chat(one, user("more"))).status == 409
        clock.advance(2)
        live.says("the lease is over: it goes on")
        assert (await live.chat(one, user("more"))).status == 200
        assert (await receipt(live, mine["claim"], one))["trained"] == [one], "nobody else has claimed it"


async def test_a_claim_that_is_extended_keeps_its_step_and_its_limit(live: Live) -> None:
    one, _ = await ended(live, "a long reply to be cut")
    num_prompt = len(live.engine.requests[0].prompt.ids)
    mine = await claim(live, step=3, max_seq_len=num_prompt + 2)
    again = await claim(live, step=3, claim=mine["claim"], sessions=[one])
    assert again["sessions"] == [one]
    other = await live.call("POST", "/samples/claim", {"step": 4, "n": 1, "claim": mine["claim"], "sessions": [one]})
    assert (other.status, other.json()["error"]["param"]) == (400, "/step")
    assert (await receipt(live, mine["claim"], one))["tokens"] == 2
    (row,) = [row for row in (await accounts(live, "?by=step"))["rows"] if row["key"] is not None]
    assert row["key"] == 3


@KEPT
async def test_a_late_receipt_trains_the_turns_that_were_claimed(
    serve: Serve, tmp_path: Path, renderer: Renderer, how: str
) -> None:
    """A turn taken after the lease's end was in no sample of the trainer's."""
    clock = ManualClock()
    async with kept(how, serve, tmp_path, renderer, clock) as live:
        one, num_one = await ended(live, "one", group="g")
        two, num_two = await ended(live, "two", group="g")
        mine = await claim(live, lease_s=60)
        clock.advance(61)
        later = live.says("taken after the end of the lease")
        assert (await live.chat(one, user("a"), {"role": "assistant", "content": "one"}, user("go on"))).status == 200
        let_go(live, how)
        late = await receipt(live, mine["claim"], one)
        assert (late["trained"], late["tokens"]) == ([one], num_one)
        causes = {row["key"]: row["sampled"] for row in (await accounts(live, "?by=cause"))["rows"]}
        assert causes == {"receipt": num_one, "after_claim": len(later.ids), "claimed": num_two}
        again = await claim(live, claim=mine["claim"], sessions=[two])
        assert again["sessions"] == [two]
        assert (await receipt(live, mine["claim"], two))["tokens"] == num_two


async def test_an_extension_after_the_leases_end_adds_no_turn_to_the_claim(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock) as live:
        one, num_one = await ended(live, "one")
        mine = await claim(live, lease_s=60)
        clock.advance(61)
        live.says("taken after the end of the lease")
        assert (await live.chat(one, user("a"), {"role": "assistant", "content": "one"}, user("go on"))).status == 200
        assert (await claim(live, claim=mine["claim"], sessions=[one], lease_s=60))["sessions"] == [one]
        assert (await receipt(live, mine["claim"], one))["tokens"] == num_one


async def test_a_reward_of_a_turn_sent_again_does_not_keep_a_receipt_from_the_others(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock) as live:
        one, _ = await ended(live, "one")
        two, num_two = await ended(live, "two")
        credit = {"reward": 1.0, "turns": [{"turn": 0, "reward": 0.5}]}
        assert (await live.call("PUT", f"/sessions/{one}/outcome", credit)).status == 200
        mine = await claim(live, lease_s=60)
        clock.advance(61)
        live.says("taken again")
        assert (await live.chat(one, user("a"))).status == 200
        late = await receipt(live, mine["claim"], one, two)
        assert (late["lost"], late["tokens"]) == ([], num_two)
        assert (await claim(live))["sessions"] == []


async def test_a_receipt_that_the_store_refuses_leaves_the_time_to_live_alone(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with stored(tmp_path, renderer, clock) as live:
        one, _ = await ended(live, "one", ttl_s=100)
        mine = await claim(live, lease_s=10)
        clock.advance(50)
        session, storage = live.manager.sessions.get(one), live.manager.sessions.storage
        before = session.last_chat, session.held_until
        assert storage is not None
        monkeypatch.setattr(storage.store, "append", _refuse)
        answer = await live.call("POST", "/samples/receipt", {"claim": mine["claim"], "trained": [one]})
        assert answer.status == 503
        assert (session.last_chat, session.held_until) == before


def _refuse(*_: object, done: Callable[[Exception], None], **__: object) -> None:
    done(StorageUnavailable("the disk is full", is_full=True))


async def test_an_extension_abandons_nothing_for_its_age(serve: Serve) -> None:
    async with serve(max_staleness=1, weight_version="7") as live:
        one, num_one = await ended(live, "one")
        mine = await claim(live)
        for version in ("8", "9"):
            assert (await live.call("POST", "/update_weight_version", {"new_version": version})).status == 200
        assert (await claim(live, claim=mine["claim"], sessions=[one]))["sessions"] == [one]
        assert (await receipt(live, mine["claim"], one))["tokens"] == num_one


async def test_each_worker_holds_what_is_claimed(tmp_path: Path, renderer: Renderer) -> None:
    async with two_workers(tmp_path, renderer) as workers:
        sessions = [await ended(live, "one", group="g") for live in workers.lives]
        ids = [one for one, _ in sessions]
        mine = await claim(workers.lives[0], step=3)
        assert sorted(mine["sessions"]) == sorted(ids)
        for live in workers.lives:
            for one in ids:
                assert (await live.call("DELETE", f"/sessions/{one}")).status == 409
                body = {"step": 4, "n": 1, "claim": mine["claim"], "sessions": [one]}
                refused = await live.call("POST", "/samples/claim", body)
                assert (refused.status, refused.json()["error"]["param"]) == (400, "/step")
            assert (await live.call("DELETE", "/sessions?group=g")).json() == {"deleted": 0, "claimed": 2}
        assert len((await receipt(workers.lives[1], mine["claim"], ids[0]))["trained"]) == 1
        deleted = (await workers.lives[1].call("DELETE", "/sessions?group=g")).json()
        assert deleted == {"deleted": 1, "claimed": 1}
        forced = (await workers.lives[0].call("DELETE", "/sessions?group=g&force=true")).json()
        assert forced == {"deleted": 1, "claimed": 0}


async def test_sessions_beyond_any_claim_are_remembered_up_to_a_bound(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_OVER", 2)
    seen = list[claims.ClaimRoutes]()
    note = claims.ClaimRoutes._note_over

    def noted(self: claims.ClaimRoutes, session_id: str) -> None:
        note(self, session_id)
        seen.append(self)

    monkeypatch.setattr(claims.ClaimRoutes, "_note_over", noted)
    ids = [(await ended(live, "one"))[0] for _ in range(4)]
    mine = await claim(live)
    assert (await receipt(live, mine["claim"], *ids))["trained"] == ids
    assert (await claim(live))["sessions"] == [], "those forgotten are looked at again"
    assert {len(one.over) for one in seen} <= {1, 2}


async def test_a_change_of_weights_looks_for_stale_sessions_in_pieces(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looked at in an iteration of its own here; one that was held then is found by its next claim."""
    monkeypatch.setattr(stale, "LOOKED_AT_TURNS", 1)
    async with serve(max_staleness=0, weight_version="7") as live:
        ids = [(await rollout(live, "old"))[0] for _ in range(5)]
        live.manager.weights.begin_change()
        live.manager.weights.end_change("8")
        waiting = [live.manager.sessions.get(one).refusal is None for one in ids]
        assert waiting == [False, True, True, True, True]
        await asyncio.sleep(0)
        assert [live.manager.sessions.get(one).refusal is None for one in ids] == [False, False, True, True, True]
        for _ in ids:
            await asyncio.sleep(0)
        assert all(live.manager.sessions.get(one).refusal is not None for one in ids)
        refused: Any = (await live.chat(ids[-1], user("a"))).json()
        assert refused["error"]["code"] == "session_abandoned"
