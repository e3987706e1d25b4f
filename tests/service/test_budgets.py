"""Budgets of a session hold whatever comes at once, and a client that has spent one is told so that it ends."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.chat import ChatRequest
from stenograph.core.errors import BudgetSpent, SessionBusy
from stenograph.core.kinds import WORK_KINDS
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.stated_options import OverLimit, StatedOptions
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.offload.pool import CpuPool
from stenograph.session.admission import Limits
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices
from stenograph.session.session import Session
from stenograph.session.side_rules import SHIPPED_RULES, read_kind_rules
from stenograph.session.watch import Watch
from stenograph.store.database import FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import SessionOptions

from .conftest import END, Answer, Live, assistant, begun, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TITLE = {"role": "system", "content": "You are a title generator. Write a title."}
"""Begins a request that a shipped rule says to be a title's."""


def spent(answer: Answer) -> bool:
    """Whether a request was refused for a budget."""
    if answer.status == 200:
        return False
    assert (answer.status, answer.json()["error"]["code"]) == (400, "limit_exceeded"), answer.body
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    return True


async def ledger(live: Live, session: str) -> list[dict[str, Any]]:
    return list((await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"])


async def num_turns_by_kind(live: Live, session: str) -> Counter[str]:
    rows = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]
    found: Counter[str] = Counter()
    for row in rows:
        found[row["kind"]] += row["num_turns"]
    return found


@pytest.mark.parametrize("at_once", [True, False])
async def test_six_conversations_that_begin_otherwise_get_the_one_turn_that_there_is(live: Live, at_once: bool) -> None:
    session = await live.open(max_turns=1)
    for _ in range(6):
        live.says("x", paused=at_once)
    asks = [live.chat(session, user(f"question {n}"), tools=[TOOL]) for n in range(6)]
    if not at_once:
        answers = [await one for one in asks]
    else:
        running_ = [asyncio.ensure_future(one) for one in asks]
        await asyncio.wait(running_, return_when=asyncio.FIRST_COMPLETED)
        live.engine.step(100)
        answers = await asyncio.gather(*running_)
    assert [spent(answer) for answer in answers].count(False) == 1
    assert len(live.engine.requests) == 1


async def test_side_requests_run_on_when_the_work_has_its_turns_until_requests_are_counted(live: Live) -> None:
    for options, is_title_spent in (({}, False), ({"max_requests": 1}, True)):
        session = await live.open(max_turns=1, **options)
        live.says("one")
        assert not spent(await live.chat(session, user("hi"), tools=[TOOL]))
        assert spent(await live.chat(session, user("hi"), assistant("one"), user("more"), tools=[TOOL]))
        assert spent(await live.chat(session, user("no tools, no rule")))
        live.says("a title")
        assert spent(await live.chat(session, TITLE, user("hi"))) is is_title_spent


async def test_a_request_without_tools_that_came_first_takes_no_turn_from_the_work(live: Live) -> None:
    session = await live.open(max_turns=1)
    live.says("a name for it")
    assert not spent(await live.chat(session, user("Name this chat.")))
    live.says("one")
    assert not spent(await live.chat(session, user("hi"), tools=[TOOL]))
    live.says("another")
    more = [user("Name this chat."), assistant("a name for it"), user("Another.")]
    assert not spent(await live.chat(session, *more))
    assert await num_turns_by_kind(live, session) == {"auxiliary": 2, "main": 1}


async def test_a_turn_that_fails_gives_its_place_back_and_a_retry_takes_none(live: Live) -> None:
    session = await live.open(max_requests=1)
    live.engine.plan(Script(ids=(5,), finish=None))
    assert (await live.chat(session, user("hi"))).status == 502
    live.says("x", paused=True)
    body = {"messages": [user("hi")]}
    path = f"/sessions/{session}/v1/chat/completions"
    asks = [asyncio.ensure_future(live.call("POST", path, body, idempotency_key="k")) for _ in range(3)]
    await live.engine.begun(2)
    live.engine.step(10)
    assert {(await one).body for one in asks} == {(await live.call("POST", path, body, idempotency_key="k")).body}
    assert spent(await live.chat(session, user("hi")))  # a turn that would be replaced was sampled too
    assert len(live.engine.requests) == 2


async def test_a_refused_conversation_leaves_nothing_behind(live: Live) -> None:
    session = await live.open(max_requests=1)
    live.says("x")
    await live.chat(session, user("hi"))
    strands = live.manager.sessions.get(session).strands
    before = dict(vars(strands)["_by_key"])
    for number in range(20):
        assert spent(await live.chat(session, user(f"other {number}")))
    assert vars(strands)["_by_key"] == before


STOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", {"messages": [user("b")]}),
    "completion": ("v1/completions", {"prompt": "b"}),
    "completions": ("v1/completions", {"prompt": ["b", "c"]}),
    "messages": ("v1/messages", {"model": "m", "max_tokens": 9, "messages": [user("b")]}),
    "responses": ("v1/responses", {"model": "m", "input": "b"}),
    "gemini": ("v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "b"}]}]}),
}
ENDS: dict[str, tuple[bytes, bytes]] = {
    "chat": (b'"finish_reason":"stop"', b"data: [DONE]"),
    "completion": (b'"finish_reason":"stop"', b"data: [DONE]"),
    "completions": (b'"finish_reason":"stop"', b"data: [DONE]"),
    "messages": (b'"stop_reason":"end_turn"', b"event: message_stop"),
    "responses": (b'"status":"completed"', b"event: response.completed"),
    "gemini": (b'"finishReason":"STOP"', b'"finishReason":"STOP"'),
}


async def assert_stopped(live: Live, session: str, name: str, *, stream: bool, limit: str) -> None:
    """Ask a session for what it has no budget for: nothing is sampled, and nothing but the ledger tells of it."""
    before = (await live.call("GET", f"/sessions/{session}")).json()
    path, body = STOPS[name]
    if stream and name == "gemini":
        path = path.replace("generateContent", "streamGenerateContent?alt=sse")
    elif stream:
        body = {**body, "stream": True}
    answer = await live.call("POST", f"/sessions/{session}/{path}", body)
    assert answer.status == 200, answer.body
    for mark in ENDS[name][: 2 if stream else 1]:
        assert mark in answer.body
    assert len(live.engine.requests) == 1
    after = (await live.call("GET", f"/sessions/{session}")).json()
    assert after == before
    row = (await ledger(live, session))[-1]
    found = (row["status"], row["error"], row["turn"], row["sampled_tokens"], row["prompt_tokens"])
    assert found == (200, "limit_exceeded", None, 0, 0)
    page = (await live.call("GET", "/metrics")).body.decode()
    assert f'stenograph_limits_total{{limit="{limit}"}} 1' in page
    assert live.manager.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("budget", [{"max_turns": 1}, {"max_requests": 1}, {"max_total_tokens": 20}])
async def test_a_stop_is_an_empty_reply_that_ends_as_the_protocol_ends_one(
    live: Live, budget: dict[str, int], name: str, stream: bool
) -> None:
    session = await live.open(**budget, over_limit="stop")
    live.engine.plan(Script(ids=tuple([5] * 19), finish=Finish(reason=FinishReason.LENGTH)))
    assert (await live.call("POST", f"/sessions/{session}/v1/completions", {"prompt": [5]})).status == 200
    limit = {"max_turns": "turns", "max_requests": "requests", "max_total_tokens": "tokens"}[next(iter(budget))]
    await assert_stopped(live, session, name, stream=stream, limit=f"session_{limit}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", STOPS)
async def test_one_strand_too_many_is_stopped_too_and_the_others_go_on(serve: Serve, name: str, stream: bool) -> None:
    async with serve(max_strands=1) as live:
        session = await live.open(over_limit="stop")
        live.says("a")
        assert (await live.chat(session, user("hi"))).status == 200
        strands = live.manager.sessions.get(session).strands
        before = dict(vars(strands)["_by_key"])
        await assert_stopped(live, session, name, stream=stream, limit="strands")
        assert vars(strands)["_by_key"] == before
        live.says("more")
        assert (await live.chat(session, user("hi"), assistant("a"), user("more"))).status == 200


async def test_a_prompt_for_which_no_tokens_are_left_is_stopped_too(live: Live) -> None:
    session = await live.open(max_total_tokens=5, over_limit="stop")
    for stream in (False, True):
        answer = await live.chat(session, user("hi"), stream=stream)
        assert answer.status == 200
        assert answer.headers["x-stenograph-session-remaining-tokens"] == "0"
    assert live.engine.requests == []


async def test_budgets_survive_a_restart(serve: Serve, tmp_path: Path) -> None:
    session = ""
    for is_again in (False, True):
        with closing(DataFolder(tmp_path / "data", address="")) as folder:
            store = await SqliteStore.open(folder, connect=FileConnection)
            async with aclosing(store), serve(store=store) as live:
                session = session or await live.open(max_requests=2, over_limit="stop")
                for text in () if is_again else ("a", "b"):
                    live.says(text)
                    assert (await live.chat(session, user("hi"))).status == 200  # the second replaces the first
                assert (await live.chat(session, user("hi"))).status == 200
                assert len(live.engine.requests) == (0 if is_again else 2)


class Ask(NamedTuple):
    """A request of a conversation: one of its opening, or one that goes on. A rule says whether it is a title's."""

    number: int
    has_tools: bool
    is_title: bool
    goes_on: bool
    fails: bool


ASKS = st.builds(Ask, st.integers(0, 3), st.booleans(), st.booleans(), st.booleans(), st.booleans())


@pytest.mark.timeout(600)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budgets=st.builds(
        StatedOptions,
        max_turns=st.none() | st.integers(1, 4),
        max_requests=st.none() | st.integers(1, 5),
        over_limit=st.sampled_from(OverLimit),
    ),
    bursts=st.lists(st.lists(ASKS, min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_no_burst_of_requests_gets_more_than_there_is(
    renderer: Renderer, budgets: StatedOptions, bursts: list[list[Ask]]
) -> None:
    seeds = itertools.count(1)
    lines: dict[tuple[int, bool, bool], tuple[Message, ...]] = {}

    async def scenario() -> None:
        engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
        pool = CpuPool(1)
        rules = read_kind_rules(SHIPPED_RULES)
        services = TurnServices(
            engine=engine, renderer=renderer, pool=pool, clock=ManualClock(), timeout_s=None, kind_rules=rules
        )
        manager = SessionManager(services=services, limits=Limits(max_sessions=1, max_in_flight=99))
        session = manager.sessions.create(SessionOptions(stated=budgets))
        try:
            for burst in bursts:
                watches = [watch for ask in burst if (watch := begin(engine, manager, session, ask)) is not None]
                num_waiting = sum(one.run.may_yet_commit and not one.task.done() for one in session.running)
                check(session, num_waiting)
                while any(not task.task.done() for task in session.running):
                    engine.step(9)
                    await asyncio.sleep(0)
                for watch in watches:
                    watch.leave()
                check(session, 0)
        finally:
            pool.close()

    def begin(engine: ScriptedEngine, manager: SessionManager, session: Session, ask: Ask) -> Watch | None:
        seed = next(seeds)
        ids = tuple(renderer.tokenizer.encode("x"))
        done = Finish(reason=FinishReason.STOP, matched=END)
        engine.plan_for(seed, Script(ids=(*ids, END), finish=None if ask.fails else done, paused=True))
        key = ask.number, ask.has_tools, ask.is_title
        title = (Message(role=Role.SYSTEM, content=TITLE["content"]),) if ask.is_title else ()
        opening = (*title, Message(role=Role.USER, content=f"question {ask.number}"))
        line = lines.get(key, opening) if ask.goes_on else opening
        lines[key] = (*line, Message(role=Role.ASSISTANT, content="x"), Message(role=Role.USER, content="more"))
        tools = (Tool(name="look", json=json.dumps(TOOL)),) if ask.has_tools else ()
        try:
            return begun(manager, session, ChatRequest(messages=line, tools=tools, params=SamplingParams(seed=seed)))
        except (BudgetSpent, SessionBusy):
            return None

    def check(session: Session, num_running: int) -> None:
        strands = session.strands
        pairs = zip(strands.kept, strands.kinds(), strict=True)
        num_work = sum(len(strand.history.nodes) for strand, kind in pairs if kind in WORK_KINDS)
        assert budgets.max_turns is None or num_work <= budgets.max_turns
        num_sampled = strands.num_turns + strands.discarded.num_turns
        assert budgets.max_requests is None or num_sampled + num_running <= budgets.max_requests

    asyncio.run(scenario())
