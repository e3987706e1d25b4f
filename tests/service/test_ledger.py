"""The ledger of a session over HTTP: every request that named it, with its kind, strand, turn, overlaps and end."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.errors import StartupError
from stenograph.core.kinds import Compat, HistoryKind
from stenograph.core.types import Finish, FinishReason

from .conftest import Live, assistant, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TITLE = {"role": "system", "content": "You are a title generator. Write a title."}


async def ledger(live: Live, session: str, query: str = "") -> Any:
    answer = await live.call("GET", f"/sessions/{session}/ledger{query}")
    assert answer.status == 200, answer.body
    return answer.json()


async def test_every_request_has_its_row_whatever_became_of_it(live: Live) -> None:
    session = await live.open()
    turn = live.says("one", paused=True)
    asking = asyncio.create_task(live.chat(session, user("hi"), tools=[TOOL]))
    await live.engine.begun(1)
    live.says("a title")
    assert (await live.chat(session, TITLE, user("hi"))).status == 200
    assert (await live.chat(session, user("hi"), tools=[TOOL])).status == 409
    assert (await live.chat(session, nonsense=1)).status == 400
    live.engine.step(len(turn.ids) + 1)
    assert (await asking).status == 200
    page = await ledger(live, session)
    assert (page["num_requests"], page["next"]) == (4, None)
    rows = page["requests"]
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    assert [row["status"] for row in rows] == [200, 200, 409, 400]
    assert [row["error"] for row in rows] == [None, None, "session_busy", "invalid_request"]
    assert [row["kind"] for row in rows] == ["main", "title", "unknown", "unknown"]
    assert [row["rule"] for row in rows] == [None, "oc-title", None, None]
    assert [(row["strand"], row["turn"]) for row in rows] == [(1, 1), (0, 0), (None, None), (None, None)]
    assert [row["overlaps"] for row in rows] == [[2, 3, 4], [1], [1], [1]]
    assert [row["sampled_tokens"] for row in rows] == [len(turn.ids), 8, 0, 0]
    assert {row["path"] for row in rows} == {"/v1/chat/completions"}
    assert all(row["received"] <= row["ended"] for row in rows)


async def test_a_request_that_runs_has_no_end_and_a_client_that_left_no_status(live: Live) -> None:
    session = await live.open()
    live.says("one", paused=True)
    asking = asyncio.create_task(live.chat(session, user("hi")))
    await live.engine.begun(1)
    (row,) = (await ledger(live, session))["requests"]
    assert (row["ended"], row["status"], row["turn"]) == (None, None, None)
    asking.cancel()
    while row["ended"] is None:  # the server has not yet heard that the client left
        (row,) = (await ledger(live, session))["requests"]
    assert (row["status"], row["error"], row["turn"]) == (None, None, None)


async def test_pages_follow_one_another_and_other_parameters_are_refused(live: Live) -> None:
    session = await live.open()
    for number in range(5):
        live.says("x")
        await live.chat(session, user(str(number)))
    numbers, after = [], 0
    while after is not None:
        page = await ledger(live, session, f"?limit=2&after={after}")
        numbers.append([row["number"] for row in page["requests"]])
        after = page["next"]
    assert numbers == [[1, 2], [3, 4], [5]]
    for query, param in (("limit=0", "/limit"), ("limit=1001", "/limit"), ("after=-1", "/after"), ("x=1", None)):
        answer = await live.call("GET", f"/sessions/{session}/ledger?{query}")
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert (await live.call("GET", "/sessions/nothing/ledger")).status == 404


async def test_the_roots_of_a_tree_are_strands_in_the_ledger(live: Live) -> None:
    session = await live.open(history="tree")
    for text in ("a", "b"):
        live.says("x")
        await live.chat(session, user(text), tools=[TOOL])
    live.says("y")
    await live.chat(session, user("a"), assistant("x"), user("more"), tools=[TOOL])
    rows = (await ledger(live, session))["requests"]
    assert [(row["strand"], row["turn"], row["kind"]) for row in rows] == [
        (0, 0, "main"),
        (1, 1, "unknown"),
        (0, 2, "main"),
    ]


async def test_an_agent_id_is_a_part_of_the_opening_and_names_the_kind(live: Live) -> None:
    session = await live.open()
    for agent in ("one", "two", "one"):
        live.says("x")
        body = {"messages": [user("hi")]}
        path = f"/sessions/{session}/v1/chat/completions"
        answer = await live.call("POST", path, body, x_claude_code_agent_id=agent)
        assert answer.status == 200, answer.body
    view = (await live.call("GET", f"/sessions/{session}?strand=0")).json()
    strands = view["metadata"]["strands"]
    assert [(row["agent_id"], row["kind"], row["num_turns"]) for row in strands] == [
        ("one", "agent", 1),  # asked again, it replaced its turn
        ("two", "agent", 1),
    ]
    assert view["metadata"]["discarded"]["turns"] == 1
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    assert [sample["metadata"]["agent_id"] for sample in answer.json()["samples"]] == ["two", "one"]


async def test_a_chapter_goes_on_with_the_main_work_and_is_main(live: Live) -> None:
    session = await live.open()
    long = "The answer to the first question is that there are forty-two of them, more or less."
    live.says(long)
    await live.chat(session, {"role": "system", "content": "Be brief."}, user("first"), tools=[TOOL])
    live.says("unrelated")
    await live.chat(session, user("another"), tools=[TOOL])
    live.says("two")
    resumed = [{"role": "system", "content": "Be brief. Resumed."}, user("first"), assistant(long), user("go on")]
    await live.chat(session, *resumed, tools=[TOOL])
    view = (await live.call("GET", f"/sessions/{session}")).json()
    strands = view["metadata"]["strands"]
    assert [(row["kind"], row["chapter"], row["continues"]) for row in strands] == [
        ("main", 0, None),
        ("unknown", 0, None),
        ("main", 1, 0),
    ]
    # The newest chapter is what the session shows.
    assert view["records"][-1]["response"]["choices"][0]["message"]["content"] == "two"
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", "kinds": ["main"]})
    body = answer.json()
    assert [sample["metadata"]["continues"] for sample in body["samples"]] == [None, 0]
    assert body["session_metadata"]["left_out"] == {"unknown": {"strands": 1, "sampled_tokens": 10}}


async def test_max_turns_counts_the_main_strand_alone(live: Live) -> None:
    session = await live.open(max_turns=1)
    live.says("one")
    first = await live.chat(session, user("hi"), tools=[TOOL])
    live.says("a title")
    assert (await live.chat(session, TITLE, user("hi"))).status == 200
    reply = first.json()["choices"][0]["message"]
    answer = await live.chat(session, user("hi"), reply, user("more"), tools=[TOOL])
    assert (answer.status, answer.json()["error"]["code"]) == (400, "limit_exceeded")


async def test_max_turns_counts_the_completions_of_the_main_strand(live: Live) -> None:
    session = await live.open(max_turns=1)
    script = live.says("one")
    path = f"/sessions/{session}/v1/completions"
    assert (await live.call("POST", path, {"prompt": [5, 6]})).status == 200
    answer = await live.call("POST", path, {"prompt": [5, 6, *script.ids, 7]})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "limit_exceeded")
    assert (await live.call("POST", path, {"prompt": [8]})).status == 400  # nor may another strand begin


async def test_a_linear_session_that_a_title_opens_gives_its_sample(live: Live) -> None:
    session = await live.open(compat="miles")
    live.says("a title")
    assert (await live.chat(session, TITLE, user("hi"))).status == 200
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    assert [sample["metadata"]["kind"] for sample in answer.json()["samples"]] == ["main"]


async def test_an_operators_rules_stand_in_front(serve: Serve, tmp_path: Path) -> None:
    rules = tmp_path / "side.toml"
    rules.write_text('[[rules]]\nname = "ours"\nclient = "ours"\nkind = "probe"\n[rules.when]\nlast_user = "^ping$"\n')
    async with serve(side_rules=rules) as live:
        session = await live.open()
        for message, kind in ((user("ping"), "probe"), (TITLE, "title")):
            live.says("x")
            assert (await live.chat(session, message, user("ping" if kind == "probe" else "hi"))).status == 200
        assert [row["rule"] for row in (await ledger(live, session))["requests"]] == ["ours", "oc-title"]


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"[[rules]]\nname = 'a'", "rule 'a'"), (b"\xff", "is not UTF-8"), (None, "cannot read the file")],
)
async def test_a_file_of_rules_that_is_wrong_stops_the_start(
    serve: Serve, tmp_path: Path, text: bytes | None, said: str
) -> None:
    rules = tmp_path / "side.toml"
    if text is not None:
        rules.write_bytes(text)
    with pytest.raises(StartupError, match=said) as caught:
        async with serve(side_rules=rules):
            raise AssertionError
    assert str(rules) in str(caught.value)


async def test_a_server_that_keeps_to_miles_contract_opens_linear_sessions(serve: Serve) -> None:
    async with serve(compat=Compat.MILES) as live:
        session = await live.open()
        live.says("cut", finish=Finish(reason=FinishReason.LENGTH))
        reply = (await live.chat(session, user("hi"))).json()["choices"][0]["message"]
        answer = await live.chat(session, user("hi"), reply, user("go on"))
        assert (answer.status, type(answer.json()["error"])) == (409, str)
        ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
        assert (ledger[-1]["status"], ledger[-1]["error"]) == (409, "truncated_generation")
        (summary,) = (await live.call("GET", "/sessions")).json()["sessions"]
        assert summary["history"] == "linear"
    with pytest.raises(StartupError, match="compat miles"):
        async with serve(compat=Compat.MILES, history=HistoryKind.TREE):
            raise AssertionError


async def test_a_turn_that_a_rule_labels_is_counted_and_leaves_its_session_usable(live: Live) -> None:
    session = await live.open()
    for _ in range(2):
        live.says("a title")
        assert (await live.chat(session, TITLE, user("hi"))).status == 200
    metrics = (await live.call("GET", "/metrics")).body.decode()
    assert 'stenograph_labelled_turns_total{kind="title"} 2' in metrics


async def test_calls_that_come_back_as_text_are_told_in_the_record_the_ledger_and_the_metrics(live: Live) -> None:
    session = await live.open()
    live.says('Look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    first = (await live.chat(session, user("hi"), tools=[TOOL])).json()["choices"][0]["message"]
    call = first["tool_calls"][0]
    spelled = [{"id": call["id"], "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    text = f"Look.\nCalling tools:\n{spelled}"
    live.says("done")
    answer = await live.chat(session, user("hi"), assistant(text), user("Observation: 1"), tools=[TOOL])
    assert answer.status == 200, answer.body
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert view["metadata"]["rewrites"] == {"text-calls": 1}
    (rewrite,) = view["records"][1]["request"]["rewrites"]
    assert (rewrite["rule"], rewrite["where"]) == ("text-calls", "/messages/1/content")
    assert rewrite["from"].startswith("Calling tools:")
    assert (await ledger(live, session))["requests"][1]["rewrites"] == ["text-calls"]
    metrics = (await live.call("GET", "/metrics")).body.decode()
    assert 'stenograph_rewrites_total{rule="text-calls"} 1' in metrics
