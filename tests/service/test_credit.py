"""Rewards of turns and of tokens: kept with the outcome, in samples by token, in the rows of trainers with a place."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from stenograph.client import Client
from stenograph.client.batch import Rollout, RolloutGroup
from stenograph.client.samples import DecodedSamples, decoded
from stenograph.trainers import verl
from stenograph.trainers.dicts import areal, skyrl
from stenograph.trainers.rows import WrongRows

from .conftest import Live, assistant, user
from .test_durable import Serve, folder, kept

__all__ = ["folder", "kept"]


async def rollout(live: Live) -> tuple[str, list[int]]:
    """A session of two turns, and how many tokens each sampled."""
    session = await live.open()
    live.says("one")
    await live.chat(session, user("a"))
    live.says("two and more")
    await live.chat(session, user("a"), assistant("one"), user("b"))
    sample = await sample_of(live, session)
    return session, [row["end"] - row["start"] for row in sample["turns"]]


async def sample_of(live: Live, session: str, **fields: Any) -> dict[str, Any]:
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", **fields})
    assert answer.status == 200, answer.body
    (sample,) = answer.json()["samples"]
    return dict(sample)


def credit(sizes: list[int]) -> dict[str, Any]:
    return {
        "reward": 1.0,
        "turns": [{"turn": 0, "reward": 0.5}, {"turn": 1, "reward": -2.0}],
        "tokens": [{"turn": 1, "rewards": [float(at) for at in range(sizes[1])]}],
    }


async def test_rewards_of_turns_and_tokens_stand_at_their_tokens(live: Live) -> None:
    session, sizes = await rollout(live)
    assert "token_rewards" not in await sample_of(live, session)
    said = credit(sizes)
    answer = await live.call("PUT", f"/sessions/{session}/outcome", said)
    assert answer.json()["outcome"] == {**said, "verdict": "ok", "detail": None}
    sample = await sample_of(live, session)
    trained = [one for one, mask in zip(sample["token_rewards"], sample["loss_mask"], strict=True) if mask]
    of_second = [float(at) for at in range(sizes[1])]
    of_second[-1] -= 2.0
    assert trained == [*[0.0] * (sizes[0] - 1), 0.5, *of_second]
    assert sum(sample["token_rewards"]) == sum(trained)
    cut = await sample_of(live, session, max_seq_len=len(sample["tokens"]) - 1)
    assert cut["token_rewards"][-1] == of_second[-2] - 2.0, "the turn's reward is on its last token in the sample"
    await live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0})
    assert "token_rewards" not in await sample_of(live, session)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"turns": [{"turn": 7, "reward": 1}]}, "no turn 7: its turns are [0, 1]"),
        ({"tokens": [{"turn": 0, "rewards": [1.0]}]}, "not 1."),
        ({"turns": [{"turn": 0, "reward": 1}, {"turn": 0, "reward": 2}]}, "0 stands twice in turns"),
        ({"turns": [{"turn": 0}]}, "reward"),
        ({"tokens": [{"turn": 0, "rewards": [None]}]}, "float"),
    ],
)
async def test_rewards_of_what_was_not_sampled_are_refused(live: Live, body: dict[str, Any], words: str) -> None:
    session, _ = await rollout(live)
    answer = await live.call("PUT", f"/sessions/{session}/outcome", body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]
    assert (await live.call("GET", f"/sessions/{session}/outcome")).json()["outcome"] is None


async def test_rewards_of_turns_and_tokens_survive_a_restart(kept: Serve) -> None:
    async with kept() as live:
        session, sizes = await rollout(live)
        await live.call("PUT", f"/sessions/{session}/outcome", credit(sizes))
        before = await sample_of(live, session)
    async with kept() as live:
        assert (await sample_of(live, session))["token_rewards"] == before["token_rewards"]


@pytest.mark.parametrize("history", ["linear", "tree"])
async def test_a_reward_of_a_turn_replaced_later_is_said_and_not_lost(live: Live, history: str) -> None:
    session = await live.open(history=history)
    live.says("one")
    await live.chat(session, user("a"))
    await live.call("PUT", f"/sessions/{session}/outcome", {"turns": [{"turn": 0, "reward": 0.5}]})
    live.says("another")
    assert (await live.chat(session, user("a"))).status == 200
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    assert (answer.status, answer.json()["error"]["code"]) == (422, "samples_inconsistent")
    assert "later turns replaced: [0]" in answer.json()["error"]["message"]
    await live.call("PUT", f"/sessions/{session}/outcome", {"turns": [{"turn": 1, "reward": 0.5}]})
    assert sum((await sample_of(live, session))["token_rewards"]) == 0.5


async def decoded_samples(live: Live) -> DecodedSamples:
    session, sizes = await rollout(live)
    await live.call("PUT", f"/sessions/{session}/outcome", credit(sizes))
    return decoded((await live.call("POST", f"/sessions/{session}/samples", {})).body)


async def test_trainers_with_a_place_for_them_get_them_and_others_say_that_they_have_none(live: Live) -> None:
    samples = await decoded_samples(live)
    (sample,) = samples
    assert sample.token_rewards is not None
    batch = verl.padded_batch(samples, pad_id=0, rewards=[1.0])
    expected = sample.token_rewards.copy()
    expected[-1] += 1.0
    np.testing.assert_array_equal(batch["rm_scores"][0], expected.astype(np.float32))
    with pytest.raises(WrongRows, match="one reward for a rollout"):
        areal(sample, reward=1.0)
    areal(dataclasses.replace(sample, token_rewards=None), reward=1.0)


async def test_skyrl_has_a_reward_for_each_token(live: Live) -> None:
    (sample,) = samples = await decoded_samples(live)
    assert sample.token_rewards is not None
    ended = Rollout(
        task="t", group="g", session_id="s", end="ok", reward=1.0, error=None, samples=samples, seconds=1.0, num_tries=1
    )
    out = skyrl([RolloutGroup(index=0, name="g", task="t", is_whole=True, rollouts=(ended,), others=())])
    expected = sample.token_rewards.copy()
    expected[-1] += 1.0
    assert out["rewards"] == [expected.tolist()]


async def test_the_client_says_rewards_of_turns_and_tokens(live: Live) -> None:
    async with Client(live.url) as client, client.session() as session:
        live.says("one")
        await live.chat(session.id, user("a"))
        (plain,) = await session.samples()
        await session.outcome(1.0, turns={0: 0.25}, tokens={0: [1.0] * plain.num_trained})
        (sample,) = await session.samples()
        assert sample.token_rewards is not None
        assert sample.token_rewards.sum() == plain.num_trained + 0.25
