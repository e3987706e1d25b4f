"""A commit that takes a turn out of its session is counted and logged: nothing that was sampled goes silently."""

import logging
from typing import Any

import pytest

from stenograph.session.manager import SessionManager

from .conftest import Live, assistant, user

NONE = {"turns": 0, "sampled_tokens": 0}


async def shown(live: Live, session: str) -> list[Any]:
    """What each place says of the session's discarded turns: its metadata, its summary, and each of its samples."""
    view = (await live.call("GET", f"/sessions/{session}")).json()
    listed = (await live.call("GET", "/sessions")).json()["sessions"]
    samples = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()
    return [
        view["metadata"]["discarded"],
        *(summary["discarded"] for summary in listed if summary["session_id"] == session),
        samples["session_metadata"]["discarded"],
        *(sample["metadata"]["discarded"] for sample in samples["samples"]),
    ]


async def counted(live: Live) -> list[str]:
    text = (await live.call("GET", "/metrics")).body.decode()
    return [line.split()[1] for line in text.splitlines() if line.startswith("stenograph_discarded_")]


async def test_a_turn_that_a_commit_discards_is_counted_in_session_samples_and_metrics_and_logged(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    session = await live.open(metadata={"discarded": "mine"})
    first = live.says("lost words")
    answer = await live.chat(session, user("hi"))
    assert await shown(live, session) == [NONE] * 4
    live.says("kept")
    with caplog.at_level(logging.WARNING, SessionManager.__module__):
        await live.chat(session, user("hi"))
        await live.engine.idle()
    assert await shown(live, session) == [{"turns": 1, "sampled_tokens": len(first.ids)}] * 4
    assert [float(one) for one in await counted(live)] == [1, len(first.ids)]
    (record,) = [record for record in caplog.records if "discarded" in record.getMessage()]
    for named in (session, answer.headers["x-request-id"], f"{len(first.ids)} sampled tokens"):
        assert named in record.getMessage()


async def test_what_discards_nothing_is_not_counted(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("hi"))
    live.says("two")
    await live.chat(session, user("hi"), assistant("one"), user("more"))
    tree = await live.open(history="tree")
    for text in ("one", "two"):
        live.says(text)
        await live.chat(tree, user("hi"))
    assert {str(one) for one in [*await shown(live, session), *await shown(live, tree)]} == {str(NONE)}
    assert [float(one) for one in await counted(live)] == [0, 0]


async def test_a_turn_that_fails_in_the_place_of_another_discards_nothing(live: Live) -> None:
    session = await live.open()
    live.says("kept")
    await live.chat(session, user("hi"))
    assert (await live.chat(session, user("hi"), max_tokens=10**6)).status == 400
    assert await shown(live, session) == [NONE] * 4
