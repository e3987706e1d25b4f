"""The notebooks have their pictures, no error, only names that there are, and a right gradient.

`tests/process/test_notebooks.py` runs them.
"""

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
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


def test_the_gradient_of_the_step_is_that_of_differences() -> None:
    """The cells' own functions, with a head of 50 tokens and 8 gains, some ratios clipped, in float64."""
    sources = ["".join(cell["source"]) for cell in cells(NOTEBOOKS[0])]
    tree = ast.parse("\n".join(source.rstrip().rstrip(";") for source in sources))
    names = ("log_softmax", "objective")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(functions) == 2
    random = np.random.default_rng(0)
    targets = random.integers(0, 50, 30)
    scope: dict[str, Any] = {"np": np, "chosen": (np.arange(30), targets), "advantage": random.normal(size=30)}
    scope |= {"hidden": random.normal(size=(30, 8)), "head": random.normal(size=(50, 8))}
    scope["temperatures"] = random.uniform(0.5, 1.5, (30, 1))
    exec(compile(ast.Module(functions, []), str(NOTEBOOKS[0]), "exec"), scope)
    gain = random.normal(size=8)
    scope["recorded"] = scope["log_softmax"](gain)[scope["chosen"]] + 0.3 * random.normal(size=30)
    _, gradient, ratio = scope["objective"](gain)
    assert ratio.min() < 0.8
    assert ratio.max() > 1.2
    sides = [[scope["objective"](gain + sign * step)[0] for sign in (1, -1)] for step in 1e-6 * np.eye(8)]
    assert np.allclose(gradient, [(above - below) / 2e-6 for above, below in sides], rtol=0, atol=1e-8)
