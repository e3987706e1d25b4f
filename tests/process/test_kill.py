"""kill -9 of a real server under load, again and again, with clients that ask again: nothing acknowledged is lost.

A few kills here; `scripts/test-crash` sets KILLS for the long run.
"""

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stenograph.testing.standins.planned_server import AskedRequest, ReplyScript
from stenograph.testing.standins.sglang_server import SGLangServer
from stenograph.testing.tiny.llama import write_tiny_folder

END = 2
NUM_KILLS = int(os.environ.get("KILLS", "4"))
NUM_SESSIONS = 12
MAX_TURNS = 25
"""Turns of a session; then its client opens another."""

pytestmark = pytest.mark.timeout(60 + 10 * NUM_KILLS)


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


@asynccontextmanager
async def server(folder: Path, model: Path, engine: SGLangServer) -> AsyncIterator[tuple[Any, str]]:
    flags = ("--model", str(model), "--family", "smollm2", "--engine", "sglang-generate", "--engine-url", engine.url)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--data-dir", str(folder), *flags),
        *("--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"(http://127\.0\.0\.1:\d+) \(model", line)
        assert found is not None, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


def unique_replies() -> Any:
    """Each generation its own ids, so that a turn that is made twice, or another's, is seen."""
    drawn = random.Random(17)

    def answer(_: AskedRequest) -> ReplyScript:
        ids = tuple(drawn.randrange(3, 250) for _ in range(drawn.randrange(2, 40)))
        return ReplyScript(ids=(*ids, END), matched=END)

    return answer


async def test_kill_9_loses_no_acknowledged_turn_doubles_none_and_changes_no_id(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    load, chosen = Load(), random.Random(NUM_KILLS)
    restarts_s: list[float] = []
    async with SGLangServer(answers=unique_replies(), stop_id=END, remembers=False) as engine:  # noqa: SIM117
        async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as tasks:
            for number in range(NUM_SESSIONS):
                tasks.create_task(load.work(client, number))
            for _ in range(NUM_KILLS):
                began = time.monotonic()
                async with server(tmp_path / "data", model, engine) as (process, load.url):
                    load.up.set()
                    before = load.num_acknowledged
                    await load.acknowledged(before + 1)
                    restarts_s.append(time.monotonic() - began)
                    await load.acknowledged(before + chosen.randrange(1, 150))
                    process.kill()
                    await process.wait()
                    load.up.clear()
            async with server(tmp_path / "data", model, engine) as (process, load.url):
                load.up.set()
                await load.acknowledged(load.num_acknowledged + 2 * NUM_SESSIONS)
                load.is_over = True
                for session, turns in list(load.sessions.items()):
                    await check(client, load, session, turns)
    figures = (
        f"\n{NUM_KILLS} kills: {load.num_acknowledged} turns acknowledged in {len(load.sessions)} sessions,"
        f" {load.num_asked_again} requests asked again, 0 lost, 0 doubled, 0 wrong ids;"
        f" from the start of a process to its first turn {max(restarts_s):.1f} s at most"
    )
    sys.stdout.write(figures + chr(10))


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
