"""A rollout's outcome: said, shown, in its samples, and counted when the session ends."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from safetensors.numpy import load

from stenograph.core.outcome import TokenFate
from stenograph.core.types import Finish, FinishReason

from .conftest import Answer, Live, user


async def rollout(live: Live, **options: Any) -> str:
    session = await live.open(**options)
    live.says("one")
    assert (await live.chat(session, user("a"))).status == 200
    return session


async def samples(live: Live, session: str, **fields: Any) -> Any:
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", **fields})
    assert answer.status == 200, answer.body
    return answer.json()


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({}, {"reward": None, "verdict": "ok", "detail": None}),
        ({"reward": 1}, {"reward": 1.0, "verdict": "ok", "detail": None}),
        (
            {"reward": {"tests": 0.5, "style": -1}, "verdict": "agent_failed", "detail": "loop ☃"},
            {"reward": {"tests": 0.5, "style": -1.0}, "verdict": "agent_failed", "detail": "loop ☃"},
        ),
        ({"verdict": "aborted", "reward": None}, {"reward": None, "verdict": "aborted", "detail": None}),
    ],
)
async def test_an_outcome_that_was_said_is_shown_and_stands_in_the_samples(
    live: Live, said: Mapping[str, Any], kept: Mapping[str, Any]
) -> None:
    session = await rollout(live, group="task-17")
    path = f"/sessions/{session}/outcome"
    assert (await live.call("GET", path)).json() == {"session_id": session, "outcome": None}
    assert (await live.call("PUT", path, {"reward": 0.25, "verdict": "infra_failed"})).status == 200
    answer = await live.call("PUT", path, said)  # in place of the first
    assert (answer.status, answer.json()) == (200, {"session_id": session, "outcome": kept})
    assert (await live.call("GET", path)).json() == answer.json()
    made = await samples(live, session)
    (sample,) = made["samples"]
    assert (sample["reward"], sample["outcome"], sample["metadata"]["group"]) == (
        kept["reward"], kept["verdict"], "task-17",
    )  # fmt: skip
    assert (made["session_metadata"]["outcome"], made["session_metadata"]["group"]) == (kept, "task-17")
    payload = (await live.call("POST", f"/sessions/{session}/samples", {})).body
    (in_tensors,) = json.loads(load(payload)["_samples_meta"].tobytes())["samples"]
    assert (in_tensors["reward"], in_tensors["outcome"]) == (kept["reward"], kept["verdict"])
    (listed,) = (await live.call("GET", "/sessions")).json()["sessions"]
    assert (listed["outcome"], listed["group"]) == (kept, "task-17")


async def test_what_failed_by_infrastructure_is_left_out_and_counted(live: Live) -> None:
    session = await rollout(live)
    assert (await samples(live, session))["samples"][0]["reward"] is None
    await live.call("PUT", f"/sessions/{session}/outcome", {"verdict": "infra_failed", "detail": "disk full"})
    made = await samples(live, session)
    assert (made["samples"], made["empty_reason"]) == ([], "infra_failed")
    every = await samples(live, session, include_failed=True)
    (sample,) = every["samples"]
    assert (sample["outcome"], sample["reward"], every["empty_reason"]) == ("infra_failed", None, None)
    num_sampled = sum(sample["loss_mask"])
    assert made["session_metadata"]["left_out"] == {"infra_failed": {"strands": 1, "sampled_tokens": num_sampled}}
    assert every["session_metadata"]["left_out"] == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"verdict":"fine"}', "/verdict"),
        (b'{"reward":true}', "/reward"),
        (b'{"reward":"1"}', "/reward"),
        (b'{"reward":{"a":null}}', "/reward"),
        (b'{"reward":[1]}', "/reward"),
        (b'{"rewards":1}', "/rewards"),
        (b'{"detail":1}', "/detail"),
        (b"[]", None),
        (b'{"reward":NaN}', None),
        (b'{"reward":1e999}', "/reward"),
    ],
)
async def test_an_outcome_that_is_none_is_refused_and_changes_nothing(
    live: Live, body: bytes, param: str | None
) -> None:
    session = await rollout(live)
    path = f"/sessions/{session}/outcome"
    await live.call("PUT", path, {"reward": 0.5})
    answer = await live.call("PUT", path, body)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == param
    assert (await live.call("GET", path)).json()["outcome"]["reward"] == 0.5


async def test_a_session_that_is_gone_has_no_outcome(live: Live) -> None:
    session = await rollout(live)
    await live.call("DELETE", f"/sessions/{session}")
    for method in ("GET", "PUT"):
        assert (await live.call(method, f"/sessions/{session}/outcome", {} if method == "PUT" else None)).status == 404


async def test_sessions_that_end_are_counted_by_their_verdict_and_those_without_one_too(live: Live) -> None:
    for said in ({"reward": 1.0}, {"verdict": "infra_failed"}, None, None):
        session = await live.open()
        if said is not None:
            await live.call("PUT", f"/sessions/{session}/outcome", said)
        await live.call("DELETE", f"/sessions/{session}")
    page = (await live.call("GET", "/metrics")).body.decode()
    counts = {
        line.split('"')[1]: float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("stenograph_session_outcomes_total{")
    }
    assert counts == {"ok": 1, "agent_failed": 0, "infra_failed": 1, "aborted": 0, "none": 2}


@pytest.mark.parametrize("group", ["", "x" * 257, 1])
async def test_a_group_is_a_short_name(live: Live, group: object) -> None:
    answer = await live.call("POST", "/sessions", {"group": group})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/group")


async def test_each_sampled_token_has_one_fate_when_its_session_ends(live: Live) -> None:
    every: dict[str, int] = {}

    async def ended(session: str, **fates: int) -> None:
        await live.call("DELETE", f"/sessions/{session}")
        for fate, num_tokens in fates.items():
            every[fate] = every.get(fate, 0) + num_tokens
        assert counted(await live.call("GET", "/metrics")) == {**dict.fromkeys(FATES, 0), **every}

    session = await live.open(history="linear")
    live.says("four")
    await live.chat(session, user("a"))
    (sample,) = (await samples(live, session, max_seq_len=len(live.engine.requests[-1].prompt.ids) + 2))["samples"]
    assert sum(sample["loss_mask"]) == 2  # all the same trained: what a later turn replaces of it is a retry
    live.says("one")
    await live.chat(session, user("a"))
    await ended(session, trained=2, retry=3, discarded=4)

    session = await rollout(live)
    live.says("no", finish=Finish(reason=FinishReason.ABORT))
    await live.chat(session, user("b"))
    await ended(session, aborted=2, discarded=4)

    session = await rollout(live)
    await live.call("PUT", f"/sessions/{session}/outcome", {"verdict": "infra_failed"})
    assert (await samples(live, session))["samples"] == []
    await ended(session, infra=4)


FATES = tuple(TokenFate)


def counted(page: Answer) -> dict[str, int]:
    rows = [row for row in page.body.decode().splitlines() if row.startswith("stenograph_ended_session_tokens_total{")]
    return {row.split('"')[1]: int(float(row.split()[-1])) for row in rows}
