"""A server loads what its settings ask for, and nothing else: told by its modules after a session's chats."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.house.__main__ import chatted, one_engine
from benchmarks.house.source import part_of
from benchmarks.house.watched import PRODUCT
from benchmarks.kit.processes import Children
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.servers import start_standin

pytestmark = pytest.mark.timeout(600)

ONE_ENGINE = 219
"""Modules of ours that a server loads for OpenAI's chats, one SGLang and SQLite."""
OF_A_FLEET_OR_A_LORA = {
    "engine/fleet/gate",
    "engine/fleet/memory",
    "engine/exposition",
    "engine/sglang/load",
    "engine/http/loras",
    "http/policy_check",
    "session/policies",
}
DEFAULT = 228
"""Of the default flags: the embedded engine and every dialect."""


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


def names(files: list[Path]) -> set[str]:
    return {str(file.relative_to(PRODUCT).with_suffix("")).removesuffix("/__init__") for file in files}


def parts_of(loaded: set[str]) -> set[str]:
    """Parts with a module that is loaded."""
    return {part for name in loaded if (part := part_of(name)) is not None}


def test_one_engine_loads_no_other_and_no_part(tiny: Path, tmp_path: Path, children: Children) -> None:
    _, engine = start_standin(children, ReplyShape(num_tokens=4, vocab_size=250))
    files, _ = chatted(children, one_engine(tiny, engine, tmp_path / "data"))
    loaded = names(files)
    assert parts_of(loaded) == set()
    folders = {tuple(name.split("/")[:2]) for name in loaded if name.count("/") > 1}
    assert {folder for room, folder in folders if room == "dialects"} == {"common", "openai"}
    assert {folder for room, folder in folders if room == "engine"} == {"fleet", "http", "sglang"}
    assert {name for name in loaded if name.startswith("families/")} == {"families/chatml", "families/load"}
    assert not {name for name in loaded if name.startswith("http/openapi")}
    assert not loaded & OF_A_FLEET_OR_A_LORA
    assert len(loaded) <= ONE_ENGINE, len(loaded)


def test_the_default_server_loads_no_client_of_engines(tiny: Path, children: Children) -> None:
    files, _ = chatted(children, ["--model", str(tiny)])
    loaded = names(files)
    assert parts_of(loaded) == {"embedded"}
    assert not {name for name in loaded if name.startswith(("engine/http", "engine/sglang", "embedded/forward"))}
    assert len(loaded) <= DEFAULT, len(loaded)


def test_the_parent_of_workers_imports_for_all_of_them() -> None:
    program = (
        "import sys; from stenograph.cluster.parent import load_parts; from stenograph.cli.parts import PARTS\n"
        "from stenograph.http.settings import Settings\n"
        "load_parts(Settings(engine='vllm', dialects=('gemini',)), PARTS); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    named = {"cluster.worker", "engine.vllm.adapter", "engine.http.engine", "dialects.gemini.dialect"}
    assert {f"stenograph.{name}" for name in named} <= loaded
    assert (
        not {"stenograph.dialects.anthropic.dialect", "stenograph.engine.sglang.chat", "stenograph.embedded"} & loaded
    )


@pytest.mark.parametrize(
    ("command", "most"),
    [
        ("--version", 8),
        ("--help", 8),
        ("inspect --help", 8),
        ("serve --help", 27),
        ("export --help", 25),
        ("run --url http://127.0.0.1:9 -- true", 35),
        ("inspect no-such-folder", 53),
        ("check no-such-folder", 53),
    ],
)
def test_a_command_that_computes_nothing_loads_little_and_no_numpy(command: str, most: int) -> None:
    """The most is of modules of ours."""
    timed = [sys.executable, "-X", "importtime", "-m", "stenograph.cli.main", *command.split()]
    told = subprocess.run(timed, capture_output=True, text=True, check=False).stderr
    loaded = {line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")}
    assert "stenograph.cli" in loaded
    assert not {"numpy", "tokenizers", "asyncio"} & loaded
    assert len({name for name in loaded if name.startswith("stenograph")}) <= most


def test_reading_turns_of_a_store_loads_store_and_trajectory_alone() -> None:
    program = "import sys; from stenograph.cli import store_commands; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("stenograph.")}
    assert rooms == {"cli", "core", "model", "parts", "store", "trajectory"}  # of parts settings
    assert "stenograph.store.restored" in done.stdout.split()
    assert "numpy" not in done.stdout.split()
