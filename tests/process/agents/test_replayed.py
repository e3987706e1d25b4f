"""Real agents on their own recorded sessions, with no engine: the same answers, and the same words at the end.

scripts/test-agents installs them into the cache folder. Each runs twice, the second time in its home as it was before.
"""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from stenograph.core.settings import Switch
from stenograph.http.turn_route import RequestPath, TurnRoute
from stenograph.replay.part import ReplayProcesses
from stenograph.store.base import SessionStore
from stenograph.store.files import open_files
from stenograph.store.folder import DataFolder
from stenograph.store.settings import Durability

from . import test_claude_code, test_codex, test_gemini_cli, test_opencode
from .conftest import Talking
from .installed import Ran

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

UNLIKE = (".sequence_number", ".prompt_cache_key")
"""The count of the pieces, and an echo of Codex's own name for each run."""

Answers = list[tuple[str, bytes]]


async def codex(home: Path, base_url: str, ask: str) -> Ran:
    return await test_codex.attempt(home, base_url, ask)


async def claude(home: Path, base_url: str, ask: str) -> Ran:
    return await test_claude_code.run(home, base_url, "-p", ask, CLAUDE_CODE_ATTRIBUTION_HEADER="0")


async def gemini(home: Path, base_url: str, ask: str) -> Ran:
    if not (home / ".gemini").exists():
        test_gemini_cli.settle(home)
    return await test_gemini_cli.attempt(home, base_url.removesuffix("/v1"), "-p", ask, "--yolo")


async def opencode(home: Path, base_url: str, ask: str) -> Ran:
    return await test_opencode.attempt(home, base_url, ask)


AGENTS = {
    "codex": (codex, (test_codex.LOOK, test_codex.LOOK_TWICE), None),
    "claude": (claude, (test_claude_code.LOOK, test_claude_code.LOOK_TWICE), test_claude_code.TITLE),
    "gemini": (gemini, (test_gemini_cli.LOOK, test_gemini_cli.LOOK_TWICE), test_gemini_cli.ROUTER),
    "opencode": (opencode, (test_opencode.LOOK, test_opencode.LOOK_TWICE), test_opencode.TITLE),
}
LAST = "There is a note."


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """The route and the bytes of each answer to a turn."""
    found: Answers = []
    handle = TurnRoute.handle

    async def told(self: TurnRoute, scope: Scope, receive: Receive, send: Send, path: RequestPath) -> None:
        parts: list[bytes] = []

        async def tell(message: Message) -> None:
            parts.append(message.get("body", b""))
            await send(message)

        await handle(self, scope, receive, tell, path)
        found.append((path.route, b"".join(parts)))

    monkeypatch.setattr(TurnRoute, "handle", told)
    return found


@asynccontextmanager
async def stored(folder: Path) -> AsyncIterator[SessionStore]:
    held = DataFolder(folder, address="")
    store = await open_files(held, [0], durability=Durability.COMMIT, on_failed=print)
    try:
        yield store
    finally:
        await store.aclose()
        held.close()


def facts(answer: tuple[str, bytes]) -> str:
    """An answer without the places where a stream is cut: texts joined, all other values once each, by their paths."""
    route, body = answer
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")] or [body]
    found: dict[str, Any] = {}
    for event in events:
        for path, value in flat(json.loads(event), ""):
            if path.endswith((".delta", ".text", ".content", ".arguments", ".partial_json", ".thinking")):
                found[path] = str(found.get(path, "")) + str(value)
            elif not path.endswith(UNLIKE) and value not in found.setdefault(path, []):
                found[path].append(value)
    return f"{route} {json.dumps(found)}"


def flat(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [one for name, inner in value.items() for one in flat(inner, f"{path}.{name}")]
    if isinstance(value, list):
        return [one for inner in value for one in flat(inner, path)]
    return [(path, value)]


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_is_served_its_own_recorded_session(
    home: Path, talking: Talking, tmp_path_factory: pytest.TempPathFactory, answers: Answers, name: str
) -> None:
    agent, replies, side = AGENTS[name]
    data, before = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("before") / "home"
    shutil.copytree(home, before, symlinks=True)
    async with stored(data) as store, talking(*replies, LAST, side=side, store=store) as talk:
        base_url = await talk.open_session()
        first = await agent(home, base_url, "What is here?")
        assert (first.code, LAST in first.said) == (0, True), first.said
    recorded = [*answers]
    answers.clear()
    shutil.rmtree(home)
    shutil.copytree(before, home, symlinks=True)
    session = base_url.removesuffix("/v1").rpartition("/")[2]
    off = {"alone": ReplayProcesses, "data_dir": data, "strict": Switch.ON}
    async with stored(data) as store, talking(store=store, **off) as talk:
        second = await agent(home, f"{talk.url}/sessions/{session}/v1", "What is here?")
        assert (second.code, LAST in second.said) == (0, True), second.said
        assert talk.engine.requests == []
    assert sorted(map(facts, answers)) == sorted(map(facts, recorded))
