"""Real agents whose session has spent a budget: each ends within ten seconds, told by an error or by an empty reply.

scripts/test-agents installs them into the cache folder. They run in a home of their own and reach this machine alone.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from . import test_claude_code, test_codex, test_gemini_cli, test_opencode
from .conftest import Talk, Talking
from .installed import Ran, ledger

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

END_S = 10.0
ASK = "What is here?"
SIDE = {**test_claude_code.TITLE, **test_opencode.TITLE, **test_gemini_cli.ROUTER}


async def claude_code(home: Path, base_url: str) -> Ran:
    return await test_claude_code.run(home, base_url, "-p", ASK)


async def codex(home: Path, base_url: str) -> Ran:
    return await test_codex.attempt(home, base_url, ASK)


async def opencode(home: Path, base_url: str, *, sdk: str) -> Ran:
    return await test_opencode.attempt(home, base_url, ASK, sdk=sdk)


async def gemini_cli(home: Path, base_url: str) -> Ran:
    test_gemini_cli.settle(home)
    return await test_gemini_cli.attempt(home, base_url.removesuffix("/v1"), "-p", ASK, "--yolo")


AGENTS: dict[str, tuple[Callable[[Path, str], Awaitable[Ran]], str]] = {
    "claude-code": (claude_code, test_claude_code.LOOK),
    "codex": (codex, test_codex.LOOK),
    "opencode-chat": (partial(opencode, sdk=test_opencode.CHAT), test_opencode.LOOK),
    "opencode-messages": (partial(opencode, sdk=test_opencode.MESSAGES), test_opencode.LOOK),
    "opencode-responses": (partial(opencode, sdk=test_opencode.RESPONSES), test_opencode.LOOK),
    "gemini-cli": (gemini_cli, test_gemini_cli.LOOK),
}


async def spend(talk: Talk, home: Path, agent: str, **options: Any) -> list[dict[str, Any]]:
    """A run of an agent that never ends by itself on a session with a budget; the rows of its requests. It ends soon
    after the first for which there is none left, and all that was sampled is kept."""
    (home / "work").mkdir(parents=True)
    (home / "work" / "notes.txt").write_text("a note\n")
    talk.engine.drawn.clear()
    base_url = await talk.open_session(**options)
    ran = await AGENTS[agent][0](home, base_url)
    ended_s = time.time()
    rows = await ledger(talk, base_url)
    spent = [row for row in rows if row["error"] == "limit_exceeded"]
    assert spent, ran.said
    assert ended_s - spent[0]["received"] < END_S, rows
    assert {row["status"] for row in spent} == {200 if options["over_limit"] == "stop" else 400}
    assert all(row["turn"] is None and row["sampled_tokens"] == 0 for row in spent)
    talk.check_all_trained_once(await talk.samples(base_url))
    return rows


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("over_limit", ["error", "stop"])
async def test_an_agent_ends_when_its_session_has_spent_a_budget(
    tmp_path: Path, talking: Talking, agent: str, over_limit: str
) -> None:
    async with talking(side=SIDE, rest=AGENTS[agent][1]) as talk:
        rows = await spend(talk, tmp_path / "a", agent, max_turns=2, over_limit=over_limit)
        mains = [row for row in rows if row["kind"] == "main" and row["turn"] is not None]
        assert len(mains) == 2
        sides = [row for row in rows if row["kind"] in ("title", "router")]
        first = sum(row["prompt_tokens"] + row["sampled_tokens"] for row in [*sides, mains[0]])
        rows = await spend(talk, tmp_path / "b", agent, max_requests=3, over_limit=over_limit)
        assert sum(row["turn"] is not None for row in rows) == 3
        await spend(talk, tmp_path / "c", agent, max_total_tokens=first + 1, over_limit=over_limit)
