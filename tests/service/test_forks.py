"""Forks: sessions that begin with the exact tokens of another, behind a turn or a sampled token."""

import contextlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.store.files import open_files
from stenograph.store.folder import DataFolder, file_of
from stenograph.store.settings import Durability
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark

from .conftest import Live, assistant, output_ids, running, user

MARK = ModelMark(name="tiny", digest=b"tiny")
Serve = Callable[..., AbstractAsyncContextManager[Live]]


@asynccontextmanager
async def stored(renderer: Renderer, folder: Path, **settings: Any) -> AsyncIterator[Live]:
    """A server with its sessions in a folder."""
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    held = DataFolder(folder, address="")
    store = await open_files(held, [0], durability=Durability.COMMIT, on_failed=print)
    try:
        async with (
            running(engine, renderer, store=store, mark=MARK, **settings) as (url, manager),
            aiohttp.ClientSession() as client,
        ):
            yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
    finally:
        await store.aclose()
        held.close()


async def forked(live: Live, session: str, **place: Any) -> list[str]:
    answer = await live.call("POST", f"/sessions/{session}/fork", place)
    assert answer.status == 200, answer.body
    return [one["session_id"] for one in answer.json()["forks"]]


async def records(live: Live, session: str) -> list[Any]:
    return list((await live.call("GET", f"/sessions/{session}")).json()["records"])


async def samples(live: Live, session: str) -> list[Any]:
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    assert answer.status == 200, answer.body
    return list(answer.json()["samples"])


def prompt_ids(live: Live) -> list[int]:
    """The prompt that the engine got last."""
    return list(live.engine.requests[-1].prompt.ids)


def said(answer: Any) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


async def talked(live: Live, **options: Any) -> tuple[str, list[Script]]:
    """A session of three turns."""
    session = await live.open(**options)
    scripts, messages = [], []
    for number, text in enumerate(("first words of it", "second words of it", "third words of it")):
        scripts.append(live.says(text))
        messages.append(user(f"question {number}"))
        answer = await live.chat(session, *messages)
        assert answer.status == 200, answer.body
        messages.append(assistant(text))
    return session, scripts


TALK = [
    user("question 0"), assistant("first words of it"), user("question 1"), assistant("second words of it"),
    user("question 2"),
]  # fmt: skip


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
async def test_a_fork_goes_on_behind_a_turn_with_its_exact_ids(live: Live, history: str) -> None:
    session, _ = await talked(live, history=history)
    (fork,) = await forked(live, session, turn=1)
    line = (await live.call("GET", f"/sessions/{fork}")).json()["metadata"]["accumulated_token_ids"]
    live.says("another third")
    answer = await live.chat(fork, *TALK)
    assert answer.status == 200, answer.body
    assert prompt_ids(live)[: len(line)] == line
    before, after = await records(live, session), await records(live, fork)
    assert [output_ids(one) for one in after[:2]] == [output_ids(one) for one in before[:2]]
    assert (len(after), said(answer)) == (3, "another third")
    assert len(await records(live, session)) == 3


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("token", [0, 1, 3])
async def test_a_cut_reply_is_continued_and_the_whole_is_one_reply(
    live: Live, history: str, turn: int, token: int
) -> None:
    session, scripts = await talked(live, history=history)
    (fork,) = await forked(live, session, turn=turn, token=token)
    whole = prompt_of = live.engine.requests[turn].prompt.ids
    rest = live.says(" and another end")
    answer = await live.chat(fork, *TALK[: 2 * turn + 1])
    assert answer.status == 200, answer.body
    kept = scripts[turn].ids[:token]
    assert prompt_ids(live) == [*prompt_of, *kept]
    assert output_ids((await records(live, fork))[turn]) == [*kept, *rest.ids]
    tokenizer = live.renderer.tokenizer
    assert said(answer) == tokenizer.decode([*kept, *rest.ids[:-1]])
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(whole), token + len(rest.ids))
    live.says("more")
    after = await live.chat(fork, *TALK[: 2 * turn + 1], assistant(said(answer)), user("on"))
    assert after.status == 200, after.body
    assert prompt_ids(live)[: len(prompt_of) + token + len(rest.ids)] == [*prompt_of, *kept, *rest.ids]


async def test_a_sample_trains_what_its_fork_sampled_and_names_the_place(live: Live) -> None:
    session, scripts = await talked(live)
    (fork,) = await forked(live, session, turn=1, token=2, group="branch")
    rest = live.says("own words")
    await live.chat(fork, *TALK[:3])
    (sample,) = await samples(live, fork)
    place = {"session": session, "turn": 1, "token": 2}
    assert (sample["metadata"]["forked_from"], sample["metadata"]["group"]) == (place, "branch")
    first, second = sample["turns"]
    assert (first["inherited"], second["inherited"]) == (len(scripts[0].ids), 2)
    start = len(sample["tokens"]) - sample["response_length"]
    trained = [sample["tokens"][start + at] for at, one in enumerate(sample["loss_mask"]) if one]
    assert trained == list(rest.ids)
    assert [bool(one) for one in sample["rollout_log_probs"]] == [bool(one) for one in sample["loss_mask"]]
    assert sample["metadata"]["custody"]["trained"] == [1]
    (whole,) = await samples(live, session)
    assert sum(whole["loss_mask"]) == sum(len(one.ids) for one in scripts)


async def test_accounts_count_each_token_once(live: Live) -> None:
    session, scripts = await talked(live)
    forks = await forked(live, session, turn=2, token=1, n=3)
    own = 0
    for number, fork in enumerate(forks):
        own += len(live.says("x" * (number + 1)).ids)
        await live.chat(fork, *TALK)
        own += len(live.says("again").ids)
        await live.chat(fork, *TALK)  # another try takes the place of the first
    sampled = own + sum(len(one.ids) for one in scripts)
    whole = (await live.call("GET", "/accounts")).json()["whole"]
    assert (whole["sampled"], sum(whole["tokens"].values())) == (sampled, sampled)
    await samples(live, forks[0])
    for one in (session, *forks):
        await live.call("DELETE", f"/sessions/{one}")
    assert (await live.call("GET", "/accounts")).json()["whole"]["sampled"] == sampled


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
async def test_a_fork_outlives_a_restart_and_the_session_before_it(
    renderer: Renderer, tmp_path: Path, history: str
) -> None:
    async with stored(renderer, tmp_path) as live:
        session, scripts = await talked(live, history=history)
        (fork,) = await forked(live, session, turn=2, token=3)
        (other,) = await forked(live, fork, turn=1)
        assert (await live.call("DELETE", f"/sessions/{session}")).status == 204
        prompt = list(live.engine.requests[2].prompt.ids)
    async with stored(renderer, tmp_path) as live:
        assert [output_ids(one) for one in await records(live, other)] == [list(one.ids) for one in scripts[:2]]
        rest = live.says(" rest")
        answer = await live.chat(fork, *TALK)
        assert answer.status == 200, answer.body
        assert prompt_ids(live) == [*prompt, *scripts[2].ids[:3]]
        before = await samples(live, fork)
    async with stored(renderer, tmp_path) as live:
        assert output_ids((await records(live, fork))[2]) == [*scripts[2].ids[:3], *rest.ids]
        assert await samples(live, fork) == before


async def test_a_completion_does_not_take_the_place_of_a_cut_turn(live: Live) -> None:
    session, scripts = await talked(live, history="linear")
    (fork,) = await forked(live, session, turn=2, token=2)
    line = (await live.call("GET", f"/sessions/{fork}")).json()["metadata"]["accumulated_token_ids"]
    live.says("beside")
    asked = {"prompt": [*line, 5, 6]}
    assert (await live.call("POST", f"/sessions/{fork}/v1/completions", asked)).status == 200
    rest = live.says(" rest")
    answer = await live.chat(fork, *TALK)
    assert answer.status == 200, answer.body
    assert output_ids((await records(live, fork))[2]) == [*scripts[2].ids[:2], *rest.ids]


async def test_a_stream_begins_with_the_cut_tokens_and_a_budget_counts_them(live: Live) -> None:
    session, scripts = await talked(live)
    (fork,) = await forked(live, session, turn=2, token=3)
    rest = live.says(" and on", finish=Finish(reason=FinishReason.LENGTH))
    answer = await live.chat(fork, *TALK, stream=True, max_tokens=3 + len(rest_ids(live, " and on")), logprobs=True)
    pieces = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == live.renderer.tokenizer.decode([*scripts[2].ids[:3], *rest.ids])
    logprobs = [one for choice in choices for one in (choice.get("logprobs") or {}).get("content", [])]
    assert len(logprobs) == 3 + len(rest.ids)
    assert live.engine.requests[-1].params.max_tokens == len(rest.ids)


def rest_ids(live: Live, text: str) -> list[int]:
    return list(live.renderer.tokenizer.encode(text))


@pytest.mark.parametrize(
    ("place", "param"),
    [
        ({"turn": 3}, "/turn"), ({"turn": 0, "token": 99}, "/token"), ({"turn": 0, "n": 0}, "/n"),
        ({"token": 1}, "/turn"), ({"turn": 0, "where": 1}, "/where"),
    ],
)  # fmt: skip
async def test_a_place_that_is_not_there_is_refused(live: Live, place: dict[str, Any], param: str) -> None:
    session, _ = await talked(live)
    answer = await live.call("POST", f"/sessions/{session}/fork", place)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == param
    assert (await live.call("POST", f"/sessions/{'0' * 32}/fork", place)).status == 404


async def test_a_grammar_in_the_middle_of_a_reply_is_refused(live: Live) -> None:
    session, _ = await talked(live)
    (fork,) = await forked(live, session, turn=2, token=2)
    answer = await live.chat(fork, *TALK, response_format={"type": "json_object"})
    assert (answer.status, "was cut at a token" in answer.body.decode()) == (400, True)


async def test_max_tokens_leaves_a_token_to_sample(live: Live) -> None:
    session, scripts = await talked(live)
    (fork,) = await forked(live, session, turn=2, token=3)
    answer = await live.chat(fork, *TALK, max_tokens=3)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/max_tokens"), answer.body
    live.engine.plan(Script(ids=scripts[2].ids[3:4], finish=Finish(reason=FinishReason.LENGTH)))
    answer = await live.chat(fork, *TALK, max_tokens=4)
    assert (answer.status, answer.json()["usage"]["completion_tokens"]) == (200, 4), answer.body


async def test_a_key_gets_the_same_forks(renderer: Renderer, tmp_path: Path) -> None:
    async with stored(renderer, tmp_path) as live:
        session, _ = await talked(live)
        path, body = f"/sessions/{session}/fork", {"turn": 1, "n": 2}
        first = await live.call("POST", path, body, idempotency_key="a")
        again = await live.call("POST", path, body, idempotency_key="a")
        assert first.json() == again.json()
        other = await live.call("POST", path, {"turn": 0, "n": 2}, idempotency_key="a")
        assert other.status == 422


async def test_a_retry_after_the_server_stopped_in_the_middle_of_a_fork_makes_it_anew(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with stored(renderer, tmp_path) as live:
        session, scripts = await talked(live)
        path, body = f"/sessions/{session}/fork", {"turn": 1}
        (first,) = (await live.call("POST", path, body, idempotency_key="a")).json()["forks"]
    with contextlib.closing(sqlite3.connect(file_of(tmp_path, 0))) as rows, rows:
        of_fork = "SELECT number FROM sessions WHERE id = ?"
        rows.execute(f"DELETE FROM rows WHERE session = ({of_fork})", (first["session_id"],))
    async with stored(renderer, tmp_path) as live:
        assert (await live.call("GET", f"/sessions/{first['session_id']}")).status == 404
        (fork,) = (await live.call("POST", path, body, idempotency_key="a")).json()["forks"]
        assert [output_ids(one) for one in await records(live, fork["session_id"])] == [
            list(one.ids) for one in scripts[:2]
        ]
        assert (await live.call("DELETE", f"/sessions/{first['session_id']}")).status == 204


async def test_random_forks_of_forks_continue_their_exact_ids(live: Live) -> None:
    """Each engine prompt is the line up to the place, and each record the whole reply."""
    chance = random.Random(7)
    session, _ = await talked(live)
    open_ones = [session]
    for number in range(60):
        parent = chance.choice(open_ones)
        view = (await live.call("GET", f"/sessions/{parent}")).json()
        turn = chance.randrange(len(view["records"]))
        node = view["metadata"]["tree"]["nodes"][turn]
        start, end = node["completion_span"]
        token = chance.randrange(end - start)
        (fork,) = await forked(live, parent, turn=node["id"], token=token)
        messages = view["records"][turn]["request"]["messages"]
        rest = live.says(f"words {number}")
        answer = await live.chat(fork, *messages)
        assert answer.status == 200, answer.body
        line = (await live.call("GET", f"/sessions/{fork}")).json()["metadata"]["accumulated_token_ids"]
        assert line == [*prompt_ids(live), *rest.ids]
        assert prompt_ids(live)[start : start + token] == output_ids(view["records"][turn])[:token]
        assert sum((await samples(live, fork))[0]["loss_mask"]) == len(rest.ids)
        open_ones.append(fork)
