"""docs/trainers.md: its settings are settings, its lines of Python name what there is, and no adapter is left out."""

import ast
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from stenograph.cli.settings_table import load_settings
from stenograph.trainers import dicts, miles, prime_rl, rows, tinker, trl, verl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text()
CONFIGS = sorted((ROOT / "examples" / "trainers").glob("*.toml"))
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADAPTERS = (dicts, miles, prime_rl, tinker, trl, verl)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_trainer_s_settings_are_read_by_the_server(file: Path) -> None:
    settings = load_settings({}, {}, file)
    assert settings.require_logprobs == "tempered"
    assert f"(../examples/trainers/{file.name})" in PAGE


def functions(module: types.ModuleType) -> Iterator[str]:
    """The public functions that a module defines."""
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def test_every_adapter_is_on_the_page() -> None:
    shown = {"dicts.staleness", "verl.agent_loop_fields", "trl.rollout_reward"}  # parts of others, or shown as one
    missing = [
        f"{module.__name__.rsplit('.', 1)[1]}.{name}"
        for module in ADAPTERS
        for name in functions(module)
        if f"{name}`" not in PAGE and f".{name}(" not in PAGE
    ]
    assert set(missing) <= shown


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.split("\n", 1)[0])
def test_the_lines_of_the_page_name_what_there_is(program: str) -> None:
    tree = ast.parse(program)
    ours: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stenograph"):
            for alias in node.names:
                module = importlib.import_module(str(node.module))
                ours[alias.name] = getattr(module, alias.name, None) or importlib.import_module(
                    f"{node.module}.{alias.name}"
                )
    assert ours
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            assert hasattr(ours[node.value.id], node.attr), node.attr
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=called)) if name in ours:
                names = inspect.signature(getattr(ours[name], called)).parameters
                assert {keyword.arg for keyword in node.keywords} <= set(names)


def test_the_versions_that_the_rows_were_written_against_are_on_the_page() -> None:
    for module in (trl, verl, tinker):
        assert module.WRITTEN_AGAINST.split()[1] in PAGE
    assert "`rows.advantages`" in PAGE
    assert rows.advantages
