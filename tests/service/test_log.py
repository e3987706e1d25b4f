"""What the log says of turns and sessions: one line at the end of each, with what it is about, and each cause once."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from standins.scripted_engine import Script
from stenograph.core.errors import UpstreamInvalid, UpstreamUnreachable
from stenograph.core.log_line import LogLine
from stenograph.core.outcome import TokenFate

from .conftest import Live, assistant, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[tuple[str, LogLine]]]:
    """The lines of an event that were logged, each with its level."""
    caplog.set_level(logging.INFO, logger="stenograph")

    def logged(event: str) -> list[tuple[str, LogLine]]:
        found = [(record.levelname, record.msg) for record in caplog.records]
        return [(level, line) for level, line in found if isinstance(line, LogLine) and line.event == event]

    return logged


Lines = Callable[[str], list[tuple[str, LogLine]]]


async def test_a_turn_ends_with_one_line_that_says_whose_it_was_and_what_it_took(live: Live, lines: Lines) -> None:
    session = await live.open()
    live.says("one")
    first = await live.chat(session, user("a"))
    live.engine.plan(Script(ids=(70, 71, 2), num_cached=7))
    body = {"messages": [user("a"), assistant("one"), user("b")], "max_tokens": 3}
    second = await live.call("POST", f"/sessions/{session}/v1/chat/completions", body, User_Agent="tester/1.0")
    assert (first.status, second.status) == (200, 200)
    (level, _), (_, line) = lines("turn_end")
    assert level == "INFO"
    assert line.facts == {
        "session": session,
        "request": second.headers["x-request-id"],
        "client": "tester/1.0",
        "status": "committed",
        "finish": second.json()["choices"][0]["finish_reason"],
        "error": None,
        "prompt_tokens": second.json()["usage"]["prompt_tokens"],
        "cached_tokens": 7,
        "sampled_tokens": 3,
        "detail": None,
    }
    assert line.stages_s is not None
    assert {"receive", "admit", "decode", "render", "commit"} <= line.stages_s.keys()


async def test_a_turn_that_fails_has_its_error_in_its_one_line(live: Live, lines: Lines) -> None:
    session = await live.open()
    for error in (UpstreamUnreachable("it is away"), UpstreamInvalid("some_law", "it is broken")):
        live.engine.plan(Script(ids=(70,), error=error))
        assert (await live.chat(session, user("a"))).status == 502
    (away_level, away), (invalid_level, invalid) = lines("turn_end")
    assert (away_level, invalid_level) == ("INFO", "WARNING")  # an outage has a line of its own
    told = [[line.facts[name] for name in ("session", "status", "error", "detail")] for line in (away, invalid)]
    assert told == [
        [session, "failed", "upstream_unreachable", "it is away"],
        [session, "failed", "upstream_invalid", "some_law: it is broken"],
    ]


async def test_a_bug_of_ours_is_logged_once_with_the_traceback_and_no_objects(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    live.engine.plan(Script(ids=(70,), error=ZeroDivisionError("a bug")))
    answer = await live.chat(None, user("a"))
    assert answer.status == 500
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert "error=internal_error" in record.getMessage()
    assert "<" not in record.getMessage()


async def test_a_turn_whose_client_leaves_has_its_line(live: Live, lines: Lines) -> None:
    session = await live.open()
    live.says("one", paused=True)
    chat = asyncio.ensure_future(live.chat(session, user("a")))
    await live.engine.begun(1)
    chat.cancel()
    await live.engine.idle()
    live.says("two")
    assert (await live.chat(session, user("a"))).status == 200  # by now the first has ended
    assert [(line.facts["session"], line.facts["status"]) for _, line in lines("turn_end")] == [
        (session, "abandoned"),
        (session, "committed"),
    ]


async def test_a_request_that_is_refused_is_no_turn_and_has_no_line(live: Live, lines: Lines) -> None:
    assert (await live.chat(None)).status == 400
    assert (await live.chat("nowhere", user("a"))).status == 404
    assert lines("turn_end") == []


async def test_each_turn_of_a_completion_with_several_prompts_has_a_line(live: Live, lines: Lines) -> None:
    for _ in range(2):
        live.says("x")
    assert (await live.call("POST", "/v1/completions", {"prompt": ["a", "b"]})).status == 200
    found = [line.facts for _, line in lines("turn_end")]
    assert [(facts["session"], facts["status"]) for facts in found] == [(None, "unrecorded")] * 2
    assert found[0]["request"] != found[1]["request"]


async def test_a_session_ends_with_one_line(live: Live, lines: Lines) -> None:
    session = await live.open()
    live.says("one")
    usage = (await live.chat(session, user("a"))).json()["usage"]
    await asyncio.gather(*(live.call("DELETE", f"/sessions/{session}") for _ in range(2)))
    ((level, line),) = lines("session_end")
    facts = dict(line.facts)
    age_s = facts.pop("age_s")
    assert level == "INFO"
    assert facts == {
        "session": session,
        "status": "deleted",
        "turns": 1,
        "tokens": usage["total_tokens"],
        "group": None,
        "verdict": "none",
        **{f"{fate}_tokens": 0 for fate in TokenFate},
        "discarded_tokens": usage["completion_tokens"],
    }
    assert isinstance(age_s, float)


async def test_what_is_not_logged_is_not_put_together(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="stenograph")
    async with serve() as live:
        live.says("one")
        assert (await live.chat(None, user("a"))).status == 200
    assert caplog.records == []


async def test_an_error_of_a_turn_has_the_id_that_the_log_has_and_no_tokens_of_an_engine_that_gave_none(
    live: Live, lines: Lines
) -> None:
    live.engine.plan(Script(ids=(70,), error=UpstreamUnreachable("it is away")))
    whole = await live.chat(None, user("a"))
    live.engine.plan(Script(ids=(), error=UpstreamUnreachable("it is away")))
    streamed = await live.chat(None, user("a"), stream=True)
    assert (whole.status, streamed.status) == (502, 502)
    facts = [line.facts for _, line in lines("turn_end")]
    assert [one["request"] for one in facts] == [answer.headers["x-request-id"] for answer in (whole, streamed)]
    assert [one["cached_tokens"] for one in facts] == [None, None]


async def test_each_session_that_ends_with_the_process_has_its_line(
    serve: Serve, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as live:
        empty, used = await live.open(), await live.open()
        live.says("one")
        assert (await live.chat(used, user("a"))).status == 200
    ended = [(line.facts["session"], line.facts["status"], line.facts["turns"]) for _, line in lines("session_end")]
    assert ended == [(empty, "stopped", 0), (used, "stopped", 1)]
    assert "2 sessions with" in caplog.text
