"""Forks for an agent that begins anew: its requests for inherited turns get the recorded replies, byte for byte; the
engine samples from the place of the fork on.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, assistant, user
from .test_forks import forked, prompt_ids, records, stored
from .test_replay import TOOL, asked_of

DIALECTS = ("chat", "messages", "responses", "gemini")
TEXTS = ("first words of it", "second words of it", "third words of it")


async def asked(live: Live, session: str, dialect: str, told: list[tuple[str, str]], *, stream: bool) -> Answer:
    path, body = asked_of(dialect, told, stream=stream)
    answer = await live.call("POST", f"/sessions/{session}{path}", body)
    assert answer.status == 200, answer.body
    return answer


async def lived(
    live: Live, session: str, dialect: str = "chat", *, stream: bool = False, mark: str = "", says: bool = True
) -> list[bytes]:
    """An agent's three turns, and what it was answered."""
    told: list[tuple[str, str]] = []
    found: list[bytes] = []
    for number, text in enumerate(TEXTS):
        told.append(("user", f"question {number}{mark}"))
        if says:
            live.says(text)
        found.append((await asked(live, session, dialect, told, stream=stream)).body)
        told.append(("assistant", text))
    return found


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fresh_agent_gets_the_recorded_bytes_and_goes_on_behind_the_exact_ids(
    live: Live, history: str, dialect: str, stream: bool
) -> None:
    session = await live.open(history=history)
    before = await lived(live, session, dialect, stream=stream)
    line = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["accumulated_token_ids"]
    (fork,) = await forked(live, session, turn=2, replay=True)
    num_asked = len(live.engine.requests)
    assert await lived(live, fork, dialect, stream=stream, says=False) == before
    assert len(live.engine.requests) == num_asked, "the engine was asked"
    assert len(await records(live, fork)) == 3
    told = [
        (role, text) for n, said in enumerate(TEXTS) for role, text in (("user", f"question {n}"), ("assistant", said))
    ]
    live.says("a fourth")
    await asked(live, fork, dialect, [*told, ("user", "and on")], stream=stream)
    assert prompt_ids(live)[: len(line)] == line
    assert len(await records(live, fork)) == 4


@pytest.mark.parametrize("turn", [0, 2])
async def test_a_fresh_agent_continues_the_cut_reply(live: Live, turn: int) -> None:
    session = await live.open()
    await lived(live, session)
    whole = list(live.engine.requests[turn].prompt.ids)
    (fork,) = await forked(live, session, turn=turn, token=2, replay=True)
    told: list[tuple[str, str]] = []
    for number in range(turn):
        told.append(("user", f"question {number}"))
        await asked(live, fork, "chat", told, stream=False)
        told.append(("assistant", TEXTS[number]))
    rest = live.says(" and another end")
    answer = await asked(live, fork, "chat", [*told, ("user", f"question {turn}")], stream=False)
    assert prompt_ids(live)[: len(whole)] == whole
    assert len(prompt_ids(live)) == len(whole) + 2
    said = answer.json()["choices"][0]["message"]["content"]
    assert said == live.renderer.tokenizer.decode([*prompt_ids(live)[len(whole) :], *rest.ids[:-1]])
    told += [("user", f"question {turn}"), ("assistant", said), ("user", "on")]
    live.says("more")
    await asked(live, fork, "chat", told, stream=False)
    assert prompt_ids(live)[: len(whole) + 2 + len(rest.ids)] == [
        *whole,
        *prompt_ids(live)[len(whole) :][:2],
        *rest.ids,
    ]


async def test_parts_that_an_agent_makes_anew_are_those_of_the_record(live: Live) -> None:
    session = await live.open()
    before = await lived(live, session, mark=" Wall time: 0.1 seconds")
    line = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["accumulated_token_ids"]
    (fork,) = await forked(live, session, turn=1, replay=True)
    told: list[tuple[str, str]] = []
    for number in range(2):
        told.append(("user", f"question {number} Wall time: 0.7 seconds"))
        assert (await asked(live, fork, "chat", told, stream=False)).body == before[number]
        told.append(("assistant", TEXTS[number]))
    for text in ("another third", "another fourth"):
        live.says(text)
        told.append(("user", "question 2 Wall time: 0.8 seconds"))
        await asked(live, fork, "chat", told, stream=False)
        told.append(("assistant", text))
    inherited = prompt_ids(live)[: len(line)]
    assert live.renderer.tokenizer.decode(inherited).count("Wall time: 0.1 seconds") == 2
    assert live.renderer.tokenizer.decode(prompt_ids(live)).count("Wall time: 0.8 seconds") == 2
    assert len((await live.call("GET", f"/sessions/{fork}")).json()["metadata"]["tree"]["leaves"]) == 1
    assert len(await records(live, fork)) == 4


async def test_a_fork_that_is_read_again_gives_its_recorded_replies(renderer: Renderer, tmp_path: Path) -> None:
    async with stored(renderer, tmp_path) as live:
        session = await live.open()
        before = await lived(live, session)
        (fork,) = await forked(live, session, turn=2, token=1, replay=True)
        await live.call("DELETE", f"/sessions/{session}")
    async with stored(renderer, tmp_path) as live:
        first = await asked(live, fork, "chat", [("user", "question 0")], stream=False)
    async with stored(renderer, tmp_path) as live:
        told = [("user", "question 0"), ("assistant", TEXTS[0]), ("user", "question 1")]
        second = await asked(live, fork, "chat", told, stream=False)
        assert [first.body, second.body] == before[:2]
        live.says(" of another")
        third = await asked(live, fork, "chat", [*told, ("assistant", TEXTS[1]), ("user", "question 2")], stream=False)
        assert len(live.engine.requests) == 1
        again = await asked(live, fork, "chat", told, stream=False)
        assert again.body == before[1], "also for a second agent"
        assert (third.status, len(await records(live, fork))) == (200, 3)


async def test_a_request_that_parts_before_the_place_is_refused_with_the_difference(live: Live) -> None:
    session = await live.open()
    await lived(live, session)
    (fork,) = await forked(live, session, turn=2, replay=True)
    await asked(live, fork, "chat", [("user", "question 0")], stream=False)
    answer = await live.chat(fork, user("question 0"), assistant(TEXTS[0]), user("question one"))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "history_mismatch")
    named = "turn 1, message 2 (user), content, character 9: recorded 'question 1', sent 'question one'"
    assert named in answer.json()["error"]["message"]


async def test_an_agent_whose_first_request_is_another_is_refused_with_the_difference(live: Live) -> None:
    session = await live.open()
    live.says("looks")
    await live.chat(session, user("it is Monday"), tools=[TOOL])
    (fork,) = await forked(live, session, turn=0, replay=True)
    answer = await live.chat(fork, user("it is Tuesday"), tools=[TOOL])
    assert (answer.status, answer.json()["error"]["code"]) == (400, "history_mismatch")
    assert "character 6: recorded 'it is Monday', sent 'it is Tuesday'" in answer.json()["error"]["message"]


async def test_an_agent_that_has_gone_on_may_rewrite_its_history(live: Live) -> None:
    session = await live.open(history="tree")
    await lived(live, session)
    (fork,) = await forked(live, session, turn=1, replay=True)
    told = [("user", "question 0"), ("assistant", TEXTS[0]), ("user", "question 1"), ("assistant", TEXTS[1])]
    live.says("a third")
    await asked(live, fork, "chat", [*told, ("user", "on")], stream=False)
    live.says("a short one")
    await asked(live, fork, "chat", [*told[:2], ("user", "question 1, cut")], stream=False)


async def test_a_request_of_other_work_is_sampled_and_logged(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    session = await live.open()
    before = await lived(live, session)
    (fork,) = await forked(live, session, turn=2, replay=True)
    live.says("found it")
    with caplog.at_level(logging.WARNING):
        assert (await live.chat(fork, user("a sub-agent's task"), tools=[TOOL])).status == 200
    (named,) = [one.message for one in caplog.records if "unlike" in one.message]
    assert (fork in named, "turn 0, message 0 (user)" in named) == (True, True), named
    assert await lived(live, fork, says=False) == before


async def test_a_side_request_is_sampled_and_no_difference(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    session = await live.open()
    before = await lived(live, session)
    (fork,) = await forked(live, session, turn=2, replay=True)
    live.says("A title")
    ask = {"messages": [{"role": "system", "content": "You are a title generator. Write a title."}, user("hi")]}
    with caplog.at_level(logging.WARNING):
        assert (await live.call("POST", f"/sessions/{fork}/v1/chat/completions", ask)).status == 200
    assert not [one for one in caplog.records if "unlike" in one.message]
    assert await lived(live, fork, says=False) == before


async def test_without_replay_an_inherited_request_is_sampled_anew(live: Live) -> None:
    session = await live.open()
    await lived(live, session)
    (fork,) = await forked(live, session, turn=1)
    live.says("other words")
    answer = await live.chat(fork, user("question 0"), assistant(TEXTS[0]), user("question 1"))
    assert json.loads(answer.body)["choices"][0]["message"]["content"] == "other words"


@pytest.mark.parametrize("value", ["yes", 1])
async def test_replay_is_a_boolean(live: Live, value: Any) -> None:
    session = await live.open()
    await lived(live, session)
    answer = await live.call("POST", f"/sessions/{session}/fork", {"turn": 0, "replay": value})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/replay")
