"""docs/science.md names each figure that a run must show, each fault, and the place of its results."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RL = ROOT / "examples" / "rl"
PAGE = (ROOT / "docs" / "science.md").read_text()


def constant(module: str, name: str) -> Any:
    """The value of a name at a module's top."""
    for node in ast.parse((RL / f"{module}.py").read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return ast.literal_eval(value)
    raise AssertionError(f"{module}.py has no {name}")


def test_every_figure_and_every_fault_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)`[^|]*\|.*\| ([^|]*) \|$", PAGE, re.MULTILINE))
    limits = constant("report", "LIMITS")
    assert {name: rows[name] for name in limits} == {"max_distance": "≤ 1e-4", "kl": "≤ 1e-8", "share_outside": "0"}
    assert limits == {"max_distance": 1e-4, "kl": 1e-8, "share_outside": 0.0}
    assert {rows[name] for name in constant("report", "SUMS")} == {"0, with a fault too"}
    assert set(constant("report", "MEANS")) <= set(rows)
    kinds = constant("drift", "KINDS")
    assert [kind for kind in kinds if kind != "none"] == [name for name in rows if name in kinds]
    assert list(constant("compare", "COLOURS")) == list(kinds)
    trainers = (ROOT / "docs" / "trainers.md").read_text()
    assert all(f"| `{kind}` |" in trainers for kind in kinds)


def test_the_table_of_runs_has_its_place() -> None:
    begin, end = constant_pair()
    assert PAGE.count(begin) == PAGE.count(end) == 1
    assert PAGE.index(begin) < PAGE.index(end)


def constant_pair() -> tuple[str, str]:
    found = re.search(r'^BEGIN, END = "(.+)", "(.+)"$', (RL / "compare.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1], found[2]
