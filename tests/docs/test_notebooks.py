"""The notebooks have their pictures, no error, and only names that there are; `scripts/test-notebooks` runs them."""

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["grpo_step", "session"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_ran_and_the_notebook_shows_pictures_and_tables(path: Path) -> None:
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert all(cell["execution_count"] is not None for cell in cells(path))
    assert not [output for output in outputs if output["output_type"] == "error"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_ours_is_there(path: Path) -> None:
    tree = ast.parse("\n".join("".join(cell["source"]).rstrip().rstrip(";") for cell in cells(path)))
    ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "stenograph" in str(node.module)]
    assert ours
    for node in ours:
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            importlib.import_module(f"{node.module}.{alias.name}") if not hasattr(module, alias.name) else None
