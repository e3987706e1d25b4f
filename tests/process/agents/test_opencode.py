"""Real opencode: its title request runs beside the first turn, and every token that was sampled is in one sample.

scripts/test-agents installs it into the cache folder. It runs in a home of its own and reaches this machine alone.
"""

import asyncio
import json
from pathlib import Path

import pytest

from .conftest import Talk, Talking, call
from .installed import Program, Ran

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

OPENCODE = Program(title="opencode", folder="opencode-1.18.33", name="opencode")
LOOK = "<think>\nLook first.\n</think>\n\nI look.\n" + call("bash", '{"command":  "ls", "description": "list"}')
LOOK_TWICE = (
    call("bash", '{"command": "cat notes.txt", "description": "read"}')
    + "\n"
    + call("bash", '{"command": "pwd", "description": "where"}')
)
CHAT, MESSAGES, RESPONSES = "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@ai-sdk/openai"
SEES = {"input": ["text", "image"], "output": ["text"]}
TITLE = {"You are a title generator": "A folder's files"}


def configure(home: Path, base_url: str, sdk: str = CHAT) -> None:
    """Let it have one model, at this address. `sdk` is the package by which it speaks."""
    provider = {
        "npm": sdk,
        "options": {"baseURL": base_url, "apiKey": "none"},
        "models": {"tiny": {"limit": {"context": 1 << 20, "output": 4096}, "attachment": True, "modalities": SEES}},
    }
    config = {"permission": "allow", "share": "disabled", "autoupdate": False, "provider": {"steno": provider}}
    (home / "work" / "opencode.json").write_text(json.dumps(config))


async def attempt(home: Path, base_url: str, *arguments: str, sdk: str = CHAT) -> Ran:
    """One run of the program, to its end."""
    configure(home, base_url, sdk)
    environment = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return await OPENCODE.run(home, "run", "-m", "steno/tiny", *arguments, environment=environment)


async def run(home: Path, base_url: str, *arguments: str, sdk: str = CHAT) -> str:
    """A run that succeeds; what it prints."""
    ran = await attempt(home, base_url, *arguments, sdk=sdk)
    assert ran.code == 0, ran.said
    return ran.said


async def check_two_samples(talk: Talk, base_url: str) -> None:
    """The main strand and the title are a sample each, and all that was sampled is in them."""
    samples = await talk.samples(base_url)
    talk.check_all_trained_once(samples)
    assert len(samples) == 2


@pytest.mark.parametrize("sdk", [CHAT, MESSAGES, RESPONSES])
async def test_a_run_with_a_title_beside_it_and_a_second_one_is_two_samples(
    home: Path, talking: Talking, sdk: str
) -> None:
    async with talking(LOOK, LOOK_TWICE, "There is a note.", LOOK, "Still a note.", side=TITLE) as talk:
        base_url = await talk.open_session()
        assert "There is a note." in await run(home, base_url, "What is here?", sdk=sdk)
        assert "Still a note." in await run(home, base_url, "--continue", "And now?", sdk=sdk)
        await check_two_samples(talk, base_url)


async def test_a_title_request_that_the_first_turn_overtakes_loses_nothing(home: Path, talking: Talking) -> None:
    async with talking(LOOK, "There is a note.", side=TITLE, holds_side=True) as talk:
        base_url = await talk.open_session()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run(home, base_url, "What is here?"))
            await talk.engine.begun(3)
            talk.engine.step(100)
        await check_two_samples(talk, base_url)
