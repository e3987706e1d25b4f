"""The strands of a session: conversations with other openings run side by side, and none loses a turn to another."""

import asyncio
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, assistant, output_ids, running, user
from .test_delivery import ask, lose_reply

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
TITLE = [{"role": "system", "content": "Write a title."}, user("1+2?")]


async def told(live: Live, session: str, query: str = "") -> Any:
    answer = await live.call("GET", f"/sessions/{session}{query}")
    assert answer.status == 200, answer.body
    return answer.json()


async def samples_of(live: Live, session: str, **fields: Any) -> Any:
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", **fields})
    assert answer.status == 200, answer.body
    return answer.json()


def contents(live: Live, session: str) -> list[tuple[str | None, int]]:
    """The reply of each turn, and its depth."""
    return [(node.turn.reply.message.content, node.depth) for node in live.manager.sessions.get(session).nodes]


async def agent_and_title(live: Live) -> tuple[str, dict[str, int]]:
    """A session with a main strand of two turns, a title between them and a sub-agent after: tokens sampled by each."""
    session = await live.open()
    messages = [SYSTEM, user("1+2?")]
    scripts = [live.says(text) for text in ("I add.", "A sum", "3", "a sub-agent's")]
    assert (await live.chat(session, *messages, tools=[ADD])).status == 200
    assert (await live.chat(session, *TITLE)).status == 200
    messages += [assistant("I add."), user("and?")]
    assert (await live.chat(session, *messages, tools=[ADD])).status == 200
    assert (await live.chat(session, SYSTEM, user("look it up"), tools=[ADD])).status == 200
    first, title, second, agent = (len(script.ids) for script in scripts)
    return session, {"main": first + second, "auxiliary": title, "unknown": agent}


async def test_a_request_that_adds_a_message_before_the_first_reply_has_another_opening(live: Live) -> None:
    session = await live.open()
    live.says("main")
    await live.chat(session, user("do it"))
    live.says("a title")
    assert (await live.chat(session, user("do it"), user("write a title"))).status == 200
    live.says("done")
    assert (await live.chat(session, user("do it"), assistant("main"), user("more"))).status == 200
    assert contents(live, session) == [("main", 1), ("a title", 1), ("done", 2)]


@pytest.mark.parametrize("first_to_end", ["main", "title"])
async def test_a_title_request_beside_the_main_turn_is_served_and_both_turns_are_kept(
    live: Live, first_to_end: str
) -> None:
    session = await live.open()
    scripts = {"main": live.says("three", paused=True), "title": live.says("A sum", paused=True)}
    main = asyncio.ensure_future(live.chat(session, SYSTEM, user("1+2?"), tools=[ADD]))
    await live.engine.begun(1)
    title = asyncio.ensure_future(live.chat(session, *TITLE))
    await live.engine.begun(2)
    order = [("main", main, 0), ("title", title, 1)]
    for name, asking, index in order if first_to_end == "main" else order[::-1]:
        live.engine.step_turn(live.engine.requests[index].request_id, len(scripts[name].ids) + 1)
        assert (await asking).status == 200
    live.says("four")
    answer = await live.chat(session, SYSTEM, user("1+2?"), assistant("three"), user("1+3?"), tools=[ADD])
    assert answer.status == 200, answer.body
    assert sorted(contents(live, session)) == [("A sum", 1), ("four", 2), ("three", 1)]
    assert (await told(live, session))["metadata"]["discarded"] == {"turns": 0, "sampled_tokens": 0}


async def test_a_title_between_two_turns_takes_nothing_from_the_main_line(live: Live) -> None:
    session, _ = await agent_and_title(live)
    assert contents(live, session) == [("I add.", 1), ("A sum", 1), ("3", 2), ("a sub-agent's", 1)]
    first, _, second, _ = live.engine.requests
    line = [*first.prompt.ids, *live.manager.sessions.get(session).nodes[0].turn.sampled.ids]
    assert list(second.prompt.ids) != line
    third = live.engine.requests[2].prompt.ids
    assert list(third[: len(line)]) == line


async def test_the_same_title_asked_again_replaces_the_title_and_nothing_else(live: Live) -> None:
    session, _ = await agent_and_title(live)
    live.says("A better one")
    assert (await live.chat(session, *TITLE)).status == 200
    assert contents(live, session) == [("I add.", 1), ("3", 2), ("a sub-agent's", 1), ("A better one", 1)]
    assert (await told(live, session))["metadata"]["discarded"]["turns"] == 1


async def test_a_second_request_of_the_same_opening_is_refused_while_the_first_runs_and_reaches_no_engine(
    live: Live,
) -> None:
    session = await live.open()
    script = live.says("one", paused=True)
    asking = asyncio.ensure_future(live.chat(session, SYSTEM, user("look it up")))
    await live.engine.begun(1)
    refused = await live.chat(session, SYSTEM, user("look it up"))
    assert (refused.status, refused.json()["error"]["code"]) == (409, "session_busy")
    assert refused.headers["x-should-retry"] == "false"
    assert "linear" not in refused.json()["error"]["message"]
    assert len(live.engine.requests) == 1
    live.says("two")
    assert (await live.chat(session, SYSTEM, user("look it up"), tools=[ADD])).status == 200, "another opening"
    live.engine.step_turn(live.engine.requests[0].request_id, len(script.ids) + 1)
    assert (await asking).status == 200
    live.says("three")
    assert (await live.chat(session, SYSTEM, user("look it up"), assistant("one"), user("on"))).status == 200
    assert contents(live, session) == [("two", 1), ("one", 1), ("three", 2)]


async def test_a_request_that_failed_leaves_no_strand(live: Live) -> None:
    session = await live.open()
    assert (await live.chat(session, user("hi"), max_tokens=10**6)).status == 400
    assert (await told(live, session))["metadata"]["strands"] == []
    live.says("one")
    assert (await live.chat(session, user("hi"))).status == 200
    assert [row["strand"] for row in (await told(live, session))["metadata"]["strands"]] == [0]


async def test_a_reply_that_nobody_read_is_given_again_after_a_title_was_committed(renderer: Renderer) -> None:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=2**22)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        session = await live.open()
        path = f"/sessions/{session}/v1/chat/completions"
        # Its reply has the prompt's ids, and fits into no buffer of a socket.
        body = {"messages": [user("\x00" * 2_500_000)], "return_token_ids": True}
        live.says("three")
        await lose_reply(live, path, body)
        live.says("A title")
        assert (await live.chat(session, *TITLE)).status == 200
        again = await ask(live, path, body, x_stainless_retry_count="1")
        assert again.json()["choices"][0]["message"]["content"] == "three"
        assert len(again.body) > 10_000_000
        assert len(engine.requests) == 2
        live.says("another")
        other = await ask(live, path, body, x_stainless_retry_count="1")
        assert other.json()["choices"][0]["message"]["content"] == "another", "once read it is delivered"


async def test_a_session_shows_its_main_line_and_each_strand_by_its_number(live: Live) -> None:
    session, _ = await agent_and_title(live)
    nodes = live.manager.sessions.get(session).nodes
    view = await told(live, session)
    rows = view["metadata"]["strands"]
    shown = [(row["strand"], row["kind"], row["num_turns"], row["leaf"]) for row in rows]
    assert shown == [
        (0, "main", 2, nodes[2].id),
        (1, "auxiliary", 1, nodes[1].id),
        (2, "unknown", 1, nodes[3].id),
    ]
    assert sum(row["num_tokens"] for row in rows) == sum(node.turn.num_tokens for node in nodes)
    lines = {None: [0, 2], 0: [0, 2], 1: [1], 2: [3]}
    for number, line in lines.items():
        view = await told(live, session, "" if number is None else f"?strand={number}")
        assert [output_ids(record) for record in view["records"]] == [list(nodes[i].turn.sampled.ids) for i in line]
        assert view["metadata"]["accumulated_token_ids"][-1] == nodes[line[-1]].turn.sampled.ids[-1]
        assert [row["id"] for row in view["metadata"]["tree"]["nodes"]] == [node.id for node in nodes]
    for wrong in ("3", "-1", "x", "", "1e0", "9" * 50):
        refused = await live.call("GET", f"/sessions/{session}?strand={wrong}")
        assert (refused.status, refused.json()["error"]["param"]) == (400, "/strand"), wrong


async def test_samples_are_of_the_kinds_that_are_asked_for_and_say_what_they_leave_out(live: Live) -> None:
    session, drawn = await agent_and_title(live)

    def kinds_in(made: Any) -> dict[str, int]:
        return {sample["metadata"]["kind"]: sum(sample["loss_mask"]) for sample in made["samples"]}

    def left_out(*kinds: str) -> dict[str, Any]:
        return {kind: {"strands": 1, "sampled_tokens": drawn[kind]} for kind in kinds}

    for fields, out in (
        ({}, ["auxiliary"]),
        ({"include_side": False}, ["auxiliary"]),
        ({"include_side": True}, []),
        ({"kinds": ["main"]}, ["auxiliary", "unknown"]),
        ({"kinds": ["auxiliary", "unknown"]}, ["main"]),
        ({"kinds": ["title"]}, ["main", "auxiliary", "unknown"]),
        ({"kinds": []}, ["main", "auxiliary", "unknown"]),
    ):
        made = await samples_of(live, session, **fields)
        assert kinds_in(made) == {kind: num for kind, num in drawn.items() if kind not in out}, fields
        assert made["session_metadata"]["left_out"] == left_out(*out), fields
        assert made["empty_reason"] == (None if made["samples"] else "left_out"), fields
    strands = [
        sample["metadata"]["strand"] for sample in (await samples_of(live, session, include_side=True))["samples"]
    ]
    assert sorted(strands) == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kinds": ["main"], "include_side": True}, "/include_side"),
        ({"kinds": ["main", "side"]}, "/kinds/1"),
        ({"kinds": "main"}, "/kinds"),
        ({"include_side": 1}, "/include_side"),
    ],
)
async def test_kinds_that_mean_nothing_are_refused(live: Live, fields: dict[str, Any], param: str) -> None:
    refused = await live.call("POST", f"/sessions/{await live.open()}/samples", fields)
    assert (refused.status, refused.json()["error"]["param"]) == (400, param)


async def test_the_token_limit_is_of_all_strands(live: Live) -> None:
    used = 0
    session = await live.open(max_total_tokens=300)
    for number in range(20):
        live.says("some words")
        answer = await live.chat(session, user(f"question {number}"))
        if answer.status != 200:
            break
        used += answer.json()["usage"]["total_tokens"]
        assert int(answer.headers["x-stenograph-session-remaining-tokens"]) == 300 - used
    assert (answer.status, answer.json()["error"]["code"]) == (400, "limit_exceeded")
    rows = (await told(live, session))["metadata"]["strands"]
    assert len(rows) > 1
    assert sum(row["num_tokens"] for row in rows) == used <= 300


async def test_several_prompts_of_one_request_open_a_strand_each(live: Live) -> None:
    session = await live.open()
    for text in ("one", "two"):
        live.says(text)
    answer = await live.call("POST", f"/sessions/{session}/v1/completions", {"prompt": ["a", "b"]})
    assert answer.status == 200, answer.body
    assert [row["num_turns"] for row in (await told(live, session))["metadata"]["strands"]] == [1, 1]


# --- compat: miles


async def cut_turn_continued(live: Live, session: str) -> Answer:
    live.says("cut in mid-sen", finish=Finish(reason=FinishReason.LENGTH))
    answer = await live.chat(session, user("hi"))
    assert answer.status == 200
    return await live.chat(session, user("hi"), answer.json()["choices"][0]["message"], user("go on"))


async def test_compat_miles_is_one_line_and_no_turn_after_a_cut_one(live: Live) -> None:
    session = await live.open(compat="miles")
    script = live.says("one", paused=True)
    asking = asyncio.ensure_future(live.chat(session, user("a")))
    await live.engine.begun(1)
    assert (await live.chat(session, user("b"))).status == 409
    live.engine.step(len(script.ids) + 1)
    assert (await asking).status == 200
    assert "tree" not in (await told(live, session))["metadata"]
    other = await live.open(compat="miles", history="linear", after_length="refuse")
    for one in (other, session):
        refused = await cut_turn_continued(live, one)
        assert (refused.status, type(refused.json()["error"])) == (409, str)
        ledger = (await live.call("GET", f"/sessions/{one}/ledger")).json()["requests"]
        assert (ledger[-1]["status"], ledger[-1]["error"]) == (409, "truncated_generation")
    assert len(live.manager.sessions.get(session).nodes) == 1, "another opening has replaced the first turn"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"compat": "miles", "history": "strands"}, "/history"),
        ({"compat": "miles", "history": "tree"}, "/history"),
        ({"compat": "miles", "after_length": "close"}, "/after_length"),
        ({"compat": "slime"}, "/compat"),
        ({"compat": 1}, "/compat"),
    ],
)
async def test_what_is_against_compat_is_refused(live: Live, options: dict[str, Any], param: str) -> None:
    refused = await live.call("POST", "/sessions", options)
    assert (refused.status, refused.json()["error"]["param"]) == (400, param)


def tool_call(live: Live, text: str) -> dict[str, Any]:
    """Plan a reply with a text and a call; what a client that drops calls sends back of it."""
    live.says(f'{text}\n<tool_call>\n{{"name": "add", "arguments": {{}}}}\n</tool_call>')
    return assistant(text)


async def test_another_reply_than_the_sampled_one_opens_a_chapter_and_nothing_is_discarded(live: Live) -> None:
    session = await live.open()
    line = [SYSTEM, user("1+2?")]
    for reply, more in (("One.", "No such tool."), ("Two.", "Again."), ("Three.", "And on.")):
        without_call = tool_call(live, reply)
        assert (await live.chat(session, *line, tools=[ADD])).status == 200
        line += [without_call, user(more)]
    live.says("Four.")
    assert (await live.chat(session, *line, tools=[ADD])).status == 200
    live.says("Five.")
    assert (await live.chat(session, *line, assistant("Four."), user("on"), tools=[ADD])).status == 200
    shown = await told(live, session)
    assert shown["metadata"]["discarded"] == {"turns": 0, "sampled_tokens": 0}
    rows = [(row["num_turns"], row["continues"], row["chapter"], row["kind"]) for row in shown["metadata"]["strands"]]
    assert rows == [
        (1, None, 0, "unknown"),  # "One." is too short to say whose it is
        (1, None, 0, "unknown"),
        (1, None, 0, "unknown"),
        (2, None, 0, "main"),
    ]
    samples = await samples_of(live, session)
    assert sum(sum(sample["loss_mask"]) for sample in samples["samples"]) == sum(
        len(node.turn.sampled.ids) for node in live.manager.sessions.get(session).nodes
    )
    assert len(live.manager.sessions.get(session).nodes) == 5


async def test_a_fork_of_a_line_with_turns_before_it_goes_on_with_its_work(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("hi"))
    line = [user("hi"), assistant("one"), user("call")]
    tool_call(live, "two")
    await live.chat(session, *line, tools=[])
    live.says("three")
    line += [assistant("mine"), user("that failed")]
    assert (await live.chat(session, *line)).status == 200
    assert [depth for _, depth in contents(live, session)] == [1, 2, 1]
    strands = (await told(live, session))["metadata"]["strands"]
    assert [(row["num_turns"], row["continues"], row["kind"]) for row in strands] == [(2, None, "main"), (1, 0, "main")]
    shown = await told(live, session)
    assert [record["response"]["choices"][0]["message"]["content"] for record in shown["records"]] == ["three"]
    live.says("three again")
    assert (await live.chat(session, *line)).status == 200, "asked again it replaces its own turn, as ever"
    shown = await told(live, session)
    assert [row["num_turns"] for row in shown["metadata"]["strands"]] == [2, 1]
    assert shown["metadata"]["discarded"]["turns"] == 1


async def test_a_request_that_goes_on_without_the_last_reply_replaces_nothing(live: Live) -> None:
    """Claude Code asks for a summary without its last reply, and keeps that reply in what it sends next."""
    session = await live.open()
    line = [user("hi")]
    for reply, more in (("one", "b"), ("two", "c")):
        live.says(reply)
        assert (await live.chat(session, *line)).status == 200
        line += [assistant(reply), user(more)]
    live.says("a summary")
    assert (await live.chat(session, *line[:3], user("Sum it up."))).status == 200
    live.says("three")
    assert (await live.chat(session, *line)).status == 200
    assert contents(live, session) == [("one", 1), ("two", 2), ("a summary", 1), ("three", 3)]
    assert (await told(live, session))["metadata"]["discarded"]["turns"] == 0


async def test_a_request_that_goes_on_with_the_sampled_reply_finds_its_line_beside_a_fork(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("hi"))
    live.says("fork")
    await live.chat(session, user("hi"), assistant("mine"), user("a"))
    for reply, line in (
        ("two", ["one", "b"]),
        ("fork on", ["mine", "a", "fork", "c"]),
        ("three", ["one", "b", "two", "d"]),
    ):
        live.says(reply)
        messages = [(user, assistant)[index % 2 == 0](text) for index, text in enumerate(line)]
        assert (await live.chat(session, user("hi"), *messages)).status == 200
    assert contents(live, session) == [("one", 1), ("fork", 1), ("two", 2), ("fork on", 2), ("three", 3)]
    assert (await told(live, session))["metadata"]["discarded"]["turns"] == 0


async def test_a_line_that_is_left_within_its_last_turn_for_a_longer_one_is_kept(live: Live) -> None:
    session = await live.open()
    steps = [user("task"), assistant("step 1"), user("seen 1")]
    live.says("plan 1")
    assert (await live.chat(session, *steps[:-1], user("seen 1, now plan"))).status == 200
    live.says("plan 1, in other words")
    assert (await live.chat(session, *steps[:-1], user("seen 1, now plan anew"))).status == 200
    live.says("plan 2")
    assert (await live.chat(session, *steps, assistant("step 2"), user("seen 2, now plan"))).status == 200
    assert contents(live, session) == [("plan 1, in other words", 1), ("plan 2", 1)]
    assert (await told(live, session))["metadata"]["discarded"]["turns"] == 1


async def test_a_fork_that_fails_leaves_the_line_as_it_was_and_a_linear_session_has_none(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("hi"))
    other = (user("hi"), assistant("mine"), user("on"))
    assert (await live.chat(session, *other, max_tokens=10**6)).status == 400
    live.says("two")
    assert (await live.chat(session, user("hi"), assistant("one"), user("on"))).status == 200
    assert contents(live, session) == [("one", 1), ("two", 2)]
    linear = await live.open(history="linear")
    for reply, line in (("one", other[:1]), ("two", other)):
        live.says(reply)
        assert (await live.chat(linear, *line)).status == 200
    assert contents(live, linear) == [("two", 1)]
    assert (await told(live, linear))["metadata"]["discarded"]["turns"] == 1


async def test_while_a_fork_runs_its_line_is_busy(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("hi"))
    script = live.says("fork", paused=True)
    forking = asyncio.ensure_future(live.chat(session, user("hi"), assistant("mine"), user("on")))
    await live.engine.begun(2)
    assert (await live.chat(session, user("hi"), assistant("one"), user("on"))).status == 409
    live.engine.step_turn(live.engine.requests[1].request_id, len(script.ids) + 1)
    assert (await forking).status == 200
