"""A fleet with faults and updates trains what it samples: figures of a simulated day, with a policy of dropping groups
beside it. `scripts/test-accounts` has a larger fleet.
"""

import asyncio
import os
import random
from typing import Any

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import GenerateRequest
from stenograph.text.renderer import Renderer

from .conftest import END, Live, running, user
from .test_accounts import PATIENT, accounts, num_sampled
from .test_claims import claim, receipt

NUM_GROUPS = int(os.environ.get("FLEET_GROUPS", "6"))
GROUP_SIZE, NUM_TURNS, TURN_TOKENS = 4, 8, (20, 60)
FAULTS = 0.05
"""Of the turns: an engine fails after some of the tokens."""
CRASHES = 0.2
"""Of the trainer's steps: it never says that it trained."""
UPDATE_S = 30.0
TOKENS_PER_S, TOOL_S = 50.0, 10.0
"""Of each of the running rollouts; and the time of a tool after each turn."""


class Fleet:
    """Rollouts, an engine that fails, and a trainer that crashes. Time is the clock's: it passes as tokens are
    sampled."""

    def __init__(self, seed: int) -> None:
        self.random, self.clock = random.Random(seed), ManualClock()
        self.live: Live
        self.failed_groups: set[str] = set()
        self.tokens_of = dict[str, int]()
        self.num_updates = 0
        self._updated_at = self.clock.monotonic()
        self._time = asyncio.Lock()
        """None passes within a step of the trainer: the others' tokens would end its lease."""

    def model(self, request: GenerateRequest) -> Script:
        """A turn's tokens, and its fault."""
        ids = tuple(self.random.randint(10, 99) for _ in range(self.random.randint(*TURN_TOKENS)))
        if self.random.random() < FAULTS:
            return Script(ids=ids[: self.random.randint(0, len(ids))], error=UpstreamUnreachable("the engine broke"))
        return Script(ids=(*ids, END), finish=Finish(reason=FinishReason.STOP, matched=END))

    async def rollout(self, group: str) -> None:
        """One agent, which asks again after an error."""
        session, messages = await self.live.open(group=group), list[dict[str, Any]]()
        for number in range(NUM_TURNS):
            messages.append(user(f"question {number}"))
            while (answer := await self.live.chat(session, *messages)).status != 200:
                assert answer.status == 502, answer.body
                self.failed_groups.add(group)
            body = answer.json()
            messages.append(body["choices"][0]["message"])
            num = body["usage"]["completion_tokens"]
            self.tokens_of[group] = self.tokens_of.get(group, 0) + num
            async with self._time:
                self.clock.advance((num / TOKENS_PER_S + TOOL_S) / (NUM_GROUPS * GROUP_SIZE))
                await self.train()
        assert (await self.live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0})).status == 200

    async def train(self, *, at_once: bool = False) -> None:
        """Every 30 s: train what has ended, and update the weights in place."""
        if self.clock.monotonic() < self._updated_at + UPDATE_S and not at_once:
            return
        self._updated_at = self.clock.monotonic()
        self.num_updates += 1
        mine = await claim(self.live, step=self.num_updates, n=10_000, lease_s=UPDATE_S / 2)
        if self.random.random() >= CRASHES or at_once:
            assert (await receipt(self.live, mine["claim"], *mine["sessions"]))["lost"] == []
        update = {"new_version": str(self.num_updates)}
        assert (await self.live.call("POST", "/update_weight_version", update)).status == 200


@pytest.mark.timeout(3600)
async def test_a_fleet_with_faults_trains_what_it_samples(renderer: Renderer) -> None:
    fleet = Fleet(seed=1)
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=65536, model=fleet.model)
    async with (
        running(engine, renderer, clock=fleet.clock) as (url, manager),
        aiohttp.ClientSession(timeout=PATIENT) as client,
    ):
        fleet.live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        await asyncio.gather(*(fleet.rollout(f"g{at // GROUP_SIZE}") for at in range(NUM_GROUPS * GROUP_SIZE)))
        fleet.clock.advance(UPDATE_S)
        await fleet.train(at_once=True)
        whole, sampled = (await accounts(fleet.live))["whole"], await num_sampled(fleet.live)
    assert whole["sampled"] == sampled
    kept = sum(num for group, num in fleet.tokens_of.items() if group not in fleet.failed_groups)
    share, dropped = whole["tokens"]["trained"] / sampled, kept / sampled
    print(  # noqa: T201 -- the figure, for pytest -s
        f"{NUM_GROUPS} groups of {GROUP_SIZE}, {sampled:,} tokens sampled, {fleet.num_updates} updates:"
        f" trained {share:.3f}, with failed groups dropped {dropped:.3f}; lost {whole['tokens']['infra']:,}"
    )
    assert share >= 0.97
    assert dropped < share
