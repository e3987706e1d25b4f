"""One class name has one meaning: no two classes share a name. A docstring begins with a subject."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.pure.trees import BESIDE, MODULES, name_of, tree_of

CLAUSE = re.compile(r"\s*(What|Who|How|Which|Why)\b")
"""Beginnings of a clause that stands as a subject."""


def test_a_class_name_has_one_meaning() -> None:
    nodes = (node for path in [*MODULES, *BESIDE] for node in ast.walk(tree_of(path)))
    numbers = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, number in numbers.items() if number > 1} == set()


def docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, and the texts below its attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text
            case _:
                pass


def test_a_docstring_begins_with_a_subject_not_with_a_clause() -> None:
    begun = [
        f"{name_of(path)}: {text.strip().splitlines()[0]}"
        for path in [*MODULES, *BESIDE]
        for text in docstrings(tree_of(path))
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
    assert any(map(CLAUSE.match, docstrings(ast.parse(source)))) is found


RELATIVE = {"that", "which", "who", "whose", "what"}
MOST_RELATIVE = 2.0
"""In a hundred words of the docstrings of a room. trio, httpcore, msgspec and datasette have 0.8 to 1.8."""


def words_of(room: str) -> list[str]:
    paths = [path for path in MODULES if name_of(path).split("/")[0] == room]
    return [
        word.lower() for path in paths for text in docstrings(tree_of(path)) for word in re.findall(r"[A-Za-z']+", text)
    ]


@pytest.mark.parametrize("room", sorted({name_of(path).split("/")[0] for path in MODULES if "/" in name_of(path)}))
def test_docstrings_say_what_a_thing_does(room: str) -> None:
    words = words_of(room)
    assert 100 * sum(word in RELATIVE for word in words) <= MOST_RELATIVE * len(words)
