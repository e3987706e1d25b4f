"""Scores of recorded tokens: what is scored, what is kept of it, and what is refused."""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import ScriptedEngine, scripted_score
from stenograph.client import Client
from stenograph.client.samples import decoded
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.text.renderer import Renderer

from .conftest import Live, assistant, running, user
from .test_durable import Serve as Kept
from .test_durable import folder, kept

__all__ = ["folder", "kept"]

Serve = Callable[..., AbstractAsyncContextManager[Live]]


async def rollout(live: Live, *, num_turns: int = 2, **options: Any) -> str:
    session = await live.open(**options)
    messages: list[dict[str, Any]] = []
    for number in range(num_turns):
        live.says(f"reply {number}")
        messages.append(user(f"question {number}"))
        answer = await live.chat(session, *messages)
        assert answer.status == 200, answer.body
        messages.append(assistant(f"reply {number}"))
    return session


async def sample_of(live: Live, session: str, **fields: Any) -> dict[str, Any]:
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", **fields})
    assert answer.status == 200, answer.body
    (sample,) = answer.json()["samples"]
    return dict(sample)


def expected(sample: Mapping[str, Any], policy: str | None = None) -> list[list[float]]:
    ids = sample["tokens"]
    return [[scripted_score(at, ids[at], policy) for at in range(row["start"], row["end"])] for row in sample["turns"]]


async def scored(live: Live, session: str, **fields: Any) -> dict[str, Any]:
    answer = await live.call("POST", f"/sessions/{session}/scores", fields)
    assert answer.status == 200, answer.body
    return dict(answer.json())


async def test_each_sampled_token_of_a_line_is_scored_in_one_pass(live: Live) -> None:
    session = await rollout(live)
    told = await scored(live, session, name="teacher", top_k=2)
    sample = await sample_of(live, session)
    assert [turn["log_probs"] for turn in told["turns"]] == expected(sample)
    assert [turn["node_id"] for turn in told["turns"]] == [row["node_id"] for row in sample["turns"]]
    assert told["turns"][0]["top_ids"] == [0, 1] * len(told["turns"][0]["log_probs"])
    assert (told["engine"], told["policy"], told["was_scored"]) == ("scripted", None, False)
    (request,) = live.engine.scored
    assert list(request.ids) == sample["tokens"]
    assert request.start == sample["turns"][0]["start"]


async def test_what_is_scored_already_is_not_scored_again_but_by_other_weights(live: Live) -> None:
    session = await rollout(live)
    first = await scored(live, session)
    again = await scored(live, session)
    assert again == {**first, "was_scored": True}
    assert len(live.engine.scored) == 1
    for fields in ({"policy": "teacher"}, {"top_k": 1}, {"prompt": "x"}):
        assert not (await scored(live, session, **fields))["was_scored"]
    live.engine.weight_version = "v2"
    newer = await scored(live, session, prompt="x")
    assert (newer["was_scored"], newer["weight_version"]) == (False, "v2")
    live.says("more")
    messages = [user("question 0"), assistant("reply 0"), user("question 1"), assistant("reply 1"), user("m")]
    assert (await live.chat(session, *messages)).status == 200
    assert not (await scored(live, session, prompt="x"))["was_scored"]


async def test_unnamed_weights_are_the_same_in_one_process_until_some_change(kept: Kept) -> None:
    async with kept() as live:
        session = await rollout(live)
        first = await scored(live, session)
        assert (await scored(live, session))["was_scored"]
        live.manager.weights.begin_change()
        live.manager.weights.end_change("")
        assert not (await scored(live, session))["was_scored"]
        live.engine.weight_version = "default"  # an engine's word for weights without a name
        assert (await scored(live, session))["was_scored"]
    async with kept() as live:
        again = await scored(live, session)
        assert (again["was_scored"], again["turns"]) == (False, first["turns"])
        assert (await scored(live, session))["was_scored"]
        live.manager.weights.name("v1")
        assert not (await scored(live, session))["was_scored"]
    async with kept() as live:
        live.manager.weights.name("v1")
        assert (await scored(live, session))["was_scored"]


async def test_unnamed_weights_that_change_during_a_pass_leave_no_annotation(live: Live) -> None:
    session = await rollout(live)
    live.engine.on_score = lambda _: live.manager.weights.begin_change()
    answer = await live.call("POST", f"/sessions/{session}/scores", {})
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (await live.call("GET", f"/sessions/{session}/scores")).json()["scores"] == []


async def test_scores_are_held_as_tokens_are_and_none_are_made_without_room(serve: Serve) -> None:
    async with serve(max_held_tokens=200) as live:
        session = await rollout(live)
        num_tokens = live.manager.sessions.num_held_tokens
        told = await scored(live, session, top_k=2)
        assert live.manager.sessions.num_held_tokens == num_tokens + 3 * told["num_scored"]
        await scored(live, session)
        assert live.manager.sessions.num_held_tokens == num_tokens + told["num_scored"]
        refused = await scored_until_refused(live, session)
        assert (refused.status, refused.json()["error"]["code"]) == (429, "limit_exceeded")
        await live.call("DELETE", f"/sessions/{session}")
        assert live.manager.sessions.num_held_tokens == 0


async def scored_until_refused(live: Live, session: str) -> Any:
    for number in range(60):
        answer = await live.call("POST", f"/sessions/{session}/scores", {"name": f"n{number}", "top_k": 20})
        if answer.status != 200:
            return answer
    raise AssertionError("there was room for all of them")


async def test_messages_of_a_prompt_are_rendered_with_the_tools_of_each_line(live: Live, renderer: Renderer) -> None:
    session = await live.open()
    for name in ("search", "delete"):
        live.says(f"by {name}")
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        assert (await live.chat(session, user(name), tools=[tool])).status == 200
    await scored(live, session, prompt=[user("q")])
    prompts = [renderer.tokenizer.decode(one.ids[: one.start]) for one in live.engine.scored]
    assert [[name in text for name in ("search", "delete")] for text in prompts] == [[True, False], [False, True]]


async def test_another_prompt_stands_in_place_of_the_first_and_changes_nothing_recorded(
    live: Live, renderer: Renderer
) -> None:
    session = await rollout(live)
    before = (await live.call("GET", f"/sessions/{session}")).body
    told = await scored(live, session, prompt=[{"role": "system", "content": "The answer is 4."}, user("q")])
    sample = await sample_of(live, session)
    num_first = sample["turns"][0]["start"]
    (request,) = live.engine.scored
    assert list(request.ids[request.start :]) == sample["tokens"][num_first:]
    text = renderer.tokenizer.decode(request.ids[: request.start])
    assert "The answer is 4." in text
    assert text.endswith("assistant\n")
    assert sum(len(turn["log_probs"]) for turn in told["turns"]) == sum(sample["loss_mask"])
    assert (await live.call("GET", f"/sessions/{session}")).body == before


async def test_named_tokens_are_scored_after_a_question_or_at_a_position(live: Live, renderer: Renderer) -> None:
    session = await rollout(live)
    tokens = ["y", "n"]
    told = await scored(live, session, name="judge", tokens=tokens, question="Is that right?")
    sample = await sample_of(live, session)
    passes = live.engine.scored
    for text, request in zip(tokens, passes, strict=True):
        assert request.ids[-1:] == renderer.tokenizer.encode(text)
        assert list(request.ids[: len(sample["tokens"])]) == sample["tokens"]
        assert told["tokens"][text] == scripted_score(request.start, request.ids[-1])
        shown = renderer.tokenizer.decode(request.ids[len(sample["tokens"]) : -1])
        assert "Is that right?" in shown
        assert shown.endswith("assistant\n")
    assert told["turns"] == []
    at = sample["turns"][1]["start"]
    placed = await scored(live, session, tokens=["y"], position=at)
    assert list(live.engine.scored[-1].ids[:-1]) == sample["tokens"][:at]
    assert placed["tokens"] == {"y": scripted_score(at, live.engine.scored[-1].ids[-1])}
    assert (await scored(live, session, tokens=["y"]))["num_scored"] == 1
    assert list(live.engine.scored[-1].ids[:-1]) == sample["tokens"]


async def test_a_turn_in_several_lines_of_a_tree_is_scored_once(live: Live) -> None:
    session = await live.open(history="tree")
    live.says("one")
    await live.chat(session, user("a"))
    first = [user("a"), assistant("one")]
    for tail in ([user("b")], [user("b"), assistant("to b"), user("again")], [user("c")]):
        live.says(f"to {tail[-1]['content']}")
        assert (await live.chat(session, *first, *tail)).status == 200
    told = await scored(live, session)
    assert sorted(turn["node_id"] for turn in told["turns"]) == [0, 1, 2, 3]
    assert len(live.engine.scored) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "a b"}, "/name"),
        ({"engine": "other"}, "/engine"),
        ({"strand": 1}, "/strand"),
        ({"top_k": 21}, "/top_k"),
        ({"top_k": 0}, "/top_k"),
        ({"tokens": []}, "/tokens"),
        ({"tokens": ["two words of text"]}, "/tokens/0"),
        ({"tokens": ["y", "y"]}, "/tokens"),
        ({"position": 3}, "/position"),
        ({"tokens": ["y"], "position": 10_000}, "/position"),
        ({"tokens": ["y"], "position": 1, "question": "q"}, "/position"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "/prompt/0/role"),
        ({"prompt": []}, "/prompt"),
        ({"prompt": ""}, "/prompt"),
        ({"question": "q"}, "/question"),
        ({"temperature": 1}, "/temperature"),
    ],
)
async def test_a_wrong_request_is_refused_and_scores_nothing(live: Live, body: dict[str, Any], param: str) -> None:
    session = await rollout(live, num_turns=1)
    answer = await live.call("POST", f"/sessions/{session}/scores", body)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == param
    assert live.engine.scored == []


async def test_a_session_without_a_turn_and_one_that_is_not_there_have_no_scores(live: Live) -> None:
    session = await live.open()
    assert (await live.call("POST", f"/sessions/{session}/scores", {})).status == 400
    await live.call("DELETE", f"/sessions/{session}")
    assert (await live.call("POST", f"/sessions/{session}/scores", b"no JSON")).status == 404


async def test_a_client_that_leaves_ends_the_pass(live: Live) -> None:
    session = await rollout(live)
    live.engine.pause()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(live.call("POST", f"/sessions/{session}/scores", {}))
        await live.engine.scoring(1)
        asked.cancel()
    await live.engine.was_left.wait()
    live.engine.resume()
    assert not (await scored(live, session))["was_scored"]
    assert live.engine.unscored == [live.engine.scored[0].request_id]


async def test_many_sessions_are_scored_a_line_each_and_only_once(live: Live) -> None:
    sessions = [await rollout(live, num_turns=1, group="g") for _ in range(6)]
    empty = await live.open(group="g")
    lines = await many(live, group="g", name="teacher")
    assert [line["session_id"] for line in lines[:-1]] == [*sessions, empty]
    assert [line.get("was_scored") for line in lines[:-1]] == [False] * 6 + [None]
    assert lines[-2]["error"]["code"] == "invalid_request"
    num = len(live.engine.scored)
    total = sum(line["num_scored"] for line in lines[:6])
    assert lines[-1] == {"done": True, "sessions": 7, "failed": 1, "scored_tokens": total}
    again = await many(live, sessions=[*sessions, "0" * 32], name="teacher")
    assert [line.get("was_scored") for line in again[:-1]] == [True] * 6 + [None]
    assert again[-1] == {"done": True, "sessions": 7, "failed": 1, "scored_tokens": 0}
    assert len(live.engine.scored) == num


async def test_a_session_that_takes_too_long_has_a_line_of_its_own(serve: Serve) -> None:
    async with serve(request_timeout_s=0.2, scores_in_flight=1) as live:
        slow, quick = [await rollout(live, num_turns=1, group="g") for _ in range(2)]
        live.engine.on_score = lambda _: live.engine.pause() if len(live.engine.scored) == 1 else live.engine.resume()
        lines = await many(live, group="g")
        assert [line.get("session_id") for line in lines] == [slow, quick, None]
        assert (lines[0]["error"]["code"], lines[0]["error"]["status"]) == ("upstream_timeout", 504)
        assert lines[1]["was_scored"] is False
        assert (lines[2]["done"], lines[2]["failed"]) == (True, 1)
        assert live.engine.unscored == [live.engine.scored[0].request_id]


async def many(live: Live, **fields: Any) -> list[dict[str, Any]]:
    answer = await live.call("POST", "/scores", fields)
    assert answer.status == 200, answer.body
    return [json.loads(line) for line in answer.body.splitlines()]


@pytest.mark.parametrize("body", [{}, {"sessions": [], "group": "g"}, {"group": "g", "question": "q"}])
async def test_sessions_nobody_named_are_not_scored(live: Live, body: dict[str, Any]) -> None:
    assert (await live.call("POST", "/scores", body)).status == 400


async def test_no_more_sessions_are_scored_at_once_than_the_setting_allows(serve: Serve) -> None:
    async with serve(scores_in_flight=2) as live:
        for _ in range(5):
            await rollout(live, num_turns=1, group="g")
        live.engine.pause()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(many(live, group="g"))
            await live.engine.scoring(2)
            assert (await live.call("GET", "/health")).status == 200
            assert len(live.engine.scored) == 2
            live.engine.resume()
        assert asked.result()[-1]["sessions"] == 5


async def test_an_engine_of_a_fleet_is_named_by_its_address(renderer: Renderer) -> None:
    engines = [ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096) for _ in range(2)]
    fleet = Fleet([FleetMember(name=f"e{n}", engine=one) for n, one in enumerate(engines)], clock=ManualClock())
    await fleet.start()
    async with running(fleet, renderer) as (url, manager), aiohttp.ClientSession() as client:
        both = [Live(url=url, engine=one, renderer=renderer, manager=manager, client=client) for one in engines]
        for one in both:
            one.says("one")
        session = await both[0].open()
        assert (await both[0].chat(session, user("a"))).status == 200
        await scored(both[0], session, engine="e1")
        assert [len(engine.scored) for engine in engines] == [0, 1]
        other = await scored(both[0], session, engine="e0")  # of one model's name, and perhaps of other weights
        assert (other["was_scored"], [len(engine.scored) for engine in engines]) == (False, [1, 1])
        refused = await both[0].call("POST", f"/sessions/{session}/scores", {"engine": "e2"})
        assert "engine is one of e0, e1" in refused.json()["error"]["message"]


async def test_weights_that_come_between_two_passes_leave_no_annotation(live: Live) -> None:
    session = await rollout(live)
    engine = live.engine
    engine.on_score = lambda request: setattr(engine, "weight_version", f"v{len(engine.scored)}")
    answer = await live.call("POST", f"/sessions/{session}/scores", {"tokens": ["y", "n"]})
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (await live.call("GET", f"/sessions/{session}/scores")).json()["scores"] == []
    told = await scored(live, session, tokens=["y"])  # of one pass: the weights are those that the pass names
    assert told["weight_version"] == "v3"


async def test_annotations_are_there_after_an_eviction_and_a_restart(kept: Kept) -> None:
    async with kept(max_sessions=1, weight_version="v1") as live:
        session = await rollout(live)
        told = await scored(live, session, name="teacher", policy="P☃", top_k=2)
        judged = await scored(live, session, name="judge", tokens=["y", "n"])
        await scored(live, session, name="judge", tokens=["y"], position=3)
        judged = await scored(live, session, name="judge", tokens=["y", "n"])
        listed = (await live.call("GET", f"/sessions/{session}/scores")).json()
        assert [one["name"] for one in listed["scores"]] == ["teacher", "judge"]
        await live.open()
        assert not live.manager.sessions.has(session)
        assert (await live.call("GET", f"/sessions/{session}/scores")).json() == listed
    async with kept(weight_version="v1") as live:
        again = await scored(live, session, name="teacher", policy="P☃", top_k=2)
        assert again == {**told, "was_scored": True}
        assert await scored(live, session, name="judge", tokens=["y", "n"]) == {**judged, "was_scored": True}
        assert live.engine.scored == []
        messages = [user("question 0"), assistant("reply 0"), user("question 1"), assistant("reply 1"), user("m")]
        live.says("goes on")
        assert (await live.chat(session, *messages)).status == 200


async def test_a_session_keeps_no_more_annotations_than_it_may(live: Live) -> None:
    session = await rollout(live, num_turns=1)
    for number in range(64):
        await scored(live, session, name=f"n{number}")
    refused = await live.call("POST", f"/sessions/{session}/scores", {"name": "one-more"})
    assert (refused.status, "the most" in refused.json()["error"]["message"]) == (400, True)
    await scored(live, session, name="n0", top_k=1)


@pytest.mark.parametrize("format_", ["json", "safetensors"])
async def test_samples_have_the_scores_that_are_asked_for_by_name(live: Live, format_: str) -> None:
    session = await rollout(live)
    await scored(live, session, name="teacher")
    await scored(live, session, name="reference", policy="base")
    plain = await sample_of(live, session)
    assert "scores" not in plain
    names = ["teacher", "reference"]
    if format_ == "json":
        found = (await sample_of(live, session, scores=names))["scores"]
    else:
        payload = (await live.call("POST", f"/sessions/{session}/samples", {"scores": names})).body
        (decoded_sample,) = decoded(payload)
        found = {name: values.tolist() for name, values in decoded_sample.scores.items()}
    first = len(plain["tokens"]) - plain["response_length"]
    for name, policy in (("teacher", None), ("reference", "base")):
        flat = [value for turn in expected(plain, policy) for value in turn]
        assert [one for one, mask in zip(found[name], plain["loss_mask"], strict=True) if mask] == flat
        assert [one for one, mask in zip(found[name], plain["loss_mask"], strict=True) if not mask] == [0.0] * (
            len(plain["tokens"]) - first - len(flat)
        )


async def test_samples_refuse_scores_that_are_not_there_or_older_than_a_turn(live: Live) -> None:
    session = await rollout(live, num_turns=1)
    path = f"/sessions/{session}/samples"
    refused = await live.call("POST", path, {"scores": ["teacher"]})
    assert (refused.status, "it has: none" in refused.json()["error"]["message"]) == (400, True)
    await scored(live, session, name="teacher")
    live.says("more")
    assert (await live.chat(session, user("question 0"), assistant("reply 0"), user("on"))).status == 200
    stale = await live.call("POST", path, {"scores": ["teacher"]})
    assert (stale.status, stale.json()["error"]["code"]) == (422, "samples_inconsistent")
    await scored(live, session, name="teacher")
    assert (await live.call("POST", path, {"scores": ["teacher"]})).status == 200


async def test_a_cut_sample_has_the_scores_of_its_tokens(live: Live) -> None:
    session = await rollout(live)
    await scored(live, session, name="teacher")
    whole = await sample_of(live, session, scores=["teacher"])
    cut = await sample_of(live, session, scores=["teacher"], max_seq_len=len(whole["tokens"]) - 2)
    assert cut["scores"]["teacher"] == whole["scores"]["teacher"][:-2]


async def test_the_client_has_scores_as_arrays(live: Live) -> None:
    async with Client(live.url) as client, client.session() as session:
        live.says("one")
        await live.chat(session.id, user("a"))
        scores = await session.score(name="teacher", top_k=3)
        (sample,) = await session.samples(scores=["teacher"])
        (row,) = sample.turns
        of_turn = scores.turns[row["node_id"]]  # type: ignore[index]
        np.testing.assert_array_equal(of_turn, sample.scores["teacher"][sample.loss_mask == 1])
        assert scores.top[0].ids.shape == (len(of_turn), 3)
        judged = await session.score(name="judge", tokens=["y", "n"], question="Right?")
        assert set(judged.tokens) == {"y", "n"}
        assert judged.turns == {}


async def test_an_arrow_stream_has_scores_as_a_map(live: Live) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    session = await rollout(live)
    await scored(live, session, name="teacher")
    body = (await live.call("POST", f"/sessions/{session}/samples", {"scores": ["teacher"], "format": "arrow"})).body
    plain = (await live.call("POST", f"/sessions/{session}/samples", {"format": "arrow"})).body
    ((name, values),) = pyarrow.ipc.open_stream(body).read_all()["scores"][0].as_py()
    assert (name, values) == ("teacher", (await sample_of(live, session, scores=["teacher"]))["scores"]["teacher"])
    assert pyarrow.ipc.open_stream(plain).read_all()["scores"][0].as_py() is None
