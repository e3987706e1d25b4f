"""Real agents that look at a screenshot: the engine gets its bytes, a store keeps them once, samples name its tokens.

Before a stand-in of vLLM that puts other ids in an image's place, and reports them. scripts/test-agents installs the
agents. Each runs in a home of its own and reaches this machine alone.
"""

import base64
import hashlib
import json
import sqlite3
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import AskedRequest, ReplyScript
from standins.vllm_server import VLLMServer, expansion_length
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.vllm.adapter import VLLM
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer
from tests.service.conftest import END, running
from tests.service.images_kit import NUM_IDS, PAD, seeing_renderer

from . import test_claude_code, test_codex, test_gemini_cli, test_opencode
from .conftest import CONTEXT_TOKENS, SAMPLES, call, trained_runs

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

DONE = "It is grey."


@pytest.fixture(scope="module")
def seeing() -> Renderer:
    """A model that takes images and tools."""
    return seeing_renderer(max_context_tokens=CONTEXT_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A server with a store, before an engine that takes images. `sampled` are all replies so far, with their ends;
    `main` are the requests of the agent's work, in order."""

    url: str
    client: aiohttp.ClientSession
    renderer: Renderer
    folder: DataFolder
    sampled: list[tuple[int, ...]]
    main: list[Any]

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        async with self.client.request(method, self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def session(self) -> str:
        """The id of a new session."""
        return str((await self.json("POST", "/sessions", {}))["session_id"])

    async def check(self, session: str, *, num_images: int = 1) -> None:
        """The main strand has this many images, each sent with every turn after it, kept once, and exact in its sample;
        all that was sampled is trained once."""
        pad = self.renderer.tokenizer.added_tokens[PAD]
        seen = [one for one in self.main if one.get("content_parts")]
        last = (*self.renderer.tokenizer.encode(DONE), END)
        assert seen
        for before, after in pairwise(seen):
            assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
        images = [base64.b64decode(one["url"].partition(",")[2]) for one in seen[-1]["content_parts"]]
        hashes = [hashlib.sha256(image).hexdigest() for image in images]
        assert len(images) == num_images
        samples = (await self.json("POST", f"/sessions/{session}/samples", SAMPLES))["samples"]
        (sample,) = (one for one in samples if trained_runs(one)[-1] == last)
        assert [row["sha256"] for row in sample["media"]] == hashes
        assert [row["length"] for row in sample["media"]] == [expansion_length(image) for image in images]
        for row in sample["media"]:
            assert set(sample["tokens"][row["start"] : row["start"] + row["length"]]) == {pad}
        assert sample["tokens"].count(pad) == sum(row["length"] for row in sample["media"])
        logical, at = list[int](), 0
        for row in sample["media"]:
            logical += [*sample["tokens"][at : row["start"]], pad]
            at = row["start"] + row["length"]
        logical += sample["tokens"][at:]
        assert logical == [*seen[-1]["token_ids"], *last]
        assert sorted(run for one in samples for run in trained_runs(one)) == sorted(self.sampled)
        for sha256, image in zip(hashes, images, strict=True):
            async with self.client.get(f"{self.url}/sessions/{session}/media/{sha256}") as response:
                assert await response.read() == image

    def num_kept(self) -> int:
        """Number of contents in the store. Once the server has stopped."""
        with closing(sqlite3.connect(self.folder.file())) as raw:
            return int(raw.execute("SELECT count(*) FROM media").fetchone()[0])


Looking = Callable[..., AbstractAsyncContextManager[Look]]


@pytest.fixture
def looking(seeing: Renderer, tmp_path: Path) -> Looking:
    """Start a server whose engine gives these replies in order; a prompt with a key of `side` in it gets that one."""
    tokenizer = seeing.tokenizer

    @asynccontextmanager
    async def started(*replies: str, side: dict[str, str] | None = None) -> AsyncIterator[Look]:
        left, sampled, main = list(replies), list[tuple[int, ...]](), list[Any]()

        def answer(asked: AskedRequest) -> ReplyScript:
            prompt = tokenizer.decode(asked.json["token_ids"])
            found = [text for mark, text in (side or {}).items() if mark in prompt]
            if not found:
                main.append(asked.json)
            sampled.append((*tokenizer.encode(found[0] if found else left.pop(0)), END))
            return ReplyScript(ids=sampled[-1])

        pad = tokenizer.added_tokens[PAD]
        folder = DataFolder(tmp_path / "data", address="http://here:1")
        store = await SqliteStore.open(folder)
        async with VLLMServer(answers=answer, image_token=pad, max_model_len=CONTEXT_TOKENS) as vllm:
            options = AdapterOptions(
                model="tiny", vocab_size=NUM_IDS, max_context_tokens=CONTEXT_TOKENS, eos_token_ids=(END,)
            )
            engine = HttpEngine(HttpEngineOptions(url=vllm.url), VLLM(options))
            await engine.start()
            async with running(engine, seeing, store=store) as (url, _), aiohttp.ClientSession() as client:
                look = Look(url=url, client=client, renderer=seeing, folder=folder, sampled=sampled, main=main)
                yield look
                assert left == [], "each planned reply was asked for"
            await engine.aclose()
        await store.aclose()
        assert look.num_kept() == 1
        folder.close()

    return started


def png(width: int, height: int) -> bytes:
    """A grey picture."""
    rows = b"".join(b"\0" + bytes((x * y) % 256 for x in range(width)) for y in range(height))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    written = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.fixture
def home(home: Path) -> Path:
    """A home with a screenshot in its folder."""
    (home / "work" / "shot.png").write_bytes(png(160, 90))
    return home


async def test_claude_code_reads_a_screenshot(home: Path, looking: Looking) -> None:
    look_at = call("Read", json.dumps({"file_path": str(home / "work" / "shot.png")}))
    listed = call("Bash", '{"command": "ls", "description": "list"}')
    async with looking(look_at, listed, DONE, side=test_claude_code.TITLE) as look:
        session = await look.session()
        ran = await test_claude_code.run(home, f"{look.url}/sessions/{session}/v1", "-p", "What is on shot.png?")
        assert (ran.code, ran.printed.strip()) == (0, DONE), ran.said
        await look.check(session)


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "viewed"])
async def test_codex_sees_a_screenshot(home: Path, looking: Looking, is_given: bool) -> None:
    view = call("view_image", json.dumps({"path": str(home / "work" / "shot.png")}))
    replies = [DONE] if is_given else [view, DONE]
    async with looking(test_codex.LOOK, *replies) as look:
        session = await look.session()
        flags: Sequence[str] = ("-i", "shot.png", "--") if is_given else ()
        said = await test_codex.run(home, f"{look.url}/sessions/{session}/v1", *flags, "What is on shot.png?")
        assert DONE in said
        await look.check(session)


async def test_gemini_cli_is_given_a_screenshot(home: Path, looking: Looking) -> None:
    test_gemini_cli.settle(home)
    async with looking(test_gemini_cli.LOOK, DONE, side=test_gemini_cli.ROUTER) as look:
        session = await look.session()
        code, said = await test_gemini_cli.run(
            home, f"{look.url}/sessions/{session}", "-y", "-p", "What is on @shot.png?"
        )
        assert (code, DONE in said) == (0, True), said
        await look.check(session)


async def test_opencode_is_given_a_screenshot(home: Path, looking: Looking) -> None:
    async with looking(test_opencode.LOOK, DONE, side=test_opencode.TITLE) as look:
        session = await look.session()
        ran = await test_opencode.attempt(home, f"{look.url}/sessions/{session}/v1", "What is on it?", "-f", "shot.png")
        assert (ran.code, DONE in ran.said) == (0, True), ran.said
        await look.check(session)
