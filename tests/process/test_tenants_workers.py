"""Tenants of `serve --workers`: SIGHUP to the parent reaches every worker, and a worker that is killed comes back with
the last good file."""

import json
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder
from stenograph.tenants.tenant import hash_of

from .chat_load import END
from .test_workers import started

pytestmark = pytest.mark.timeout(600)


def with_tenant(name: str) -> str:
    return f'[{name}]\nkey_sha256 = ["{hash_of(name.encode())}"]\n'


async def becomes(url: str, worker: int, key: str, status: int) -> None:
    """Ask that worker with a key, on new connections, until it answers so."""
    while True:
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1)) as client:
            try:
                async with client.post("/sessions", json={}, headers={"x-api-key": "operator"}) as answer:
                    session = (await answer.json())["session_id"]
                if int(session[:2], 16) != worker:
                    continue
                async with client.get("/model_info", headers={"x-api-key": key}) as answer:
                    if answer.status == status:
                        return
            except aiohttp.ClientError:
                continue  # that worker was killed


async def test_a_hangup_of_the_parent_reaches_all_workers_and_a_bad_file_outlives_none(tmp_path: Path) -> None:
    model, file, audit = write_tiny_folder(tmp_path / "tiny"), tmp_path / "tenants.toml", tmp_path / "audit.jsonl"
    file.write_text(with_tenant("ann"))
    flags = ("--model", str(model), "--api-key", "operator", "--tenants", str(file), "--audit-log", str(audit))
    async with (
        SGLangServer(answers=lambda _: ReplyScript(ids=(5, END), matched=END), stop_id=END) as engine,
        started(*flags, "--engine", "sglang-generate", "--engine-url", engine.url) as parent,
    ):
        workers = parent.children
        for worker in (0, 1):
            await becomes(parent.url, worker, "ann", 200)
        file.write_text(with_tenant("carl"))
        parent.process.send_signal(signal.SIGHUP)
        for worker in (0, 1):
            await becomes(parent.url, worker, "carl", 200)
            await becomes(parent.url, worker, "ann", 401)
        file.write_text("[carl\n")
        os.kill(workers[0], signal.SIGKILL)
        while workers[0] in parent.children:
            await becomes(parent.url, 1, "carl", 200)
        await becomes(parent.url, 0, "carl", 200)
        await becomes(parent.url, 0, "ann", 401)
        assert parent.children[0] == workers[1], "the other one is as it was"
        assert await parent.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line.get("added"), line.get("removed")) for line in lines[:2]] == [(["carl"], ["ann"])] * 2
    assert ["error" in line for line in lines] == [False, False, True]
