"""A trainer in sixty lines: rollouts by the client, a policy gradient in torch, new weights into the running engine.

    stenograph serve --model FOLDER --weights-dir WEIGHTS
    python examples/trainer.py --model FOLDER --weights-dir WEIGHTS      # needs torch, transformers, openai

The agent is any agent; here it asks one question, and is rewarded for letters: short, and easy to see improve.
"""

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from stenograph.client import Client, RolloutSession, silent
from stenograph.trainers import dicts, rows


async def agent(task: str, session: RolloutSession) -> float:
    """The agent, and its reward: the share of letters in what it said."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as chat:
        messages: Any = [{"role": "user", "content": task}]
        reply = await chat.chat.completions.create(model="any", messages=messages, max_tokens=16)
    text = reply.choices[0].message.content or ""
    return sum(letter.isascii() and letter.isalpha() for letter in text) / max(1, len(text))


def update(policy: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]) -> float:
    """One clipped step; returns the largest distance of recorded and recomputed log-probabilities, in nats."""
    logits = policy(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    nats = (logits / batch["temperatures"][..., None]).log_softmax(-1).gather(-1, batch["targets"][..., None])[..., 0]
    distance = (nats - batch["log_probs"])[batch["mask"]]
    ratio, advantage = distance.exp(), batch["advantages"][batch["mask"]]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(distance.detach().abs().max())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args()
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.lr)
    tasks = ["Say a word.", "Say two words.", "What is your name?", "Hello!"]
    sampling: Any = {"force": {"temperature": 1.0, "top_p": 1.0}}
    async with Client(options.url) as client:
        for step in range(options.steps):
            batch = await client.rollouts(
                agent, tasks, group_size=8, timeout_s=600.0, session={"sampling": sampling}, progress=silent
            )
            pairs = [(one, a) for r, a in rows.advantages(batch.groups) for one in r.samples or () if one.num_trained]
            if not pairs:
                raise SystemExit(f"step {step}: no rollout has a sampled token: {batch!r}")
            made = dicts.padded([one for one, _ in pairs], [a for _, a in pairs], pad_id=0)
            distance = update(policy, optimizer, {name: torch.from_numpy(row) for name, row in made.items()})
            reward = sum(rows.number_of(r.reward) or 0.0 for r in batch.rollouts) / len(batch.rollouts)
            print(f"step {step}: reward {reward:.3f}, recorded and recomputed differ by at most {distance:.1e} nats")
            folder = (options.weights_dir / "policy").resolve()  # the server may stand in another folder
            policy.save_pretrained(folder)
            await client.update_weights(str(folder), version=str(step + 1))


if __name__ == "__main__":
    asyncio.run(main())
