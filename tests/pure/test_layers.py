"""The layout holds: imports go downwards only, at the top of the file, without cycles; pure rooms stay pure."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.house.source import nevers
from stenograph.cli.commands import COMMANDS
from stenograph.dialects.openai.chat_fields import WireChatRequest
from stenograph.dialects.openai.completions import WireCompletionRequest
from tests.pure.trees import BESIDE, MODULES, SRC, name_of, tree_of

LAYERS = [
    ["core"],
    ["model", "dialects", "trajectory", "offload", "parts"],
    ["text"],
    ["families"],
    ["engine", "store"],
    ["session", "export"],
    ["verify", "conformance"],
    ["http"],
    ["client"],
    ["trainers", "envs"],
    ["embedded", "cluster", "console", "otel", "weights", "scores", "accounts", "backup", "replay", "fork", "tenants"],
    ["cli"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
MAX_LINES = 500
TO_BE_SPLIT: set[str] = set()

PURE = (
    "core",
    "dialects",
    "trajectory",
    "text",
    "families",
    "export",
    "console/assets",
    "console/documents",
    "console/groups",
    "console/now",
    "console/page",
    "console/steps",
    "console/tokens",
    "console/views",
    "console/vocabulary",
    "engine/validate",
    "engine/fleet/memory",
    "engine/fleet/placement",
    "engine/sglang/chat_wire",
    "engine/sglang/generate_wire",
    "engine/sglang/request",
    "engine/columns",
    "engine/rows",
    "engine/vllm/reply",
    "engine/vllm/request",
    "engine/vllm/scores",
    "engine/vllm/wire",
    "engine/lmdeploy/reply",
    "engine/lmdeploy/request",
    "engine/llamacpp/schema",
    "engine/llamacpp/text",
    "engine/llamacpp/wire",
    "client/batch",
    "client/claims",
    "client/samples",
    "client/scores",
    "client/shown",
    "client/tree",
    "client/errors",
    "trainers",
    "session/kinds",
    "session/side_rules",
    "session/ledger",
    "session/retries",
    "store/codec",
    "weights/commands",
    "accounts/merging",
    "accounts/requests",
    "scores/passes",
    "scores/requests",
    "store/groups",
    "cluster/postgres/lease",
    "embedded/kv",
    "embedded/scheduler",
    "embedded/grammar/llguidance_limits",
)
IMPURE_ON_PURPOSE = {
    "core/clock": "the only reader of time",
    "core/loaded": "imports what a command line or a setting names",
    "core/settings": "reads the settings file",
    "core/whole_file": "writes files",
    "families/chatml": "reads its template at import",
    "session/side_rules": "reads the shipped rules at import",
    "trajectory/matching": "imports a matcher by its dotted path",
    "export/arrow": "imports pyarrow where it is installed",
    "console/assets": "reads the page's files at import",
}
IMPURE_MODULES = {
    "asyncio", "time", "random", "socket", "logging", "threading", "subprocess", "selectors", "importlib", "pathlib",
}  # fmt: skip

BELOW_DIALECTS = {
    "core", "model", "parts", "trajectory", "offload", "text", "families", "embedded", "engine", "store", "session",
    "export", "verify", "console",
}  # fmt: skip
"""Rooms that know requests as values, whatever dialect they came in."""
ROUTES = {"console/routes"}
"""Modules of theirs with routes, which know the requests of these."""

TASK_OWNERS = {
    "session/manager": "owns every turn; drain and delete await them",
    "http/server": "cancels its housekeeper and what waits for readiness, and awaits them",
    "cluster/all_moments": "streams of other workers, which the last viewer cancels and aclose awaits",
    "http/proxy_route": "the handler owns its exchange and awaits it on exit",
    "http/connection": "hands its tasks to the server's set, which uvicorn's shutdown awaits",
    "cluster/forwarding": "the request owns what sends its body on, and awaits it",
    "cluster/postgres/store": "owns its lease, its writer and what it asks; aclose awaits them",
    "cluster/worker": "owns what tells the other workers of a state; aclose cancels and awaits it",
    "client/sync": "waits for what it begins on the loop of its thread",
    "client/client": "owns what opens and deletes sessions; its end awaits them",
    "client/rollouts": "a rollout cancels its agent and awaits it",
    "embedded/engine": "owns its child's reader and supervisor; aclose awaits them",
    "engine/fleet/gate": "owns the tasks that ask engines how full they are; aclose cancels and awaits them",
    "engine/http/engine": "owns its requests, aborts and probe; aclose awaits them",
    "standins/faults": "hands a connection's task to the server's set, which its aclose awaits",
    "standins/scripted_engine": "waits for both of its tasks before it goes on",
}

AT_A_TRAINER = {
    "client": {"client", "core/errors", "core/prefix_tree", "core/support", "aiohttp", "numpy"},
    "trainers": {"client", "trainers", "numpy"},
    "envs": {"client", "envs", "core/loaded", "core/whole_file", "aiohttp"},
}
"""Rooms that a trainer installs: all that they import beside the standard library. They know the server by HTTP."""

BESIDE_IMPORTS = {
    "standins": {"standins", "core", "model", "parts", "embedded", "engine", "store", "cluster"},
    "benchmarks": {"benchmarks", "standins", *LEVEL},
    "scripts": {"scripts", "benchmarks", "standins", *LEVEL},
}
"""All of ours that each tree beside the product imports. Of `cluster`, a stand-in has the database's answers."""


def path_of(name: str) -> Path:
    return next(path for path in MODULES if name_of(path) == name)


def room_of(path: Path) -> str:
    return name_of(path).split("/")[0]


ENTRY = re.compile(r"(stenograph(?:\.\w+)+):(\w+)")
"""A text that `core/loaded` imports a module of ours by."""


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def entries_of(tree: ast.AST) -> list[tuple[str, str]]:
    """The modules and names of a module's entries."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [(found[1], found[2]) for text in texts if (found := ENTRY.fullmatch(text))]


@functools.cache
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
    room = room_of(path)
    entries = {module.removeprefix("stenograph.").replace(".", "/") for module, _ in entries_of(tree_of(path))}
    for imported in own_imports(path) | entries:
        other = imported.split("/")[0]
        if other != room:
            assert LEVEL[other] < LEVEL[room], f"{name_of(path)} imports {imported}"


NEVERS = (
    "no protocol stands on another",
    "records are no client's protocol",
    "an engine knows no client's protocol",
    "a session knows no other process",
    "export is on trajectory alone",
    "the core imports no part",
)


@functools.cache
def imports_against() -> dict[str, list[str]]:
    """The imports against each never, a text that names a module included."""
    return nevers(SRC)


@pytest.mark.parametrize("never", NEVERS)
def test_a_never_has_no_import_against_it(never: str) -> None:
    assert imports_against()[never] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_text_of_a_module_s_name_is_put_together(path: Path) -> None:
    """Or an import could hide from these laws, which see whole names."""
    joined = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.JoinedStr)]
    begun = [node.values[0].value for node in joined if node.values and isinstance(node.values[0], ast.Constant)]
    assert not [text for text in begun if str(text).startswith("stenograph.")]


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) in AT_A_TRAINER], ids=name_of)
def test_a_trainer_s_side_imports_nothing_of_the_server(path: Path) -> None:
    allowed = AT_A_TRAINER[room_of(path)]
    assert {name for name in own_imports(path) if name != "core"} <= {
        name for name in map(name_of, MODULES) if name in allowed or name.split("/")[0] in allowed
    }
    tops = {name.split(".")[0] for name in imports_of(tree_of(path))} - {"stenograph"}
    assert tops - set(sys.stdlib_module_names) <= allowed


def test_nothing_of_the_server_imports_the_client() -> None:
    above = {"client", "trainers", "envs", "cli"}
    assert not [
        name_of(path)
        for path in MODULES
        if room_of(path) not in above and any(name.split("/")[0] in AT_A_TRAINER for name in own_imports(path))
    ]


IN_THE_SERVER = {"embedded/engine", "embedded/part", "embedded/shared_process"}
"""The modules of `embedded` on the server's side. The rest computes, in the engine's process, and knows no server."""


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if room_of(path) == "embedded" and name_of(path) not in IN_THE_SERVER],
    ids=name_of,
)
def test_the_calculation_of_the_embedded_engine_knows_no_server(path: Path) -> None:
    assert {name.split("/")[0] for name in own_imports(path)} <= {"core", "model", "text", "parts", "embedded"}
    assert not own_imports(path) & IN_THE_SERVER


def test_every_room_has_a_level() -> None:
    rooms = {room_of(path) for path in MODULES if path.parent != SRC / "stenograph"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_product_imports_nothing_that_is_not_shipped_with_it(path: Path) -> None:
    """`stenograph bench` hands over to the benchmarks of a checkout, without an import."""
    named = [*imports_of(tree_of(path)), *(text for text in texts_of(tree_of(path)) if "." in text)]
    assert not {name.split(".")[0] for name in named} & {"benchmarks", "scripts", "standins", "tests"}


@pytest.mark.parametrize("path", BESIDE, ids=name_of)
def test_a_module_beside_the_product_imports_what_its_tree_may(path: Path) -> None:
    ours = {"stenograph", "benchmarks", "scripts", "standins", "tests"}
    named = [name.split(".") for name in imports_of(tree_of(path)) if name.split(".")[0] in ours]
    tops = {parts[1] if parts[0] == "stenograph" else parts[0] for parts in named if parts != ["stenograph"]}
    assert tops <= BESIDE_IMPORTS[room_of(path)]


def test_there_are_no_import_cycles() -> None:
    graph = {name_of(path): own_imports(path) - {name_of(path)} for path in MODULES}
    # A package's __init__ that names its modules is no cycle of them.
    order = {name: {other for other in others if not name.startswith(other + "/")} for name, others in graph.items()}
    assert len(list(TopologicalSorter(order).static_order())) >= len(MODULES)


@pytest.mark.parametrize("path", [*MODULES, *BESIDE], ids=name_of)
def test_a_file_has_at_most_500_lines(path: Path) -> None:
    is_long = len(path.read_text().splitlines()) > MAX_LINES
    assert is_long is (name_of(path) in TO_BE_SPLIT)


@pytest.mark.parametrize("path", [*MODULES, *BESIDE], ids=name_of)
def test_imports_stand_at_the_top(path: Path) -> None:
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [node for function in functions for node in ast.walk(function)]
    assert not [node for node in inner if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_of_ours_is_imported_by_a_text_but_by_an_entry(path: Path) -> None:
    """Or an import could hide from these laws, which see entries."""
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    for call in calls if name_of(path) != "core/loaded" else ():
        if isinstance(call.func, ast.Name | ast.Attribute):
            name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
            is_import = name in ("import_module", "__import__")
            given = [one.value for one in call.args if isinstance(one, ast.Constant)]
            assert not is_import or not str(given[:1]).startswith("['stenograph"), f"line {call.lineno}"


@functools.cache
def defined_in(module: str) -> set[str]:
    """The names that a module of ours defines."""
    defined = tree_of(path_of(module.removeprefix("stenograph.").replace(".", "/"))).body
    names = {node.name for node in defined if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    for node in defined:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_an_entry_names_what_is_there() -> None:
    """Its module stands in no import: this is where a renamed one is found."""
    entries = {entry for path in MODULES for entry in entries_of(tree_of(path))}
    assert entries
    assert not [f"{module}:{name}" for module, name in sorted(entries) if name not in defined_in(module)]


def test_every_command_has_an_entry() -> None:
    assert all(ENTRY.fullmatch(command.entry) for command in COMMANDS.values())


def texts_of(tree: ast.AST) -> list[str]:
    """Every text that a module has, parts of f-strings included."""
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of(path) in BELOW_DIALECTS and name_of(path) not in ROUTES], ids=name_of
)
def test_below_the_dialects_nothing_points_into_a_client_s_request(path: Path) -> None:
    tree = tree_of(path)
    fields = {*WireChatRequest.__struct_fields__, *WireCompletionRequest.__struct_fields__}
    assert not [text for text in texts_of(tree) if text.startswith("/") and text.split("/")[1] in fields]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if any(keyword.arg == "param" for keyword in call.keywords)]


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of(path) in BELOW_DIALECTS - {"engine"}], ids=name_of
)
def test_below_the_dialects_there_is_no_path_and_no_reply_id_of_a_dialect(path: Path) -> None:
    """But in `engine`, which speaks to servers that have such paths and ids themselves."""
    texts = texts_of(tree_of(path))
    assert not [text for text in texts if text.startswith("/v1/") or "cmpl-" in text or text.endswith("cmpl")]


def is_pure(name: str) -> bool:
    return any(name == pure or name.startswith(f"{pure}/") for pure in PURE)


@pytest.mark.parametrize("path", [path for path in MODULES if is_pure(name_of(path))], ids=name_of)
def test_a_pure_module_has_no_io_no_clock_no_async(path: Path) -> None:
    tree = tree_of(path)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)]
    if name_of(path) not in IMPURE_ON_PURPOSE:
        assert not {name.split(".")[0] for name in imports_of(tree)} & IMPURE_MODULES


SPAWNS = ("create_task", "ensure_future", "shield", "run_coroutine_threadsafe")


def groups_of(tree: ast.AST) -> set[str]:
    """The names under which a module has an `asyncio.TaskGroup`, which awaits what it starts."""
    items = [item for node in ast.walk(tree) if isinstance(node, ast.AsyncWith) for item in node.items]
    return {
        item.optional_vars.id
        for item in items
        if isinstance(item.optional_vars, ast.Name) and ast.unparse(item.context_expr) == "asyncio.TaskGroup()"
    }


def spawned_in(tree: ast.AST) -> list[tuple[str, int]]:
    """Each place where a module starts a task by itself, or names what does: the name and the line."""
    groups = groups_of(tree)
    named = [
        (node.attr if isinstance(node, ast.Attribute) else node.id, ast.unparse(node), node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    texts = [(node.value, node.value, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    of_groups = {f"{group}.create_task" for group in groups}
    return [(name, line) for name, spelled, line in (*named, *texts) if name in SPAWNS and spelled not in of_groups]


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.create_task(f())",
        "create_task(f())",
        "loop.create_task(f())",
        "self.loop.create_task(f())",
        "self._client.loop.create_task(f())",
        "asyncio.get_running_loop().create_task(f())",
        "loops[0].create_task(f())",
        "begin = self.loop.create_task\nbegin(f())",
        "getattr(loop, 'create_task')(f())",
        "asyncio.ensure_future(f())",
        "asyncio.shield(f())",
        "group.create_task(f())",
    ],
)
def test_a_task_is_seen_however_it_is_spelled(code: str) -> None:
    assert len(spawned_in(ast.parse(code))) == 1


def test_a_task_of_a_group_needs_no_other_owner() -> None:
    code = "async def f():\n    async with asyncio.TaskGroup() as group:\n        group.create_task(g())"
    assert spawned_in(ast.parse(code)) == []


def test_a_task_has_an_owner_and_nothing_is_shielded() -> None:
    found = {name_of(path): spawned_in(tree_of(path)) for path in [*MODULES, *BESIDE]}
    assert not [(name, *one) for name, ones in found.items() for one in ones if one[0] in ("ensure_future", "shield")]
    assert {name for name, ones in found.items() if ones} == set(TASK_OWNERS), "who awaits these tasks?"


def test_what_the_laws_name_is_there() -> None:
    names = set(map(name_of, [*MODULES, *BESIDE]))
    names |= {name_of(path.parent / "x").removesuffix("/x") for path in MODULES}
    named = {*PURE, *IMPURE_ON_PURPOSE, *TASK_OWNERS, *BELOW_DIALECTS, *ROUTES, *TO_BE_SPLIT}
    own = {name for names in AT_A_TRAINER.values() for name in names if (SRC / "stenograph").joinpath(name).exists()}
    assert named - names == set()
    assert own <= names
    pure = {name_of(path) for path in MODULES if is_pure(name_of(path))}
    impure = {name for name in pure if {n.split(".")[0] for n in imports_of(tree_of(path_of(name)))} & IMPURE_MODULES}
    assert set(IMPURE_ON_PURPOSE) == impure, "an exception that none needs"
