"""Every block between fences is run by a test, or this file says why not; whichever it is, what can be read is read.

A block is known by its page and the beginning of one of its lines. `stenograph …` lines are read by the real parsers
beside that (test_commands_documented.py).
"""

import ast
import json
import re
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stenograph.envs.base import environment
from stenograph.session.rewrite_rules import RewriteRules
from stenograph.session.side_rules import read_kind_rules
from stenograph.store.database import MIGRATIONS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

HERE = "tests/docs/test_fences.py"
CLIENT = "tests/service/test_client_pages.py"
COMMANDS = "tests/docs/test_commands_documented.py"
TUTORIAL = "scripts/tutorial.py"
SERVE = "tests/process/test_documented_serve.py"
TRAINERS = "tests/docs/test_trainers_documented.py"
CLASSES = "tests/pure/trainers/test_real_classes.py"
AGENTS = "tests/process/agents/"

RUN_BY = {
    ("accounts.md", "stenograph tenant add"): "tests/service/test_tenants.py",
    ("accounts.md", "[team-a]"): "tests/service/test_tenants.py",
    ("README.md", "pip install -e '.[demo]'"): TUTORIAL,
    ("README.md", "import httpx"): CLIENT,
    ("README.md", "from stenograph.client import SyncClient"): CLIENT,
    ("agents.md", "stenograph run --url http://127.0.0.1:8080 -- claude"): AGENTS + "test_claude_code.py",
    ("agents.md", "stenograph run --url http://127.0.0.1:8080 -- codex"): AGENTS + "test_codex.py",
    ("agents.md", "model_provider = "): AGENTS + "test_codex.py",
    ("agents.md", "stenograph run -- python my_agent.py          # with openai"): "tests/process/test_run.py",
    ("agents.md", "MSWEA_CONFIGURED"): "scripts/matrix/jobs.py",
    ("agents.md", "model = OpenAIServerModel"): AGENTS + "test_smolagents.py",
    ("agents.md", "agent = Agent(model=OpenAIModel"): AGENTS + "test_strands.py",
    ("agents.md", '{"permission"'): AGENTS + "test_opencode.py",
    ("agents.md", "OPENCODE_DISABLE"): AGENTS + "test_opencode.py",
    ("agents.md", "GEMINI_CLI_TRUST"): AGENTS + "test_gemini_cli.py",
    ("client.md", "import asyncio"): CLIENT,
    ("contributing.md", "scripts/test --fast"): "scripts/check",
    ("demo.md", "starting the server"): "scripts/demo",
    ("design.md", "flowchart TD"): "tests/docs/test_design_drawn.py",
    ("engines.md", "stenograph serve --engine sglang "): SERVE,
    ("engines.md", "stenograph serve --engine sglang-generate"): SERVE,
    ("engines.md", "stenograph serve --engine lmdeploy"): SERVE,
    ("engines.md", "stenograph serve --engine llamacpp"): SERVE,
    ("engines.md", "stenograph serve --engine vllm"): SERVE,
    ("engines.md", "report = await check_engine"): "tests/service/test_native_conformance.py",
    ("environments.md", "def tasks"): HERE,
    ("families.md", "$ stenograph verify"): "tests/process/test_verify.py",
    ("families.md", "history, first difference"): "tests/pure/families/test_verify_report.py",
    ("http-api.md", '{"sampling"'): HERE,
    ("machines.md", "stenograph ray up"): "tests/process/test_ray.py",
    ("machines.md", "from stenograph.cluster import ray"): "tests/process/test_ray.py",
    ("machines.md", "from stenograph.cluster.ray import report"): "tests/process/test_ray.py",
    ("operations.md", "[[rules]]"): HERE,
    ("operations.md", "[[drop]]"): HERE,
    ("store.md", "CREATE TABLE sessions"): HERE,
    ("suites.md", "OPENRESPONSES_DIR"): "scripts/test-suites",
    ("trainers.md", "made = dicts.padded"): TRAINERS,
    ("trainers.md", "scripts/rl "): "tests/process/test_rl.py",
    ("tutorial.md", ""): TUTORIAL,
}
"""The test or the script that runs a block, or compares it with what is printed."""

A_PICTURE = "a picture, no command"
AN_ANSWER = "an answer of the server, shortened"
A_USAGE = f"it stands for many commands; {COMMANDS} reads it"
IN_A_TRAINER = f"it runs inside a trainer, on GPUs; {TRAINERS} holds its names, {CLASSES} its rows"
NOT_RUN = {
    ("README.md", "   agent "): A_PICTURE,
    ("README.md", "sampled by the engine"): "what a real vLLM sampled",
    ("agents.md", "stenograph run --samples out.safetensors -- COMMAND"): A_USAGE,
    ("agents.md", "$ stenograph run --samples"): f"it needs a vLLM; {COMMANDS} reads it",
    ("agents.md", "pip install litellm mcp"): "a registry's package; litellm itself runs in test_real_clients.py",
    ("agents.md", "agent = Agent(OpenAIChatModel"): "pydantic-ai is in no environment of ours; its recording is",
    ("agents.md", "stenograph run -- python my_agent.py          # with google"): f"my_agent.py; {COMMANDS} reads it",
    ("bench.md", "stenograph bench soak"): f"each takes minutes to hours; {COMMANDS} reads it",
    ("bench.md", "git worktree add"): f"minutes to hours; {COMMANDS} reads it",
    ("drift.md", "["): AN_ANSWER,
    ("engines.md", "pip install -e '.[torch]'"): "it wants a GPU; scripts/test-torch runs the forward",
    ("environments.md", "stenograph rollout ENV"): A_USAGE,
    ("errors.md", '{"error"'): AN_ANSWER,
    ("errors.md", '{"type": "error"'): AN_ANSWER,
    ("http-api.md", '{"session_id"'): AN_ANSWER,
    ("index.md", "flowchart LR"): A_PICTURE,
    ("operations.md", "stenograph serve --weights-dir"): f"it needs checkpoints; {COMMANDS} reads it",
    ("science.md", "for seed in"): "hours of training; tests/process/test_rl.py runs a short one",
    ("trainers.md", "trainer ── client.rollouts"): A_PICTURE,
    ("trainers.md", "def rollout_func"): IN_A_TRAINER,
    ("trainers.md", "from verl"): IN_A_TRAINER,
    ("trainers.md", "from miles"): IN_A_TRAINER,
    ("trainers.md", "async def generate(args"): IN_A_TRAINER,
    ("trainers.md", "from prime_rl"): IN_A_TRAINER,
    ("trainers.md", "from skyrl"): IN_A_TRAINER,
}
"""Why a block is not run."""

KNOWN = {**RUN_BY, **NOT_RUN}


def blocks() -> Iterator[tuple[Path, str, str]]:
    """Each block with its page and its language."""
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            yield page, language, block


def rows_of(page: Path, block: str) -> list[tuple[str, str]]:
    """The rows that know a block."""
    lines = block.splitlines()
    return [
        (name, begins) for name, begins in KNOWN if name == page.name and any(line.startswith(begins) for line in lines)
    ]


def block_of(page: str, begins: str) -> str:
    (found,) = [block for path, _, block in blocks() if (page, begins) in rows_of(path, block)]
    return found


BLOCKS = [pytest.param(*one, id=f"{one[0].name}: {one[2].splitlines()[0][:50]}") for one in blocks()]


@pytest.mark.parametrize(("page", "language", "block"), BLOCKS)
def test_every_block_is_run_or_says_why_not(page: Path, language: str, block: str) -> None:
    assert len(rows_of(page, block)) == 1, f"{page.name}: a row in RUN_BY, or in NOT_RUN with the reason"


def test_every_row_is_of_a_block_and_every_test_is_there() -> None:
    used = {row for page, _, block in blocks() for row in rows_of(page, block)}
    assert used == set(KNOWN)
    assert [test for test in RUN_BY.values() if not (ROOT / test).exists()] == []


@pytest.mark.parametrize(("page", "language", "block"), BLOCKS)
def test_what_is_in_a_block_can_be_read(page: Path, language: str, block: str) -> None:
    readers: dict[str, Callable[[str], object]] = {
        "python": ast.parse,
        "json": json.loads,
        "toml": tomllib.loads,
    }
    if language in readers:
        readers[language](block.replace("tools=[…]", "tools=[]"))
    assert language in {"", "sh", "sql", "mermaid", *readers}


def test_the_rules_of_the_handbook_are_read_as_an_operator_s() -> None:
    kinds, rewrites = block_of("operations.md", "[[rules]]"), block_of("operations.md", "[[drop]]")
    read_kind_rules(kinds)
    assert {"my-header", "my-date"} <= set(RewriteRules.read(rewrites).names)


def test_the_environment_of_the_page_is_one(tmp_path: Path) -> None:
    (tmp_path / "cities.py").write_text(block_of("environments.md", "def tasks"))
    made = environment(str(tmp_path / "cities.py"), {})
    assert [task.id for task in made.tasks(limit=None, seed=None)] == ["paris", "rome"]


def test_the_tables_of_the_store_are_those_of_its_page() -> None:
    of_page, of_code = sqlite3.connect(":memory:"), sqlite3.connect(":memory:")
    of_page.executescript(block_of("store.md", "CREATE TABLE sessions"))
    for schema in MIGRATIONS:
        for statement in schema:
            of_code.execute(statement)
    asked = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    named = [{name: re.sub(r"\s+", " ", sql) for name, sql in one.execute(asked)} for one in (of_page, of_code)]
    assert named[0].items() <= named[1].items()
