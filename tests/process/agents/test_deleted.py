"""Real agents whose session was deleted: each gives up after few requests; docs/agents.md says in which words."""

import re
from pathlib import Path

import pytest

from .conftest import Talk, Talking
from .test_budgets import AGENTS

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

OWN = "There is no session '{id}'"
WORDS = {"claude-code": "There's an issue with the selected model"}
"""Of the one agent that has its own for a 404."""
MOST_REQUESTS = {"claude-code": 3, "codex": 6, "opencode-chat": 10, "gemini-cli": 3}
"""Claude Code begins with a HEAD of its address, and asks once more without `stream`; Codex asks five times again, and
opencode takes the 404 of a chat for one that passes. All others ask for a turn and a title, or a turn and a route."""


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_of_a_deleted_session_ends_and_says_so(tmp_path: Path, talking: Talking, agent: str) -> None:
    (tmp_path / "work").mkdir()
    async with talking() as talk:
        base_url = await talk.open_session()
        session_url = base_url.removesuffix("/v1")
        async with talk.client.delete(session_url) as response:
            assert response.status == 204
        ran = await AGENTS[agent][0](tmp_path, base_url)
        assert ran.code == 1
        assert WORDS.get(agent, OWN.format(id=session_url.rpartition("/")[2])) in ran.said
        assert 1 <= await num_refused(talk) <= MOST_REQUESTS.get(agent, 2)
        assert not talk.engine.requests


async def num_refused(talk: Talk) -> int:
    """Requests that were answered by a 404 for their session."""
    async with talk.client.get(f"{talk.url}/metrics") as response:
        told = re.search(r'stenograph_errors_total{code="session_not_found"} (\d+)', await response.text())
    return 0 if told is None else int(told[1])
