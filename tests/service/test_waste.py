"""What became of each sampled token is counted, by group and in all."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.outcome import TokenFate
from stenograph.core.types import Finish, FinishReason
from stenograph.core.waste import WasteCounts

from .conftest import Live, user

FATES = {**dict.fromkeys(TokenFate, 0), "wasted": 0}


async def waste(live: Live, query: str = "") -> Any:
    answer = await live.call("GET", f"/waste{query}")
    assert answer.status == 200, answer.body
    return answer.json()


async def rollout(live: Live, text: str, finish: Finish | None = None, **options: Any) -> tuple[str, int]:
    """A session of one turn, and how many tokens that has."""
    session = await live.open(**options)
    script = live.says(text, finish=finish)
    assert (await live.chat(session, user("a"))).status == 200
    return session, len(script.ids)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 -- nobody tells of it
        await asyncio.sleep(0)


async def test_each_sampled_token_is_counted_once_by_what_became_of_it_and_by_group(live: Live) -> None:
    assert await waste(live) == {"live_sessions": 0, "ended_sessions": 0, "tokens": FATES, "groups": []}
    trained, num_trained = await rollout(live, "one", group="g")
    await live.call("POST", f"/sessions/{trained}/samples", {"format": "json"})
    failed, num_failed = await rollout(live, "fail", group="g")
    await live.call("PUT", f"/sessions/{failed}/outcome", {"verdict": "infra_failed"})
    _, num_aborted = await rollout(live, "ab", Finish(reason=FinishReason.ABORT), group="h")
    _, num_idle = await rollout(live, "idle")
    linear, num_replaced = await rollout(live, "again", group="h", history="linear")
    live.says("new")
    await live.chat(linear, user("a"), temperature=0.5)
    left = await live.open(group="h")
    live.says("wasted", paused=True)
    chat = asyncio.ensure_future(live.chat(left, user("a")))
    await live.engine.begun(7)
    live.engine.step(2)
    await until(lambda: live.manager.sessions.get(left).running[0].run.turns[0].meter.num_sampled == 2)
    chat.cancel()
    await asyncio.wait({chat})
    await until(lambda: not live.manager.sessions.get(left).is_busy)
    before = await waste(live)
    by_group = {row["group"]: row["tokens"] for row in before["groups"]}
    assert by_group["g"] == {**FATES, "trained": num_trained, "infra_failed": num_failed}
    assert by_group[None] == {**FATES, "untrained": num_idle}
    new = by_group["h"]["untrained"]
    assert by_group["h"] == {
        **FATES, "aborted": num_aborted, "discarded": num_replaced, "untrained": new, "wasted": 2,
    }  # fmt: skip
    assert before["tokens"] == {fate: sum(tokens[fate] for tokens in by_group.values()) for fate in FATES}
    assert (before["live_sessions"], before["ended_sessions"]) == (6, 0)
    assert (await live.call("DELETE", "/sessions?group=g")).json() == {"deleted": 2}
    after = await waste(live, "?group=g")
    (row,) = after["groups"]
    assert (row["tokens"], row["ended_sessions"], row["live_sessions"]) == (by_group["g"], 2, 0)
    assert (await waste(live))["tokens"] == before["tokens"]
    metrics = (await live.call("GET", "/metrics")).body.decode()
    assert f'stenograph_ended_session_tokens_total{{fate="infra_failed"}} {num_failed}.0' in metrics
    assert "stenograph_wasted_tokens_total 2.0" in metrics
    assert (await live.call("GET", "/waste?state=idle")).status == 400


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30))
def test_counts_of_forgotten_groups_are_not_lost(events: list[tuple[int, int]]) -> None:
    counts, total = WasteCounts(max_groups=4), 0
    for at in range(4):
        counts.turn_wasted(f"old-{at}", 1)
    for group, num_tokens in events:
        counts.turn_wasted(f"new-{group}", num_tokens)
        counts.session_ended(f"new-{group}", {TokenFate.TRAINED: num_tokens})
        total += num_tokens
    assert sum(one.num_wasted for one in counts.groups.values()) == 4 + total
    assert sum(one.num_tokens[TokenFate.TRAINED] for one in counts.groups.values()) == total
    assert len(counts.groups) <= 5
