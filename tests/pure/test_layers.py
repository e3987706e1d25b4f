"""The layout holds: imports go downwards only, at the top of the file, without cycles; pure rooms stay pure."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
LAYERS = [
    ["core"],
    ["protocol", "render", "offload"],
    ["embedded"],
    ["engine", "store"],
    ["session"],
    ["export"],
    ["http"],
    ["cli", "bench"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

PURE = (
    "core",
    "protocol",
    "render",
    "export",
    "engine/lmdeploy_wire",
    "engine/sglang_generate_wire",
    "engine/sglang_request",
    "engine/sglang_rows",
    "engine/llamacpp_schema",
    "engine/llamacpp_text",
    "engine/llamacpp_wire",
    "engine/sglang_wire",
    "engine/placement",
    "engine/trust",
    "engine/validate",
    "engine/vllm_reply",
    "engine/vllm_request",
    "engine/vllm_scores",
    "engine/vllm_wire",
    "session/budget",
    "session/history",
    "session/line_json",
    "session/matching",
    "session/meter",
    "session/recent",
    "session/reply_grammar",
    "session/retries",
    "session/tree",
    "embedded/block_pool",
    "embedded/block_table",
    "embedded/free_blocks",
    "embedded/prefix_tree",
    "embedded/scheduler",
    "embedded/llguidance_limits",
    "embedded/xgrammar_schema",
)
IMPURE_ON_PURPOSE = {
    "core/clock": "the only reader of time",
    "core/settings": "reads the settings file",
    "render/model_files": "reads a model's files, once, at the start",
    "render/gguf_metadata": "maps a GGUF file, once, at the start",
}
IMPURE_MODULES = {"asyncio", "time", "random", "socket", "logging", "threading", "subprocess", "selectors"}

TASK_OWNERS = {
    "session/manager": "owns every turn; drain and delete await them",
    "http/app": "serve cancels its housekeeper and awaits it",
    "http/proxy_route": "the handler owns its exchange and awaits it on exit",
    "http/wire": "the handler owns its watcher and awaits it on exit",
    "engine/local": "owns its child's reader and supervisor; aclose awaits them",
    "engine/http_engine": "owns its requests, aborts and probe; aclose awaits them",
    "testing/faults": "hands a connection's task to the server's set, which its aclose awaits",
    "testing/scripted_engine": "waits for both of its tasks before it goes on",
}

MODULES = sorted(SRC.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC / "stenograph").with_suffix("")).removesuffix("/__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of ours that a module imports, by name."""
    found = {
        name.removeprefix("stenograph.").replace(".", "/")
        for name in imports_of(tree_of(path))
        if name.startswith("stenograph.")
    }
    return {name for name in found if (SRC / "stenograph" / f"{name}.py").exists()} | {
        name for name in found if (SRC / "stenograph" / name / "__init__.py").exists()
    }


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_rooms_below_its_own(path: Path) -> None:
    room = name_of(path).split("/")[0]
    for imported in own_imports(path):
        other = imported.split("/")[0]
        if room == "testing":
            assert other == "testing" or LEVEL[other] < LEVEL["http"]
        elif other != room:
            assert other != "testing", "nothing in the product imports its tests' stand-ins"
            assert LEVEL[other] < LEVEL[room], f"{name_of(path)} imports {imported}"


def test_there_are_no_import_cycles() -> None:
    graph = {name_of(path): own_imports(path) - {name_of(path)} for path in MODULES}
    # A package's __init__ that names its modules is no cycle of them.
    order = {name: {other for other in others if not name.startswith(other + "/")} for name, others in graph.items()}
    assert len(list(TopologicalSorter(order).static_order())) >= len(MODULES)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_stand_at_the_top(path: Path) -> None:
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [node for function in functions for node in ast.walk(function)]
    assert not [node for node in inner if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("path", [path for path in MODULES if name_of(path).startswith(PURE)], ids=name_of)
def test_a_pure_module_has_no_io_no_clock_no_async(path: Path) -> None:
    tree = tree_of(path)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)]
    if name_of(path) not in IMPURE_ON_PURPOSE:
        assert not {name.split(".")[0] for name in imports_of(tree)} & IMPURE_MODULES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_task_has_an_owner_and_nothing_is_shielded(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Call):
            assert node.attr not in ("shield", "ensure_future"), f"line {node.lineno}"
            of_a_group = isinstance(node.value, ast.Name) and node.value.id in ("tasks", "group")
            if node.attr == "create_task" and not of_a_group:
                assert name_of(path) in TASK_OWNERS, f"line {node.lineno}: who awaits this task?"
