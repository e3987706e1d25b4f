"""`GET /accounts` is of one moment: while sessions end, expire or are being deleted, each token counts once. What the
store does not take is counted all the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from standins.clock import ManualClock
from stenograph.accounts import merging
from stenograph.core.errors import StorageUnavailable
from stenograph.text.renderer import Renderer

from .conftest import Live, user
from .memory_store import MemoryStore
from .test_accounts import accounts, rollout, until
from .test_claims import stored

Serve = Callable[..., AbstractAsyncContextManager[Live]]
KEPT = pytest.mark.parametrize("how", ["memory", "disk", "evicted"])


@asynccontextmanager
async def kept(how: str, serve: Serve, folder: Path, renderer: Renderer, clock: ManualClock) -> AsyncIterator[Live]:
    async with serve(clock=clock) if how == "memory" else stored(folder, renderer, clock) as live:
        yield live


@KEPT
async def test_the_sums_balance_at_each_moment_of_many_deletions(
    serve: Serve, tmp_path: Path, renderer: Renderer, how: str
) -> None:
    async with kept(how, serve, tmp_path, renderer, ManualClock()) as live:
        made = [await rollout(live, "x" * (num % 7 + 1), group="g") for num in range(120)]
        total = sum(num for _, num in made)
        if how == "evicted":
            live.manager.sessions.evict(1000, 0)
        deletions = asyncio.gather(*(live.call("DELETE", f"/sessions/{one}") for one, _ in made[::2]))
        seen = set[tuple[int, int]]()
        while not deletions.done():
            for by in ("group", "session"):
                told = await accounts(live, f"?by={by}")
                seen.add((told["whole"]["sampled"], told["live_sessions"] + told["ended_sessions"]))
        assert [one.status for one in await deletions] == [204] * 60
        assert seen == {(total, 120)}


@KEPT
async def test_a_session_that_expired_or_is_being_deleted_is_counted(
    serve: Serve, tmp_path: Path, renderer: Renderer, how: str
) -> None:
    clock = ManualClock()
    async with kept(how, serve, tmp_path, renderer, clock) as live:
        _, num_expired = await rollout(live, "expired", ttl_s=10)
        closing, num_closing = await rollout(live, "closing")
        if how == "evicted":
            live.manager.sessions.evict(100, 0)
        clock.advance(11)
        live.says("its engine does not end it", paused=True)
        chat = asyncio.ensure_future(live.chat(closing, user("more")))
        await live.engine.begun(3)
        deletion = asyncio.ensure_future(live.call("DELETE", f"/sessions/{closing}"))
        await until(lambda: closing in live.manager.sessions and not live.manager.sessions.has(closing))
        assert (await accounts(live))["whole"]["sampled"] == num_expired + num_closing
        assert (await deletion).status == 204
        await chat
        assert (await accounts(live))["whole"]["sampled"] == num_expired + num_closing


async def test_a_failed_turn_whose_entry_the_store_does_not_take_is_counted(serve: Serve) -> None:
    store = MemoryStore()
    async with serve(store=store) as live:
        session, num_kept = await rollout(live, "kept", group="g")
        store.refuse = StorageUnavailable("full", is_full=True)
        lost = len(live.says("lost").ids)
        assert (await live.chat(session, user("a"), user("b"))).status == 503
        live.manager.sessions.evict(100, 0)
        assert session not in live.manager.sessions
        told = await accounts(live, "?by=cause")
        assert {row["key"]: row["sampled"] for row in told["rows"]} == {"": num_kept, "storage_unavailable": lost}
        store.refuse = None
        assert (await live.call("DELETE", f"/sessions/{session}")).status == 204
        told = await accounts(live, "?by=cause")
        assert {row["key"]: row["sampled"] for row in told["rows"]} == {
            "deleted": num_kept,
            "storage_unavailable": lost,
        }


def test_the_rows_of_workers_are_sorted_and_cut_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(key: str | None, num: int) -> dict[str, Any]:
        return {"key": key, "sampled": num, "tokens": {"open": num}, "cost": None}

    def body(left_out: int, **rows: int) -> bytes:
        whole, shown = row(None, sum(rows.values())), [row(key, num) for key, num in rows.items()]
        return msgspec.json.encode(
            {"by": "group", "live_sessions": 1, "ended_sessions": 0, "whole": whole, "rows": shown,
             "left_out": left_out}
        )  # fmt: skip

    monkeypatch.setattr(merging, "MAX_ROWS", 2)
    told = msgspec.json.decode(merging.accounts([body(1, a=1, b=5), body(0, c=9, a=3)]))
    assert [(one["key"], one["sampled"]) for one in told["rows"]] == [("c", 9), ("b", 5)]
    assert (told["left_out"], told["whole"]["sampled"]) == (2, 18)
