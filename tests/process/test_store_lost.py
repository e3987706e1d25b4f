"""A server whose store fails for good refuses what it cannot keep, ends, and says so by its exit code."""

import os
import resource
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder

from ..crash.load import END
from ..crash.warm import WarmParent

pytestmark = pytest.mark.timeout(600)


async def test_a_server_that_cannot_write_any_more_ends_with_exit_code_74_and_has_what_it_acknowledged(
    tmp_path: Path,
) -> None:
    model, log = write_tiny_folder(tmp_path / "tiny"), tmp_path / "log"
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    async with (
        SGLangServer(answers=lambda _: ReplyScript(ids=(5, END), matched=END), stop_id=END) as engine,
        WarmParent.started() as warm,
    ):
        flags = (
            *("--port", "0", "--model", str(model), "--family", "smollm2", "--engine", "sglang-generate"),
            *("--engine-url", engine.url, "--data-dir", str(tmp_path / "data"), "--log-level", "error"),
        )
        server = await warm.fork(flags, log)
        await server.ready()
        async with aiohttp.ClientSession(server.url) as client:
            session = await opened(client)
            kept, lost = f"/sessions/{session}", f"/sessions/{await opened(client)}"
            async with client.post(f"{kept}/v1/chat/completions", json=hello) as answer:
                assert answer.status == 200
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1024, most))  # no write beyond this place
            async with client.post(f"{lost}/v1/chat/completions", json=hello) as answer:
                refusal = await answer.json()
                assert (answer.status, refusal["error"]["code"]) == (503, "storage_unavailable")
        assert os.waitstatus_to_exitcode(await warm.end_of(server)) == 74
        said = log.read_text()
        assert said.splitlines()[-1].startswith("stenograph: the store of --data-dir has failed:"), said
        server = await warm.fork(flags, log)
        await server.ready()
        async with aiohttp.ClientSession(server.url) as client:
            views = [await view(client, path) for path in (kept, lost)]
    assert [len(one["records"]) for one in views] == [1, 0]


async def opened(client: aiohttp.ClientSession) -> str:
    async with client.post("/sessions", json={}) as answer:
        return str((await answer.json())["session_id"])


async def view(client: aiohttp.ClientSession, path: str) -> Any:
    async with client.get(path) as answer:
        assert answer.status == 200
        return await answer.json()
