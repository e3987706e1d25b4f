"""Each sampled token has one fate, by session, group, step and cause, and the sums are what was sampled."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.outcome import TokenFate
from stenograph.core.types import Finish, FinishReason
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer

from .conftest import Live, running, user

FATES = dict.fromkeys(TokenFate, 0)
NUM_TOKENS = int(os.environ.get("ACCOUNT_TOKENS", "2000"))
"""Tokens sampled at least by the mixed run; a job asks for a million."""
PATIENT = aiohttp.ClientTimeout(total=None)
"""A client's own limit is 300 s, which beside other work says something of the machine alone."""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def accounts(live: Live, query: str = "") -> Any:
    answer = await live.call("GET", f"/accounts{query}")
    assert answer.status == 200, answer.body
    body = answer.json()
    rows = [body["whole"], *body["rows"]]
    assert all(row["sampled"] == sum(row["tokens"].values()) for row in rows)
    assert body["left_out"] or body["whole"]["sampled"] == sum(row["sampled"] for row in body["rows"])
    return body


async def rollout(live: Live, text: str, finish: Finish | None = None, **options: Any) -> tuple[str, int]:
    """A session of one turn, and how many tokens that has."""
    session = await live.open(**options)
    script = live.says(text, finish=finish)
    assert (await live.chat(session, user("a"))).status == 200
    return session, len(script.ids)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 -- nobody tells of it
        await asyncio.sleep(0)


async def hung_up(live: Live, session: str, num_tokens: int) -> None:
    """A chat whose client leaves after so many tokens."""
    num_before = len(live.engine.requests)
    live.says("a longer reply", paused=True)
    chat = asyncio.ensure_future(live.chat(session, user("gone")))
    await live.engine.begun(num_before + 1)
    live.engine.step(num_tokens)
    await until(lambda: live.manager.sessions.get(session).running[0].run.turns[0].meter.num_sampled == num_tokens)
    chat.cancel()
    await asyncio.wait({chat})
    await until(lambda: not live.manager.sessions.get(session).is_busy)


async def updated(live: Live, session: str, num_tokens: int, version: str) -> None:
    """A chat ended early by new weights, after so many tokens."""
    num_before = len(live.engine.requests)
    live.says("a longer reply", paused=True)
    chat = asyncio.ensure_future(live.chat(session, user("updated")))
    await live.engine.begun(num_before + 1)
    live.engine.step(num_tokens)
    await until(lambda: live.manager.sessions.get(session).running[0].run.turns[0].meter.num_sampled == num_tokens)
    answer = await live.call("POST", "/pause_generation", {"mode": "abort"})
    assert answer.status == 200, answer.body
    assert (await chat).status == 200
    assert (await live.call("POST", "/update_weight_version", {"new_version": version})).status == 200
    assert (await live.call("POST", "/continue_generation", {})).status == 200


async def test_each_sampled_token_has_one_fate_by_group_session_and_cause(live: Live) -> None:
    empty = await accounts(live)
    assert (empty["whole"], empty["rows"]) == ({"key": None, "sampled": 0, "tokens": FATES, "cost": None}, [])
    trained, num_trained = await rollout(live, "one", group="g")
    await live.call("POST", f"/sessions/{trained}/samples", {"format": "json"})
    failed, num_failed = await rollout(live, "fail", group="g")
    await live.call("PUT", f"/sessions/{failed}/outcome", {"verdict": "infra_failed"})
    _, num_idle = await rollout(live, "idle")
    linear, num_replaced = await rollout(live, "again", group="h", history="linear")
    new = len(live.says("new").ids)
    await live.chat(linear, user("a"), temperature=0.5)
    left = await live.open(group="h")
    await hung_up(live, left, 2)
    aborted = await live.open(group="h")
    await updated(live, aborted, 3, "2")
    before = await accounts(live)
    by_group = {row["key"]: row["tokens"] for row in before["rows"]}
    assert by_group["g"] == {**FATES, "trained": num_trained, "infra": num_failed}
    assert by_group[None] == {**FATES, "open": num_idle}
    assert by_group["h"] == {**FATES, "retry": num_replaced, "open": new + 3, "discarded": 2}
    assert (before["live_sessions"], before["ended_sessions"]) == (6, 0)
    by_session = {row["key"]: row["tokens"] for row in (await accounts(live, "?by=session"))["rows"]}
    assert by_session[left] == {**FATES, "discarded": 2}
    assert (await live.call("DELETE", "/sessions?group=g")).json() == {"deleted": 2, "claimed": 0}
    assert (await live.call("DELETE", "/sessions?group=h")).json() == {"deleted": 3, "claimed": 0}
    after = await accounts(live, "?group=g")
    assert [row["tokens"] for row in after["rows"]] == [by_group["g"]]
    assert (after["live_sessions"], after["ended_sessions"]) == (0, 2)
    (ended,) = (await accounts(live, "?group=h"))["rows"]
    assert ended["tokens"] == {**FATES, "retry": num_replaced, "discarded": new + 2, "aborted": 3}
    causes = {row["key"]: row["sampled"] for row in (await accounts(live, "?by=cause&group=h"))["rows"]}
    assert causes == {"replaced": num_replaced, "deleted": new, "client_left": 2, "update": 3}
    metrics = (await live.call("GET", "/metrics")).body.decode()
    assert f'stenograph_ended_session_tokens_total{{fate="infra"}} {num_failed}.0' in metrics
    for query in ("?state=idle", "?by=colour"):
        assert (await live.call("GET", f"/accounts{query}")).status == 400


async def test_why_names_the_cause_of_each_token_of_a_group(live: Live) -> None:
    session, num_kept = await rollout(live, "one", group="g")
    await hung_up(live, session, 2)
    answer = await live.call("GET", "/accounts/why?group=g")
    rows = [(row["session"], row["node"], row["fate"], row["cause"], row["tokens"]) for row in answer.json()["rows"]]
    assert rows == [
        (session, 0, "open", "", num_kept),
        (session, None, "discarded", "client_left", 2),
    ]
    assert (await live.call("GET", "/accounts/why")).status == 400


async def test_a_price_makes_a_cost(serve: Any) -> None:
    async with serve(token_price=2.0) as live:
        _, num_tokens = await rollout(live, "one", group="g")
        assert (await accounts(live))["whole"]["cost"] == num_tokens * 2.0 / 1e6


@asynccontextmanager
async def stored(folder: Path, renderer: Renderer, **settings: Any) -> AsyncIterator[Live]:
    """A server on a folder."""
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    with closing(DataFolder(folder, address="")) as held:
        async with (
            aclosing(await SqliteStore.open(held)) as store,
            running(engine, renderer, store=store, **settings) as (url, manager),
            aiohttp.ClientSession(timeout=PATIENT) as client,
        ):
            yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


async def test_the_accounts_of_sessions_outside_of_memory_are_as_they_are_now(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with stored(tmp_path, renderer) as live:
        session, num_tokens = await rollout(live, "one", group="g")
        live.manager.sessions.evict(100, 0)
        assert (await accounts(live))["whole"]["tokens"] == {**FATES, "open": num_tokens}
        assert (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).status == 200
        assert session not in live.manager.sessions
        assert (await accounts(live))["whole"]["tokens"] == {**FATES, "trained": num_tokens}
        rows = (await live.call("GET", "/accounts/why?group=g")).json()["rows"]
        assert [(row["node"], row["fate"]) for row in rows] == [(0, "trained")]


async def num_sampled(live: Live) -> int:
    """Tokens that the engine sampled for this server, by its metric."""
    text = (await live.call("GET", "/metrics")).body.decode()
    return int(float(text.split("\nstenograph_completion_tokens_total ", 1)[1].split("\n", 1)[0]))


class Mixed:
    """A fleet's day: sessions with every fault, in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sessions: list[str] = []
        self.version = 1

    async def act(self, live: Live) -> None:
        """Do one thing."""
        if not self.sessions or self.random.random() < 0.3:
            history = self.random.choice(["strands", "linear", "tree"])
            self.sessions.append(await live.open(group=self.random.choice(["g", "h"]), history=history))
        session, say = (
            self.random.choice(self.sessions),
            "x" * self.random.randint(1, 60 if NUM_TOKENS < 10**5 else 3000),
        )
        match self.random.randint(0, 9):
            case 0:
                ids = tuple(self.random.randint(10, 99) for _ in say)
                live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("the engine broke")))
                assert (await live.chat(session, user("e"))).status == 502
            case 1:
                await hung_up(live, session, self.random.randint(1, 5))
            case 2:
                self.version += 1
                await updated(live, session, self.random.randint(1, 5), str(self.version))
            case 3:
                await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})
            case 4:
                await live.call("PUT", f"/sessions/{session}/outcome", {"verdict": "infra_failed"})
            case 5:
                self.sessions.remove(session)
                assert (await live.call("DELETE", f"/sessions/{session}")).status == 204
            case 6:
                live.says(say, finish=Finish(reason=FinishReason.ABORT))
                await live.chat(session, user("ab"), tools=[TOOL])
            case 7:
                live.manager.sessions.evict(100, 0)
            case _:
                live.says(say)
                await live.chat(session, user(self.random.choice("abc")), temperature=self.random.random())


@pytest.mark.timeout(3600)  # for a lost wake-up: three seconds of CPU took two minutes beside other work
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_sums_are_what_was_sampled_whatever_fails(tmp_path: Path, renderer: Renderer, seed: int) -> None:
    """Over engine errors, hang-ups, updates, aborts, retries, evictions, deletions and restarts."""
    mixed, total = Mixed(seed), 0
    while total < NUM_TOKENS:
        async with stored(tmp_path, renderer, max_sessions=50) as live:
            for _ in range(40 if NUM_TOKENS < 10**5 else 400):
                await mixed.act(live)
            whole = [(await accounts(live, f"?by={by}"))["whole"] for by in ("group", "session", "step", "cause")]
            total += await num_sampled(live)
            assert whole[0]["sampled"] == total
            assert whole[1:] == whole[:-1]
            fates = Counter(whole[0]["tokens"])
    assert all(fates[fate] for fate in ("open", "retry", "discarded", "aborted", "infra")), fates
