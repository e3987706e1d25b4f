"""Weights through the client: swapped into a running embedded engine, named, and refused in words."""

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from standins.tiny.llama import write_tiny_folder
from stenograph.client import Client, RolloutSession, ServerRefused, SyncClient, WrongKey, silent
from tests.process.test_serve import running


async def agent(task: str, session: RolloutSession) -> float:
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as chat:
        await chat.chat.completions.create(model="any", messages=[{"role": "user", "content": task}], max_tokens=4)
    return 1.0


async def versions(client: Client) -> list[str]:
    """The versions that sampled a rollout."""
    (rollout,) = (await client.rollouts(agent, ["hi"], progress=silent)).rollouts
    assert rollout.samples is not None
    return [span.version for sample in rollout.samples for span in sample.weight_spans]


@pytest.mark.timeout(600)
def test_the_client_swaps_weights_into_a_running_engine(tmp_path: Path) -> None:
    model, other = write_tiny_folder(tmp_path / "model"), write_tiny_folder(tmp_path / "weights" / "new", seed=1)
    keys = ["--api-key", "for-trainers", "--admin-key", "for-weights"]

    async def trainer(url: str) -> None:
        async with Client(url, api_key="for-trainers", admin_key="for-weights") as client:
            assert await versions(client) == ["0"]
            await client.update_weights(str(other), version="7")
            assert await versions(client) == ["7"]
            await client.pause()
            await client.name_weights("8")
            await client.resume()
            assert await versions(client) == ["8"]
            with pytest.raises(ServerRefused, match="nowhere"):
                await client.update_weights(str(other.parent / "nowhere"))
            with pytest.raises(WrongKey, match="weights-dir"):
                await client.update_weights(str(model))
        async with Client(url, api_key="for-trainers") as client:
            with pytest.raises(WrongKey):
                await client.update_weights(str(other))

    with running("--model", str(model), "--weights-dir", str(other.parent), *keys) as (url, _):
        asyncio.run(trainer(url))
        with SyncClient(url, api_key="for-trainers", admin_key="for-weights") as client:
            client.pause("abort")
            client.update_weights(str(other), version="9")
            client.name_weights("10")
            client.resume()
            with client.session() as session:
                assert session.api_key.startswith(f"stg-{session.id}-")
