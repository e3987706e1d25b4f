"""Real Gemini CLI: what it sends is taken, and every token that was sampled is in a sample.

scripts/test-agents installs it into the cache folder. It runs in a home of its own and reaches this machine alone.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from .conftest import Talking, call
from .installed import Program, Ran, ledger

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

GEMINI = Program(title="Gemini CLI", folder="gemini-cli-0.61.0", name="gemini")
LOOK = "<think>\nLook first.\n</think>\n\nI look.\n" + call("list_directory", '{"dir_path":  "."}')
LOOK_TWICE = (
    call("read_file", '{"file_path": "notes.txt"}')
    + "\n"
    + call("run_shell_command", '{"command": "pwd", "description": "where"}')
)
ROUTER = {"Task Routing AI": '{"complexity_reasoning": "easy", "complexity_score": 1}'}


@pytest.fixture
def home(home: Path) -> Path:
    """A home with Gemini CLI's settings in it."""
    settle(home)
    return home


def settle(home: Path) -> None:
    """Write its settings into a home."""
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "general": {"enableAutoUpdate": False}}
    (home / ".gemini").mkdir()
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))


async def attempt(home: Path, root_url: str, *arguments: str) -> Ran:
    """One run of the program, to its end."""
    environment = {
        "GEMINI_API_KEY": "none",
        "GOOGLE_GEMINI_BASE_URL": root_url,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    return await GEMINI.run(home, *arguments, environment=environment)


async def run(home: Path, root_url: str, *arguments: str) -> tuple[int | None, str]:
    """The same: its exit code and what it prints."""
    ran = await attempt(home, root_url, *arguments)
    return ran.code, ran.said


async def test_a_run_with_calls_is_one_strand_beside_the_router_s(home: Path, talking: Talking) -> None:
    async with talking(LOOK, LOOK_TWICE, "There is a note.", side=ROUTER) as talk:
        base_url = await talk.open_session()
        code, printed = await run(home, base_url.removesuffix("/v1"), "-p", "What is here?", "--yolo")
        rows = await ledger(talk, base_url)
        assert code == 0, printed
        assert "There is a note." in printed
        assert {row["status"] for row in rows} == {200}
        talk.check_all_trained_once(await talk.samples(base_url))
        found = [(row["kind"], row["strand"]) for row in rows]
        assert found == [("router", 0), ("main", 1), ("main", 1), ("main", 1)]


async def test_a_resumed_run_goes_on_with_its_strand(home: Path, talking: Talking) -> None:
    """Resumed, it sends each result of a call twice."""
    async with talking(LOOK, "There is a note.", "Still a note.", side=ROUTER) as talk:
        base_url = await talk.open_session()
        root_url = base_url.removesuffix("/v1")
        await run(home, root_url, "-p", "What is here?", "--yolo")
        code, printed = await run(home, root_url, "--resume", "latest", "-p", "And now?", "--yolo")
        assert (code, "Still a note." in printed) == (0, True), printed
        talk.check_all_trained_once(await talk.samples(base_url))
        rows = [row for row in await ledger(talk, base_url) if row["kind"] == "main"]
        assert [(row["strand"], row["turn"]) for row in rows] == [(1, 1), (1, 2), (1, 4)]
        async with talk.client.get(root_url) as response:
            assert (await response.json())["metadata"]["discarded"]["turns"] == 0


async def test_an_empty_reply_is_asked_for_again_and_loses_nothing(home: Path, talking: Talking) -> None:
    async with talking("", "There is a note.", side=ROUTER) as talk:
        base_url = await talk.open_session()
        code, printed = await run(home, base_url.removesuffix("/v1"), "-p", "What is here?", "--yolo")
        assert (code, "There is a note." in printed) == (0, True), printed
        talk.check_all_trained_once(await talk.samples(base_url))


async def test_it_finds_a_session_by_stenograph_run(home: Path, talking: Talking) -> None:
    async with talking(LOOK, "There is a note.", side=ROUTER) as talk:
        samples = home / "samples.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stenograph.cli.main", "run", "--url", talk.url, "--samples", samples, "--"),
            *(GEMINI.path(), "-p", "What is here?", "--yolo"),
            cwd=home / "work",
            env={**os.environ, "HOME": str(home), "GEMINI_CLI_TRUST_WORKSPACE": "true"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, log = (text.decode() for text in await process.communicate())
        assert (process.returncode, "There is a note." in out) == (0, True), log
        assert "3 turns in 2 strands" in log
        assert [sample["metadata"]["kind"] for sample in json.loads(samples.read_text())["samples"]] == ["main"]
