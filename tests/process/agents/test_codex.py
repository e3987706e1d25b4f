"""Real Codex: one strand for its work, one for each sub-agent, and every token that was sampled in one sample.

scripts/test-agents installs it into the cache folder. It runs in a home of its own and reaches this machine alone.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from .conftest import Reply, Talk, Talking, call
from .installed import Program, Ran, ledger, strands

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

CODEX = Program(title="Codex", folder="codex-0.169.0", name="codex")
LOOK = "<think>\nLook first.\n</think>\n\nI look.\n" + call("exec_command", '{"cmd":  "ls"}')
LOOK_TWICE = (
    "<think>\nAnd read.\n</think>\n\n"
    + call("exec_command", '{"cmd": "cat notes.txt"}')
    + "\n"
    + call("exec_command", '{"cmd": "pwd"}')
)
SETTINGS = """
model = "tiny"
model_provider = "steno"
approval_policy = "never"
sandbox_mode = "danger-full-access"
{top}

[model_providers.steno]
name = "steno"
base_url = "{base_url}"
wire_api = "responses"
env_key = "STENO_KEY"
{provider}
"""


FREEFORM = {
    "slug": "tiny",
    "display_name": "tiny",
    "description": "A model whose tool for patches takes a text.",
    "default_reasoning_level": "low",
    "supported_reasoning_levels": [{"effort": "low", "description": "some"}],
    "shell_type": "shell_command",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "base_instructions": "You are an agent.",
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "default_verbosity": None,
    "apply_patch_tool_type": "freeform",
    "truncation_policy": {"mode": "bytes", "limit": 10000},
    "supports_parallel_tool_calls": True,
    "context_window": 1 << 20,
    "experimental_supported_tools": [],
    "upgrade": None,
}
"""A model in the form of Codex's catalog."""


async def attempt(home: Path, base_url: str, *arguments: str, top: str = "", provider: str = "") -> Ran:
    """One run of the program with these settings, to its end."""
    folder = home / "codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(SETTINGS.format(base_url=base_url, top=top, provider=provider))
    environment = {"CODEX_HOME": str(folder), "STENO_KEY": "none"}
    return await CODEX.run(home, "exec", "--skip-git-repo-check", *arguments, environment=environment)


async def run(home: Path, base_url: str, *arguments: str, top: str = "", provider: str = "") -> str:
    """A run that succeeds; what it prints."""
    ran = await attempt(home, base_url, *arguments, top=top, provider=provider)
    assert ran.code == 0, ran.said
    return ran.said


async def check_one_line(talk: Talk, base_url: str) -> None:
    """One strand, in which each prompt begins with all ids before it, and one sample of all that was sampled."""
    samples = await talk.samples(base_url)
    talk.check_all_trained_once(samples)
    assert (len(samples), len(await strands(talk, base_url))) == (1, 1)


@asynccontextmanager
async def cutting(url: str, mark: bytes) -> AsyncIterator[str]:
    """A way to the server on which the first answer with `mark` in it ends before that, its connection closed."""
    left = [mark]
    port = int(url.rsplit(":", 1)[1])

    async def carry(source: asyncio.StreamReader, to: asyncio.StreamWriter, *, cuts: bool) -> None:
        while data := await source.read(65536):
            if cuts and left and left[0] in data:
                to.write(data[: data.index(left.pop())])
                await to.drain()
                break
            to.write(data)
            await to.drain()
        to.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(carry(reader, ours, cuts=False))
            tasks.create_task(carry(theirs, writer, cuts=True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_run_with_reasoning_and_parallel_calls_is_one_line(home: Path, talking: Talking) -> None:
    async with talking(LOOK, LOOK_TWICE, "There is a note.", LOOK, "Still a note.") as talk:
        base_url = await talk.open_session()
        assert "There is a note." in await run(home, base_url, "What is here?")
        assert "Still a note." in await run(home, base_url, "resume", "--last", "And now?")
        await check_one_line(talk, base_url)
        assert [(row["kind"], row["status"]) for row in await ledger(talk, base_url)] == [("main", 200)] * 5


async def test_a_retry_after_an_engine_that_broke_attaches(home: Path, talking: Talking) -> None:
    broken = Reply(text="<think>\nHm.\n</think>\n\nI wi", breaks=True)
    async with talking(LOOK, broken, LOOK_TWICE, "There is a note.") as talk:
        base_url = await talk.open_session()
        assert "There is a note." in await run(home, base_url, "What is here?")
        (sample,) = await talk.samples(base_url)
        assert (sum(sample["loss_mask"]), talk.replies) == (await num_kept(talk, base_url), [])
        assert [row["error"] for row in await ledger(talk, base_url)] == [None, "upstream_unreachable", None, None]


async def num_kept(talk: Talk, base_url: str) -> int:
    """The sampled tokens of the turns that were kept."""
    return sum(row["sampled_tokens"] for row in await ledger(talk, base_url) if row["turn"] is not None)


async def test_a_lost_end_of_the_last_reply_is_echoed_and_one_of_a_call_goes_on(home: Path, talking: Talking) -> None:
    async with talking("There is a note.") as talk:
        base_url = await talk.open_session()
        async with cutting(talk.url, b"event: response.completed") as url:
            assert "There is a note." in await run(home, base_url.replace(talk.url, url), "What is here?")
        await check_one_line(talk, base_url)
        assert [row["kind"] for row in await ledger(talk, base_url)] == ["main", "echo"]
    async with talking(LOOK, "There is a note.") as talk:
        base_url = await talk.open_session()
        async with cutting(talk.url, b"event: response.completed") as url:
            assert "There is a note." in await run(home, base_url.replace(talk.url, url), "What is here?")
        await check_one_line(talk, base_url)
        assert [row["kind"] for row in await ledger(talk, base_url)] == ["main", "main"]


async def test_a_sub_agent_is_a_strand_of_its_own(home: Path, talking: Talking) -> None:
    task = "Read notes.txt for me."
    spawn = "<think>\nDelegate.\n</think>\n\n" + call("multi_agent_v1__spawn_agent", json.dumps({"message": task}))
    async with talking(spawn, LOOK, "It is done.", side={f"{task}<|im_end|>": "I read it."}) as talk:
        base_url = await talk.open_session()
        assert "It is done." in await run(home, base_url, "What is here?")
        samples = await talk.samples(base_url)
        talk.check_all_trained_once(samples)
        kinds = [(one["kind"], one["rule"], one["num_turns"]) for one in await strands(talk, base_url)]
        assert sorted(kinds) == [("agent", "cx-agent", 1), ("main", None, 3)]


async def test_a_compaction_is_labelled_and_what_follows_is_the_main_lines_next_chapter(
    home: Path, talking: Talking
) -> None:
    (home / "work" / "notes.txt").write_text("a note\n" * 600)
    cat = call("exec_command", '{"cmd": "cat notes.txt"}')
    async with talking(LOOK, cat, LOOK, "A summary: there is a note.", "There is a note.") as talk:
        base_url = await talk.open_session()
        limit = "model_auto_compact_token_limit = 34000"
        printed = await run(home, base_url, "What is here?", top=limit)
        assert "context compacted" in printed
        found = await strands(talk, base_url)
        assert [(one["kind"], one["num_turns"]) for one in found] == [("main", 3), ("compaction", 1), ("main", 1)]
        assert [one["continues"] for one in found] == [None, 0, 1]
        talk.check_all_trained_once(await talk.samples(base_url))


async def test_where_a_websocket_is_refused_the_request_is_sent(home: Path, talking: Talking) -> None:
    async with talking(LOOK, "There is a note.") as talk:
        base_url = await talk.open_session()
        printed = await run(home, base_url, "What is here?", provider="supports_websockets = true")
        assert "There is a note." in printed
        await check_one_line(talk, base_url)


async def test_a_custom_tool_is_called_and_its_call_is_known_again(home: Path, talking: Talking) -> None:
    patch = "*** Begin Patch\n*** Add File: made.txt\n+made\n*** End Patch\n"
    catalog = home / "catalog.json"
    catalog.write_text(json.dumps({"models": [FREEFORM]}))
    async with talking(call("apply_patch", json.dumps({"input": patch})), "Made.") as talk:
        base_url = await talk.open_session()
        assert "Made." in await run(home, base_url, "Make it.", top=f'model_catalog_json = "{catalog}"')
        assert (home / "work" / "made.txt").read_text() == "made\n"
        await check_one_line(talk, base_url)
