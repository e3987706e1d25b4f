"""Real agents begun anew on a fork of their own session, by `stenograph fork`: the replies before the place are the
recorded ones, the reply at it is continued, and the agent works on with what comes after.

scripts/test-agents installs them into the cache folder. Each runs in its home as it was before.
"""

import asyncio
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from stenograph.text.renderer import Renderer

from . import test_claude_code, test_codex, test_gemini_cli, test_opencode
from .conftest import Reply, Talk, Talking, trained_runs
from .installed import Program, outer

pytestmark = [pytest.mark.agents, pytest.mark.timeout(400)]

ASK, LAST, OTHER = "What is here?", "There is a note.", "There is a note, and no more."
AGENTS: dict[str, tuple[Program, tuple[str, ...], tuple[str, str], dict[str, str] | None]] = {
    "claude": (
        test_claude_code.CLAUDE,
        ("-p", ASK, *test_claude_code.PERMITTED),
        (test_claude_code.LOOK, test_claude_code.LOOK_TWICE),
        test_claude_code.TITLE,
    ),
    "codex": (
        test_codex.CODEX,
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK),
        (test_codex.LOOK, test_codex.LOOK_TWICE),
        None,
    ),
    "gemini": (
        test_gemini_cli.GEMINI,
        ("-p", ASK, "--yolo"),
        (test_gemini_cli.LOOK, test_gemini_cli.LOOK_TWICE),
        test_gemini_cli.ROUTER,
    ),
    "opencode": (
        test_opencode.OPENCODE,
        ("run", "-m", "steno/tiny", ASK),
        (test_opencode.LOOK, test_opencode.LOOK_TWICE),
        test_opencode.TITLE,
    ),
}
VARIABLES = {
    "IS_SANDBOX": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "GEMINI_CLI_TRUST_WORKSPACE": "true",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


async def stenograph(home: Path, *arguments: str) -> tuple[int | None, str, str]:
    """One command, to its end: its exit code, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "stenograph.cli.main", *arguments),
        cwd=home / "work",
        env={**outer(home), **VARIABLES},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, errors = await process.communicate()
    return process.returncode, printed.decode(), errors.decode()


async def sample_of(talk: Talk, session: str) -> dict[str, Any]:
    """The sample of a session's work."""
    return max(await talk.samples(f"{talk.url}/sessions/{session}/v1"), key=lambda one: len(one["turns"]))


@pytest.mark.parametrize("token", [None, 9])
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_begun_anew_goes_on_from_the_place_of_the_fork(
    home: Path,
    talking: Talking,
    roomy_renderer: Renderer,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    token: int | None,
) -> None:
    program, arguments, replies, side = AGENTS[name]
    before = tmp_path_factory.mktemp("before") / "home"
    command = ("--", str(program.path()), *arguments)
    if name == "opencode":
        test_opencode.configure(home, "{env:OPENAI_BASE_URL}")
    shutil.copytree(home, before, symlinks=True)
    async with talking(*replies, LAST, side=side) as talk:
        code, printed, told = await stenograph(home, "run", "--url", talk.url, "--keep", *command)
        assert (code, LAST in printed) == (0, True), printed + told
        (session,) = re.findall(r"session ([0-9a-f]{32}) stays", told)
        sample = await sample_of(talk, session)
        tokens = sample["tokens"]
        start, end = sample["turns"][1]["start"], sample["turns"][1]["end"]
        rest = () if token is None else (roomy_renderer.tokenizer.decode(tokens[start + token : end - 1]),)
        talk.replies.extend(Reply(text=text) for text in (*rest, OTHER))
        num_asked = len(talk.engine.requests)
        shutil.rmtree(home)
        shutil.copytree(before, home, symlinks=True)
        place = ("--turn", str(sample["turns"][1]["node_id"]), *(() if token is None else ("--token", str(token))))
        code, printed, told = await stenograph(home, "fork", session, *place, "--url", talk.url, "--keep", *command)
        assert (code, OTHER in printed) == (0, True), printed + told
        (fork,) = re.findall(r"session ([0-9a-f]{32}) stays", told)
        made = await sample_of(talk, fork)
        first, second = made["turns"][:2]
        end = second["start"] + token if token is not None else second["end"]
        assert made["tokens"][:end] == tokens[:end]
        assert (first["inherited"], second["inherited"]) == (first["end"] - first["start"], end - second["start"])
        assert not talk.replies, "each planned reply was asked for"
        own = {tuple(ids) for ids in list(talk.engine.drawn.values())[num_asked:]}
        assert set(trained_runs(made)) <= own
        assert len(trained_runs(made)) == 1 + len(rest)
