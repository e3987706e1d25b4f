"""Clients that chat with a server that may die, each on sessions of its own, and what was acknowledged to them."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from standins.planned_server import AskedRequest, ReplyScript

END = 2
MAX_TURNS = 25
"""Turns of a session; then its client opens another."""


@dataclass(slots=True)
class Turn:
    """A turn that a client has the reply to."""

    ids: list[int]
    reply_id: str
    text: str


@dataclass(slots=True)
class Load:
    """Clients that each work on a session, and what was acknowledged to them."""

    url: str = ""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    sessions: dict[str, list[Turn]] = field(default_factory=dict[str, list[Turn]])
    num_acknowledged: int = 0
    num_asked_again: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def post(self, client: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> Any:
        """Ask until there is an answer: the same body, the same key."""
        while True:
            await self.up.wait()
            url = self.url
            try:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                async with client.post(url + path, json=body, headers=named) as response:
                    answer = await response.read()
                    if response.status == 200:
                        return json.loads(answer)
                    assert response.status in (409, 503), answer  # of a turn that has not ended, of a server that ends
                    await asyncio.sleep(0)
            except (aiohttp.ClientError, ConnectionError):
                self.num_asked_again += 1
                if url == self.url:
                    self.up.clear()

    async def work(self, client: aiohttp.ClientSession, number: int) -> None:
        while not self.is_over:
            session = (await self.post(client, "/sessions", {}))["session_id"]
            turns = self.sessions.setdefault(session, [])
            messages: list[dict[str, Any]] = []
            while len(turns) < MAX_TURNS and not self.is_over:
                messages.append({"role": "user", "content": f"client {number}, question {len(turns)}"})
                key = f"{session}-{len(turns)}"
                body = {"messages": messages, "return_token_ids": True}
                path = f"/sessions/{session}/v1/chat/completions"
                reply = await self.post(client, path, body, idempotency_key=key)
                choice = reply["choices"][0]
                text = choice["message"]["content"]
                turns.append(Turn(ids=choice["token_ids"], reply_id=reply["id"], text=text))
                messages.append({"role": "assistant", "content": text})
                async with self.changed:
                    self.num_acknowledged += 1
                    self.changed.notify_all()

    async def acknowledged(self, num: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_acknowledged >= num)


def unique_replies() -> Any:
    """Each generation its own ids, so that a turn that is made twice, or another's, is seen."""
    drawn = random.Random(17)

    def answer(_: AskedRequest) -> ReplyScript:
        ids = tuple(drawn.randrange(3, 250) for _ in range(drawn.randrange(2, 40)))
        return ReplyScript(ids=(*ids, END), matched=END)

    return answer


async def check(client: aiohttp.ClientSession, load: Load, session: str, turns: list[Turn]) -> None:
    """Every acknowledged turn is there once, with its ids, in its order; one more may be on its way to its client."""
    acknowledged = list(turns)
    async with client.get(f"{load.url}/sessions/{session}") as response:
        assert response.status == 200, await response.text()
        view = await response.json()
    records, metadata = view["records"], view["metadata"]
    kept = [
        [row[1] for row in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]] for record in records
    ]
    assert kept[: len(acknowledged)] == [turn.ids for turn in acknowledged]
    ids = [record["response"]["id"] for record in records]
    assert ids[: len(acknowledged)] == [turn.reply_id for turn in acknowledged]
    assert len(kept) <= len(turns) + 1
    assert len(set(ids)) == len(ids)
    assert metadata["discarded"] == {"turns": 0, "sampled_tokens": 0}
    assert len(metadata["strands"]) <= 1
