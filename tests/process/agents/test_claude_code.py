"""Real Claude Code on a session's own address: its turns are one strand, and every sampled token is in one sample.

scripts/test-agents installs it into the cache folder. It runs in a home of its own and reaches this machine alone.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from standins.clock import ManualClock
from stenograph.http.keep_alive import BEGIN_S, SILENCE_S

from .conftest import Reply, Talk, Talking, call
from .installed import Program, Ran, ledger, session_json, strands

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

CLAUDE = Program(title="Claude Code", folder="claude-code-2.1.330", name="claude")
LOOK = "<think>\nLook first.\n</think>\n\nI look.\n" + call("Bash", '{"command":  "ls", "description": "list"}')
LOOK_TWICE = "\n".join(
    [
        call("Bash", '{"command": "cat notes.txt", "description": "read"}'),
        call("Bash", '{"command": "pwd", "description": "where"}'),
    ]
)
DONE = "There is a note."
PERMITTED = ("--permission-mode", "bypassPermissions")
TITLE = {"Generate a concise, sentence-case title": '{"title": "A folder"}'}


def environment(base_url: str, **more: str) -> dict[str, str]:
    """The variables of a run on this session; as `run` and `start` take them."""
    return {
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "sk-x",
        "ANTHROPIC_MODEL": "mock-model",
        "IS_SANDBOX": "1",
        "DISABLE_AUTOUPDATER": "1",
        **more,
    }


async def run(home: Path, base_url: str, *arguments: str, **more: str) -> Ran:
    return await CLAUDE.run(home, *arguments, *PERMITTED, environment=environment(base_url, **more))


def check_extends(talk: Talk, indices: Sequence[int]) -> None:
    """Each of these requests' prompts begins with all ids of the one before it, and of its reply."""
    before: list[int] = []
    for index in indices:
        request = talk.engine.requests[index]
        ids = list(request.prompt.ids)
        assert ids[: len(before)] == before
        before = ids + talk.engine.drawn[request.request_id]


async def test_three_turns_with_parallel_calls_are_one_strand(home: Path, talking: Talking) -> None:
    async with talking(LOOK, LOOK_TWICE, DONE, side=TITLE) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?", "--output-format", "json")
        assert (ran.code, json.loads(ran.printed)["result"]) == (0, DONE)
        rows = await ledger(talk, base_url)
        assert [row["status"] for row in rows] == [200] * len(rows)
        mains = [strand for strand in await strands(talk, base_url) if strand["kind"] == "main"]
        assert [strand["num_turns"] for strand in mains] == [3]
        check_extends(talk, [i for i, row in enumerate(rows) if row["kind"] == "main"])
        samples = await talk.samples(base_url)
        talk.check_all_trained_once(samples)


AGENTS = "\n".join(
    call(
        "Agent", json.dumps({"description": f"look {n}", "prompt": f"Look at {n}.", "subagent_type": "general-purpose"})
    )
    for n in ("one", "two")
)


@pytest.mark.parametrize("hints", [{}, {"CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1"}], ids=["plain", "hints"])
async def test_two_agents_are_strands_of_their_own_beside_the_main_line(
    home: Path, talking: Talking, hints: dict[str, str]
) -> None:
    async with talking(AGENTS, rest=DONE) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "Look twice.", **hints)
        rows = await ledger(talk, base_url)
        assert (ran.code, [row["status"] for row in rows]) == (0, [200] * len(rows))
        assert sorted(strand["kind"] for strand in await strands(talk, base_url)) == ["agent", "agent", "main"]
        assert any(row["overlaps"] for row in rows)
        samples = await talk.samples(base_url)
        talk.check_all_trained_once(samples)
        assert len(samples) == 3


async def test_a_compaction_replaces_no_turn_and_what_follows_it_is_a_chapter(home: Path, talking: Talking) -> None:
    """It asks for the summary without its last reply, which it keeps as it is: that one stands in the next prompt."""
    summary = "<analysis>\nThought.\n</analysis>\n<summary>\nThere is a note in the folder.\n</summary>"
    async with talking(LOOK, f"<think>\nSo.\n</think>\n\n{DONE}", summary, "Going on.") as talk:
        base_url = await talk.open_session()
        for words in (("-p", "What is here?"), ("--continue", "-p", "/compact"), ("--continue", "-p", "Go on.")):
            ran = await run(home, base_url, *words)
            assert ran.code == 0, ran.printed
        rows = await ledger(talk, base_url)
        assert [row["status"] for row in rows] == [200] * 4
        found = [(one["kind"], one["num_turns"], one["continues"]) for one in await strands(talk, base_url)]
        assert found == [("main", 2, None), ("compaction", 1, 0), ("main", 1, 1)]
        following = talk.engine.requests[3].chat
        assert following is not None
        assert DONE in [message.content for message in following.messages]
        assert (await session_json(talk, base_url))["metadata"]["discarded"]["turns"] == 0
        talk.check_all_trained_once(await talk.samples(base_url))


@pytest.mark.parametrize("canonical", [None, "off"])
async def test_its_billing_line_is_in_no_prompt(home: Path, talking: Talking, canonical: str | None) -> None:
    async with talking(DONE) as talk:
        base_url = await talk.open_session(**({} if canonical is None else {"canonical": canonical}))
        await run(home, base_url, "-p", "What is here?")
        (row,) = await ledger(talk, base_url)
        (record,) = (await session_json(talk, base_url))["records"]
        is_shown = "x-anthropic-billing-header" in json.dumps(record["request"]["messages"])
        assert (is_shown, "cc-billing" in row["rewrites"]) == (canonical == "off", canonical is None)


async def test_a_tool_that_is_searched_for_is_shown_and_can_be_called(home: Path, talking: Talking) -> None:
    search = call("ToolSearch", '{"query": "select:WebFetch", "max_results": 1}')
    fetch = call("WebFetch", '{"url": "http://127.0.0.1:9/", "prompt": "read"}')
    async with talking(search, fetch, DONE) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "Fetch it.")
        assert (ran.code, ran.printed.strip()) == (0, DONE)
        (strand,) = await strands(talk, base_url)
        assert strand["num_turns"] == 3
        check_extends(talk, range(3))
        shown = talk.engine.requests[1].chat
        assert shown is not None
        assert [tool.name for tool in shown.late_tools] == ["WebFetch"]
        assert shown.messages[-1].content == shown.late_tools[0].json
        rows = await ledger(talk, base_url)
        assert [row["rewrites"] for row in rows] == [
            ["deferred-tool", "cc-billing"],
            ["deferred-tool", "tool-reference", "cc-billing"],
            ["deferred-tool", "cc-billing"],
        ]
        record = (await session_json(talk, base_url))["records"][1]
        assert record["response"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "WebFetch"


async def test_it_goes_on_after_its_token_limit(home: Path, talking: Talking) -> None:
    async with talking(Reply(text="I be", cut=True), Reply(text="gin to", cut=True), DONE) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?")
        assert (ran.code, ran.printed.strip().endswith(DONE)) == (0, True)
        check_extends(talk, range(3))
        records = (await session_json(talk, base_url))["records"]
        assert [record["status"] for record in records] == ["truncated", "truncated", "completed"]
        assert [request.params.max_tokens for request in talk.engine.requests] == [32_000, 128_000, 128_000]
        (line,) = (await session_json(talk, base_url, "/drift"))["lines"]
        assert set(line["counts"].values()) == {0}


async def test_a_reply_cut_inside_its_reasoning_is_one_that_shows_nothing(home: Path, talking: Talking) -> None:
    """Not gone on after, which would be 409: it is asked for again."""
    async with talking(Reply(text="<think>\nI be", cut=True), DONE) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?")
        assert (ran.code, ran.printed.strip()) == (0, DONE)
        assert [row["status"] for row in await ledger(talk, base_url)] == [200, 200]


NUDGED = ["", "<think>\nhm\n</think>\n\n"]
SHOWN = [
    '<tool_call>\n{"name": "Bash", "argu\n</tool_call>',
    '<tool_call>\n{"name": "Bash", "arguments": [1]}\n</tool_call>',
]


@pytest.mark.parametrize("text", NUDGED, ids=["empty", "thinking"])
async def test_a_reply_that_shows_nothing_is_asked_for_again_and_stays(home: Path, talking: Talking, text: str) -> None:
    """It appends to its first message: a strand of its own, and the empty turn stays where it is."""
    async with talking(text, DONE) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?")
        assert (ran.code, ran.printed.strip()) == (0, DONE)
        assert [strand["num_turns"] for strand in await strands(talk, base_url)] == [1, 1]
        talk.check_all_trained_once(await talk.samples(base_url))


@pytest.mark.parametrize("text", SHOWN, ids=["broken", "no-object"])
async def test_a_call_that_is_none_is_shown_as_text(home: Path, talking: Talking, text: str) -> None:
    async with talking(text) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?")
        assert (ran.code, ran.printed.strip()) == (0, text)
        talk.check_all_trained_once(await talk.samples(base_url))


async def test_it_lowers_its_max_tokens_by_itself(home: Path, talking: Talking) -> None:
    async with talking(DONE, max_context_tokens=60_000) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?")
        assert (ran.code, ran.printed.strip()) == (0, DONE)
        rows = await ledger(talk, base_url)
        assert [(row["status"], row["error"]) for row in rows] == [(400, "context_length_exceeded"), (200, None)]
        (request,) = talk.engine.requests
        assert request.params.max_tokens is not None
        assert request.params.max_tokens + len(request.prompt.ids) <= 60_000


async def test_it_stops_at_a_prompt_that_is_too_long(home: Path, talking: Talking) -> None:
    async with talking(max_context_tokens=20_000) as talk:
        base_url = await talk.open_session()
        ran = await run(home, base_url, "-p", "What is here?")
        assert (ran.code, "Prompt is too long" in ran.printed) == (1, True)
        assert [row["error"] for row in await ledger(talk, base_url)] == ["context_length_exceeded"]


async def test_it_waits_through_a_silent_prefill_and_asks_once(home: Path, talking: Talking) -> None:
    clock = ManualClock()
    async with talking(Reply(text=DONE, paused=True), clock=clock) as talk:
        base_url = await talk.open_session()
        running = asyncio.create_task(run(home, base_url, "-p", "What is here?"))
        await talk.engine.begun(1)
        for silent_s in (BEGIN_S, SILENCE_S, SILENCE_S):
            clock.advance(silent_s)
        talk.engine.step(100)
        ran = await running
        assert (ran.code, ran.printed.strip()) == (0, DONE)
        assert [row["status"] for row in await ledger(talk, base_url)] == [200]


async def test_killed_in_mid_stream_it_leaves_no_turn_and_no_generation(home: Path, talking: Talking) -> None:
    async with talking(Reply(text=DONE, paused=True)) as talk:
        base_url = await talk.open_session()
        process = await CLAUDE.start(home, "-p", "What is here?", *PERMITTED, environment=environment(base_url))
        await talk.engine.begun(1)
        talk.engine.step(5)
        process.kill()
        await process.communicate()
        await talk.engine.idle()
        assert [strand["num_turns"] for strand in await strands(talk, base_url)] == []
        assert [row["status"] for row in await ledger(talk, base_url)] == [None]
