"""Weights of a server of several workers whose processes are killed: all say what holds, and it can be repeated."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import AskedRequest
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder

from .chat_load import END
from .test_workers import Parent, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


class Trainer:
    """A client that asks again where a process has just ended, each time on a connection of its own."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self.client = client

    async def once(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.client.request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        while True:
            try:
                status, answer = await self.once(method, path, body)
            except aiohttp.ClientError:
                continue
            if status != 503 or "error" not in answer:
                return status, answer

    async def until_paused(self, *, is_paused: bool) -> None:
        """Wait until all workers are there and say so."""
        while True:
            status, ready = await self.ask("GET", "/ready")
            if ready["paused"] is is_paused and (is_paused or status == 200):
                return

    async def versions(self) -> list[str]:
        """The versions that sampled a turn of each worker."""
        found: dict[str, list[str]] = {}
        while len(found) < 2:
            _, opened = await self.ask("POST", "/sessions", {})
            session, chat = opened["session_id"], {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            status, reply = await self.ask("POST", f"/sessions/{session}/v1/chat/completions", chat)
            assert status == 200, reply
            _, view = await self.ask("GET", f"/sessions/{session}")
            found[session[:2]] = [span["version"] for span in view["records"][0]["weight_versions"]]
        return [*found["00"], *found["01"]]


async def kill(parent: Parent, pid: int) -> None:
    """Kill a process, and wait until another one has its place."""
    before = set(parent.children)
    os.kill(pid, signal.SIGKILL)
    while pid in parent.children or len(parent.children) < len(before):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)


async def test_an_update_that_is_cut_off_holds_all_turns_until_it_is_sent_again_or_given_up(tmp_path: Path) -> None:
    model, folder = write_tiny_folder(tmp_path / "tiny"), tmp_path / "weights"
    (folder / "step-1").mkdir(parents=True)
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(asked: AskedRequest) -> None:
        if asked.path == "/update_weights_from_disk":
            began.set()
            await go_on.wait()

    async with SGLangServer(stop_id=END, encode=lambda _: [5], routes=slowly) as engine:
        flags = ("--engine", "sglang-generate", "--engine-url", engine.url, "--weights-dir", str(folder))
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            started("--model", str(model), *flags) as parent,
            aiohttp.ClientSession(connector=connector) as client,
        ):
            trainer, body = Trainer(parent.url, client), {"model_path": "step-1", "weight_version": "1"}
            for ending in ("again", "continue"):
                cut_off = asyncio.ensure_future(trainer.once("POST", "/update_weights_from_disk", body))
                await began.wait()
                await kill(parent, parent.children[0] if ending == "again" else max(parent.children))
                (outcome,) = await asyncio.gather(cut_off, return_exceptions=True)
                assert isinstance(outcome, aiohttp.ClientError) or outcome[0] == 503
                await trainer.until_paused(is_paused=True)
                assert (await trainer.ask("GET", "/model_info"))[1]["paused"]
                go_on.set()
                if ending == "again":
                    assert await trainer.ask("POST", "/update_weights_from_disk", body) == (
                        200,
                        {"success": True, "message": await said(folder), "num_paused_requests": 0},
                    )
                else:
                    assert (await trainer.ask("POST", "/continue_generation", {}))[0] == 200
                await trainer.until_paused(is_paused=False)
                assert (await trainer.ask("GET", "/model_info"))[1]["weight_version"] == engine.weight_version
                assert set(await trainer.versions()) == {engine.weight_version}
                began.clear()
                go_on.clear()
                body = {"model_path": "step-1", "weight_version": "2"}
            assert (await trainer.ask("POST", "/pause_generation", {}))[0] == 200
            for pid in parent.children:
                await kill(parent, pid)
            await trainer.until_paused(is_paused=True)
            assert (await trainer.ask("POST", "/continue_generation", {}))[0] == 200
            assert set(await trainer.versions()) == {engine.weight_version}


async def said(folder: Path) -> str:
    return f"The weights are those of {folder / 'step-1'}, version '1'."


async def test_the_embedded_engine_that_all_share_takes_new_weights_once_and_keeps_them(tmp_path: Path) -> None:
    model, other = write_tiny_folder(tmp_path / "model"), write_tiny_folder(tmp_path / "weights" / "new", seed=1)
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        started("--model", str(model), "--weights-dir", str(other.parent)) as parent,
        aiohttp.ClientSession(connector=connector) as client,
    ):
        trainer = Trainer(parent.url, client)
        engine = parent.children[0]
        assert await trainer.versions() == ["0", "0"]
        status, told = await trainer.ask("POST", "/update_weights_from_disk", {"model_path": "new"})
        assert (status, told["success"]) == (200, True), told
        assert await trainer.versions() == ["1", "1"]
        assert (await trainer.ask("POST", "/update_weight_version", {"new_version": "run"}))[0] == 200
        assert (await trainer.ask("POST", "/pause_generation", {"mode": "in_place"}))[0] == 200
        await trainer.until_paused(is_paused=True)
        await kill(parent, engine)
        while (await trainer.ask("POST", "/continue_generation", {}))[0] != 200:
            pass
        await trainer.until_paused(is_paused=False)
        assert await trainer.versions() == ["run", "run"]
        assert (await trainer.ask("POST", "/flush_cache", {}))[0] == 200
        status, told = await trainer.ask("POST", "/update_weights_from_disk", {"model_path": "nowhere"})
        assert (status, told["success"]) == (400, False)
        assert await trainer.versions() == ["run", "run"]
