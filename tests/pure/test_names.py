"""One class name has one meaning: no two classes of the product share a name. A docstring begins with a subject."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PRODUCT = SRC / "stenograph"

CLAUSE = re.compile(r"\s*(What|Who|How|Which|Why)\b")
"""Beginnings of a clause that stands as a subject."""


def shared_names() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {name for name, number in Counter(classes).items() if number > 1}


def test_a_class_name_has_one_meaning() -> None:
    assert shared_names() == set()


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, and the texts below its attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text
            case _:
                pass


def test_a_docstring_begins_with_a_subject_not_with_a_clause() -> None:
    begun = [
        f"{path.relative_to(PRODUCT)}: {text.strip().splitlines()[0]}"
        for path in sorted(PRODUCT.rglob("*.py"))
        for text in docstrings(path.read_text())
        if CLAUSE.match(text)
    ]
    assert begun == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What a module is."""', True),
        ('def f():\n  """How it ends."""', True),
        ('class A:\n  b: int = 0\n  """Who it is."""', True),
        ('"""Whether it ends."""', False),
        ('"""Ends it."""', False),
        ('a = "What it is."', False),
    ],
)
def test_a_clause_is_found_in_every_docstring(source: str, found: bool) -> None:
    assert any(map(CLAUSE.match, docstrings(source))) is found
