"""A function is short and flat: at most 50 lines of body, at most 3 blocks within one another."""

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.pure.trees import BENCHMARKS, BESIDE, MODULES, name_of, tree_of

MAX_BODY_LINES = 50
MAX_NESTING = 3

MAX_BENCHMARK_LINES = 10_305
"""All of benchmarks/. It only shrinks."""

TOO_LONG: set[str] = set()
TOO_DEEP = {
    # An inner generator would cost each chunk a hop more, and have to be closed by the same blocks.
    "engine/fleet/fleet.Fleet._generate",
    # A function for the innermost condition would cost each chunk of a chat a call.
    "session/steps.RunningTurn.sample",
}
"""Functions over a limit, with the reason. Both sets only shrink: one that is within the limit fails the test."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Block = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.TryStar | ast.Match


def functions_of(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Every function in a module, methods and inner functions included, by its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}.{child.name}" if isinstance(child, ast.ClassDef | Function) else prefix
        if isinstance(child, Function):
            yield name, child
        yield from functions_of(child, name)


def body_of(function: Function) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body[ast.get_docstring(function) is not None :]


def num_body_lines(function: Function) -> int:
    body = body_of(function)
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


def nesting_of(statements: Sequence[ast.stmt]) -> int:
    """Blocks within one another; an `elif` is as deep as its `if`, an inner function is counted by itself."""
    return max((_depth_of(statement) for statement in statements), default=0)


def _depth_of(statement: ast.stmt) -> int:
    if not isinstance(statement, Block):
        return 0
    branches = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    branches += [branch.body for name in ("handlers", "cases") for branch in getattr(statement, name, [])]
    chained = isinstance(statement, ast.If) and len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If)
    elif_depth = nesting_of(branches.pop(1)) if chained else 0
    return max(elif_depth, 1 + max(map(nesting_of, branches)))


def all_functions() -> Iterator[tuple[str, Function]]:
    return (found for path in [*MODULES, *BESIDE] for found in functions_of(tree_of(path), name_of(path)))


def test_a_function_has_at_most_50_lines_of_body() -> None:
    assert {name for name, function in all_functions() if num_body_lines(function) > MAX_BODY_LINES} == TOO_LONG


def test_blocks_are_nested_at_most_three_deep() -> None:
    assert {name for name, function in all_functions() if nesting_of(body_of(function)) > MAX_NESTING} == TOO_DEEP


def test_the_benchmarks_stay_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in BENCHMARKS) <= MAX_BENCHMARK_LINES


@pytest.mark.parametrize(
    ("source", "depth"),
    [
        ("x = 1", 0),
        ("if a:\n  pass\nelif b:\n  pass\nelse:\n  pass", 1),
        ("if a:\n  pass\nelse:\n  if b:\n    pass\n  c()", 2),
        ("for a in b:\n  with c:\n    try:\n      pass\n    except d:\n      if e:\n        pass", 4),
        ("match a:\n  case 1:\n    while b:\n      pass", 2),
        ("if a:\n  def f():\n    if b:\n      pass", 1),
    ],
)
def test_nesting_is_counted_by_block(source: str, depth: int) -> None:
    assert nesting_of(ast.parse(source).body) == depth
