"""Limits, each with its error and its metric; sessions that expire; matchers and credentials that a session has."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script
from stenograph.core.errors import StartupError, UpstreamUnreachable
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason
from stenograph.session import sessions
from stenograph.trajectory.matching import load_matcher

from .conftest import Answer, Live, assistant, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def metric(live: Live, line: str) -> str:
    page = (await live.call("GET", "/metrics")).body.decode()
    return next((row.rsplit(" ", 1)[1] for row in page.splitlines() if row.startswith(line)), "absent")


async def assert_refused(live: Live, answer: Answer, limit: str, *, retry: str) -> None:
    assert (answer.status, answer.json()["error"]["code"]) == (429 if retry == "true" else 400, "limit_exceeded")
    assert answer.headers["x-should-retry"] == retry
    assert ("retry-after" in answer.headers) == (retry == "true")
    assert await metric(live, f'stenograph_limits_total{{limit="{limit}"}}') == "1.0"
    assert await metric(live, 'stenograph_errors_total{code="limit_exceeded"}') == "1.0"


async def test_a_session_has_its_turns_and_no_more(live: Live) -> None:
    session = await live.open(max_turns=1)
    live.says("a")
    assert (await live.chat(session, user("hi"))).status == 200
    await assert_refused(live, await live.chat(session, user("hi")), "session_turns", retry="false")
    assert len(live.engine.requests) == 1


async def test_a_session_has_its_tokens_and_no_more(live: Live) -> None:
    live.says("a")
    num_prompt = (await live.chat(None, user("hi"))).json()["usage"]["prompt_tokens"]
    session = await live.open(max_total_tokens=num_prompt + 2)
    live.says("a")
    assert (await live.chat(session, user("hi"))).status == 200
    assert live.engine.requests[-1].params.max_tokens == 2
    answer = await live.chat(session, user("hi"), assistant("a"), user("more"))
    await assert_refused(live, answer, "session_tokens", retry="false")
    live.says("b", finish=Finish(reason=FinishReason.LENGTH))
    assert (await live.chat(await live.open(max_total_tokens=num_prompt + 1), user("hi"), max_tokens=9)).status == 200
    assert live.engine.requests[-1].params.max_tokens == 1


async def test_turns_side_by_side_may_each_sample_what_the_kept_ones_leave(live: Live) -> None:
    session = await live.open(max_total_tokens=100)
    asks = []
    for text in ("hi", "hi there"):
        live.says("a", paused=True)
        asks.append(asyncio.ensure_future(live.chat(session, user(text))))
        await live.engine.begun(len(asks))
    live.engine.step(10)
    assert [(await ask).status for ask in asks] == [200, 200]
    assert [one.prompt.num_tokens + (one.params.max_tokens or 0) for one in live.engine.requests] == [100, 100]


async def test_a_prompt_that_the_session_has_no_tokens_for_is_refused_before_the_engine_is_asked(live: Live) -> None:
    answer = await live.chat(await live.open(max_total_tokens=5), user("hi"))
    await assert_refused(live, answer, "session_tokens", retry="false")
    assert live.engine.requests == []


async def test_a_session_with_all_its_strands_goes_on_with_them_and_opens_none(serve: Serve) -> None:
    async with serve(max_strands=2) as live:
        session = await live.open()
        live.says("a")
        live.says("b", paused=True)
        assert (await live.chat(session, user("hi"))).status == 200
        running = asyncio.ensure_future(live.chat(session, user("side")))
        await live.engine.begun(2)
        answer = await live.chat(session, user("other"))
        await assert_refused(live, answer, "strands", retry="false")
        assert answer.json()["error"]["message"] == (
            "This session has had 2 of its 2 strands (--max-strands), and this request would open another one: its"
            " messages go on with none of them. Raise --max-strands, or open another session."
        )
        live.engine.step(10)
        assert (await running).status == 200
        fork = await live.chat(session, user("hi"), assistant("another reply"), user("more"))
        assert (fork.status, fork.json()["error"]["code"]) == (400, "limit_exceeded"), "a fork is a strand"
        live.says("c")
        assert (await live.chat(session, user("hi"), assistant("a"), user("more"))).status == 200
        ids = json.dumps({"prompt": [5, 6, 7]}).encode()
        assert (await live.call("POST", f"/sessions/{session}/v1/completions", ids)).status == 400
        assert len(live.engine.requests) == 3
        for kind in ("linear", "tree"):
            other = await live.open(history=kind)
            for text in ("x", "y", "z"):  # the limit is that of strands
                live.says(text)
                assert (await live.chat(other, user(text))).status == 200


async def test_to_count_a_prompt_beside_the_turn_that_opens_its_strand_makes_no_room(serve: Serve) -> None:
    async with serve(max_strands=1) as live:
        session = await live.open()
        live.says("a", paused=True)
        running = asyncio.ensure_future(live.chat(session, user("hi")))
        await live.engine.begun(1)
        body = {"model": "m", "messages": [user("hi")]}
        counted = await live.call("POST", f"/sessions/{session}/v1/messages/count_tokens", body)
        assert counted.status == 200
        await assert_refused(live, await live.chat(session, user("other")), "strands", retry="false")
        live.engine.step(10)
        assert (await running).status == 200
        assert len((await live.call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]) == 1


async def test_a_refused_or_failed_request_leaves_its_strand_to_others(serve: Serve) -> None:
    async with serve(max_strands=1) as live:
        session = await live.open()
        for _ in range(3):
            live.engine.plan(Script(ids=(5,), error=UpstreamUnreachable("the engine has ended")))
            assert (await live.chat(session, user("hi"))).status == 502
        live.says("a")
        assert (await live.chat(session, user("another"))).status == 200


async def test_a_full_tree_refuses_before_the_engine_is_asked_and_running_turns_count(serve: Serve) -> None:
    async with serve(max_nodes=2) as live:
        session = await live.open(history="tree")
        live.says("a")
        live.says("b", paused=True)
        assert (await live.chat(session, user("hi"))).status == 200
        running = asyncio.ensure_future(live.chat(session, user("side")))
        await live.engine.begun(2)
        await assert_refused(live, await live.chat(session, user("other")), "nodes", retry="false")
        live.engine.step(10)
        assert (await running).status == 200
        assert len(live.engine.requests) == 2
        linear = await live.open(history="linear")
        for text in ("x", "y", "z"):  # the limit is a tree's
            live.says(text)
            assert (await live.chat(linear, user(text))).status == 200


async def test_all_sessions_together_hold_so_many_tokens_and_deleting_gives_them_back(serve: Serve) -> None:
    async with serve(max_held_tokens=5) as live:
        session = await live.open()
        live.says("a")
        assert (await live.chat(session, user("hi"))).status == 200
        await assert_refused(live, await live.chat(await live.open(), user("hi")), "held_tokens", retry="true")
        await live.call("DELETE", f"/sessions/{session}")
        live.says("b")
        assert (await live.chat(await live.open(), user("hi"))).status == 200


async def test_sessions_turns_in_flight_and_bodies_are_limited(serve: Serve) -> None:
    async with serve(max_sessions=1, max_in_flight=1, max_body_bytes=1024) as live:
        session = await live.open()
        refused = await live.call("POST", "/sessions")
        assert (refused.status, refused.headers["retry-after"]) == (429, "5")
        live.says("a", paused=True)
        running = asyncio.ensure_future(live.chat(session, user("hi")))
        await live.engine.begun(1)
        refused = await live.chat(None, user("stateless"))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        large = await live.chat(session, user("x" * 2000))
        assert (large.status, large.json()["error"]["code"]) == (413, "body_too_large")
        live.engine.step(10)
        assert (await running).status == 200
        for limit in ("sessions", "in_flight", "body_bytes"):
            assert await metric(live, f'stenograph_limits_total{{limit="{limit}"}}') == "1.0"


async def test_a_session_expires_when_it_has_had_no_chat_for_its_ttl(serve: Serve) -> None:
    clock = ManualClock()
    async with serve(clock=clock, session_ttl_s=100.0) as live:
        short, default = await live.open(ttl_s=10), await live.open()
        live.says("a", paused=True)
        running = asyncio.ensure_future(live.chat(short, user("hi")))
        await live.engine.begun(1)
        clock.advance(50.0)  # a running turn keeps its session
        assert (await live.call("GET", f"/sessions/{short}")).status == 200
        live.engine.step(10)
        assert (await running).status == 200
        clock.advance(9.0)
        assert (await live.call("GET", f"/sessions/{short}")).status == 200  # looking at it is no chat
        clock.advance(1.0)
        assert (await live.chat(short, user("hi"))).status == 404
        assert (await live.call("GET", f"/sessions/{default}")).status == 200
        clock.advance(40.0)
        assert live.manager.sessions.expire() == 1
        assert (await live.call("GET", "/sessions")).json()["sessions"] == []
        assert await metric(live, 'stenograph_sessions_ended_total{end="expired"}') == "2.0"


async def test_many_sessions_that_expire_together_go_a_few_at_a_time_and_none_is_found_meanwhile(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "FORGOTTEN_TURNS", 4)
    clock = ManualClock()
    async with serve(clock=clock, session_ttl_s=10.0) as live:
        opened = [await live.open() for _ in range(5)]
        for session in opened:
            live.says("a")
            assert (await live.chat(session, user("hi"))).status == 200
        clock.advance(10.0)
        assert live.manager.sessions.expire() == 2  # a session counts as its turn and one more
        assert live.manager.sessions.num_sessions == 3
        assert (await live.call("GET", "/sessions")).json()["sessions"] == []
        assert (await live.call("GET", f"/sessions/{opened[-1]}")).status == 404
        while live.manager.sessions.expire():
            pass
        assert live.manager.sessions.num_sessions == 0
        assert await metric(live, 'stenograph_sessions_ended_total{end="expired"}') == "5.0"


async def test_a_matcher_at_a_dotted_path_is_the_servers_to_name(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "their_matchers.py").write_text(
        "class FirstLetter:\n"
        "    def matches(self, stored, given):\n"
        "        return (stored.content or ' ')[0] == (given.content or ' ')[0]\n"
        "def same_role(stored, given):\n"
        "    return stored.role is given.role\n"
        "nothing = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with serve(matcher="their_matchers.FirstLetter") as live:
        session = await live.open(history="linear")
        live.says("Paris")
        await live.chat(session, user("hi"))
        live.says("more")
        answer = await live.chat(session, user("hello"), assistant("Prague"), user("and?"))
        assert answer.status == 200
        view = (await live.call("GET", f"/sessions/{session}")).json()
        assert view["records"][1]["request"]["messages"][0]["content"] == "hi"  # the stored spelling wins
        for name in ("their_matchers.same_role", "os.system"):
            refused = await live.call("POST", "/sessions", {"matcher": name})
            assert (refused.status, refused.json()["error"]["param"]) == (400, "/matcher")
        assert (await live.call("POST", "/sessions", {"matcher": "their_matchers.FirstLetter"})).status == 200
    assert load_matcher("their_matchers.same_role").matches(
        Message(role=Role.USER, content="a"), Message(role=Role.USER, content="b")
    )
    for name in ("nonsense", "no.such.module", "their_matchers.nothing", "their_matchers.missing"):
        with pytest.raises(StartupError, match=name):
            load_matcher(name)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer {id}"},
        {"x_api_key": "{id}"},
        {"authorization": "Bearer dummy", "x_api_key": "{id}"},
        {"authorization": "Bearer {id}", "x_api_key": "dummy"},
        {"x_session_id": "{id}", "authorization": "Bearer dummy"},
    ],
)
async def test_a_session_is_named_by_any_credential_that_is_one(live: Live, headers: dict[str, str]) -> None:
    session = await live.open()
    live.says("a")
    named = {name: value.format(id=session) for name, value in headers.items()}
    answer = await live.call("POST", "/v1/chat/completions", {"messages": [user("hi")]}, **named)
    assert answer.status == 200
    assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1


async def test_either_credential_may_be_the_servers_key(serve: Serve) -> None:
    async with serve(api_key=("key",)) as live:
        for headers in ({"authorization": "Bearer wrong", "x_api_key": "key"}, {"authorization": "Bearer key"}):
            assert (await live.call("GET", "/v1/models", **headers)).status == 200
        assert (await live.call("GET", "/v1/models", authorization="Bearer wrong", x_api_key="no")).status == 401
        assert (await live.call("GET", "/metrics")).status == 200


async def test_404_comes_before_what_is_wrong_with_a_request(live: Live) -> None:
    for method, path, body in (
        ("POST", "/sessions/nope/samples", {"format": "x"}),
        ("GET", "/sessions/nope?records=x", None),
        ("POST", "/sessions/nope/abort", {"junk": 1}),
        ("GET", "/sessions/nope/drift", None),
        ("POST", "/sessions/nope/v1/chat/completions", b"{{{"),
    ):
        answer = await live.call(method, path, body)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found"), path
    assert (await live.call("GET", "/v1/models", x_session_id="nope")).status == 404
    session = await live.open()
    for method, path, body in (
        ("POST", f"/sessions/{session}/abort", {"junk": 1}),
        ("POST", f"/sessions/{session}/abort", b"{{{"),
        ("GET", f"/sessions/{session}?record=full", None),
        ("GET", "/sessions?limt=3", None),
    ):
        assert (await live.call(method, path, body)).status == 400, path
    assert (await live.call("POST", f"/sessions/{session}/abort", {})).json() == {"aborted": 0}


async def test_a_record_holds_what_the_engine_was_asked_with(live: Live) -> None:
    session = await live.open(chat_template_kwargs={"a": 1})
    live.says("ok")
    await live.chat(session, user("hi"), user="me", chat_template_kwargs={"b": 2}, temperature=0.5)
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    asked, parameters = live.engine.requests[0], record["request"]["parameters"]
    assert parameters["sampling_params"]["max_tokens"] == asked.params.max_tokens is not None
    assert parameters["sampling_params"]["temperature"] == 0.5
    assert parameters["chat_template_kwargs"] == {"a": 1, "b": 2}
    assert parameters["recorded"] == {"user": "me"}
    assert record["request"]["input_ids"] == list(asked.prompt.ids)


async def test_a_stream_carries_the_prompts_ids_in_its_first_event(live: Live) -> None:
    script = live.says("Hello")
    answer = await live.chat(await live.open(), user("hi"), stream=True, return_token_ids=True)
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["prompt_token_ids"] == list(live.engine.requests[0].prompt.ids)
    drawn = [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice.get("token_ids", ())]
    assert drawn == list(script.ids)


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_a_record_has_the_clients_sampling_fields_by_the_clients_names(live: Live, route: str) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": "zzz", "logit_bias": {"5": 1.0}}
    sampling |= {"presence_penalty": 0.5, "stop_token_ids": [9]}
    sampling |= {"max_completion_tokens": 50, "reasoning_effort": "low"} if "chat" in route else {"max_tokens": 50}
    asked = {"messages": [user("hi")]} if "chat" in route else {"prompt": "hi"}
    session = await live.open()
    live.says("ok")
    answer = await live.call("POST", f"/sessions/{session}/v1/{route}", {**asked, **sampling, "min_p": None})
    assert answer.status == 200, answer.body
    for wanted in ("full", "delta"):
        (record,) = (await live.call("GET", f"/sessions/{session}?records={wanted}")).json()["records"]
        ours = {"messages", "input_ids", "tools", "parameters", "num_kept_ids", "num_kept_messages"}
        assert {name: value for name, value in record["request"].items() if name not in ours} == sampling
        assert "sent" not in record["request"]["parameters"]
