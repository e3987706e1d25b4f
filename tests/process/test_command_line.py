"""The command line answers without loading a server: what each command imports, and what it says of a mistyped one."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import stenograph
from stenograph.cli.commands import COMMANDS

pytestmark = pytest.mark.timeout(600)

HEAVY = {"aiohttp", "gguf", "jinja2", "llguidance", "minijinja", "numpy", "starlette", "tokenizers", "uvicorn", "yarl"}
MAX_OWN_MODULES = 40
"""Modules of ours that reading a command line may load: the settings' rows, and the table of commands."""

OURS = sorted(COMMANDS.keys() - {"bench"})
"""`bench` becomes a program of its own."""

LOADED = """
import json, sys
from stenograph.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def loaded_by(*arguments: str) -> tuple[int, set[str], str]:
    """The exit code of a command, all modules that it has loaded, and what it said before."""
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)
    *said, last = done.stderr.splitlines()
    code, modules = json.loads(last)
    return code or 0, set(modules), done.stdout + "\n".join(said)


def check_light(modules: set[str], *, own: int) -> None:
    assert not HEAVY & {name.split(".")[0] for name in modules}
    ours = [name for name in modules if name.split(".")[0] == "stenograph"]
    assert len(ours) <= own, ours


@pytest.mark.parametrize(
    "flags", [["--version"], ["-V"], ["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_what_only_tells_of_commands_loads_none_of_them(flags: list[str]) -> None:
    if flags[0] == "bench":
        return  # a program of its own
    code, modules, said = loaded_by(*flags)
    assert code == 0
    assert said.startswith(("stenograph 0.", "usage: stenograph"))
    check_light(modules, own=MAX_OWN_MODULES)


def test_a_run_on_a_server_that_runs_loads_no_server() -> None:
    code, modules, said = loaded_by("run", "--url", "http://127.0.0.1:9", "--", "true")
    assert (code, said) == (
        2,
        "stenograph: no session at http://127.0.0.1:9: the server does not answer: Connection refused",
    )
    check_light(modules, own=MAX_OWN_MODULES + 10)


AT_THE_FIRST_LINE = """
import json, logging, os, sys

def told(record):
    print(json.dumps([record.getMessage(), sorted(sys.modules)]), flush=True)
    os._exit(0)

logging.getLogger("stenograph.cli.serve_command").addFilter(told)
from stenograph.cli.main import main
main(["serve", "--port", "0", "--model", sys.argv[1]])
"""


def test_serve_says_what_it_loads_before_it_loads_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    command = [sys.executable, "-c", AT_THE_FIRST_LINE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    message, modules = json.loads(done.stdout)
    assert message == f"loading the model {tmp_path} from {tmp_path}, for the engine embedded"
    check_light(set(modules), own=MAX_OWN_MODULES + 10)


def test_a_port_in_use_stops_serve_before_it_loads_anything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, modules, said = loaded_by("serve", "--port", str(taken.getsockname()[1]))
    assert (code, "in use" in said) == (2, True), said
    check_light(modules, own=MAX_OWN_MODULES + 10)


def test_inspect_loads_no_server_and_no_engine() -> None:
    code, modules, said = loaded_by("inspect", "/nowhere")
    assert code == 2, said
    assert not {"aiohttp", "gguf", "llguidance", "starlette", "uvicorn"} & modules
    assert "stenograph.http.app" not in modules


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a command, for example: stenograph serve (see stenograph --help)"),
        (["--verbose"], "unknown flag --verbose (see stenograph --help)"),
        (["inspct"], "there is no command 'inspct'; did you mean inspect? (see stenograph --help)"),
        (["frobnicate"], "there is no command 'frobnicate' (see stenograph --help)"),
        (["bench"], "name a benchmark, for example: stenograph bench responsiveness (see stenograph bench --help)"),
        (["bench", "foo"], "there is no benchmark 'foo' (see stenograph bench --help)"),
        (["bench", "servin"], "there is no benchmark 'servin'; did you mean serving? (see stenograph bench --help)"),
        (["bench", "serving", "--bogus"], "unrecognized arguments: --bogus (see stenograph bench --help)"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_command_line_that_names_nothing_is_one_line_and_2(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "stenograph.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"stenograph: {says}\n")


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    shutil.copytree(Path(stenograph.__file__).parent, tmp_path / "lib" / "python" / "stenograph")
    elsewhere = {**os.environ, "PYTHONPATH": str(tmp_path / "lib" / "python")}
    for arguments in (["--help"], ["compare", "a.json", "b.json"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "stenograph.cli.main", "bench", *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path, env=elsewhere,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert "the benchmarks are in the repository" in line


def test_the_benchmarks_are_found_whatever_is_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('another')")
    command = [sys.executable, "-P", "-m", "stenograph.cli.main", "bench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage: stenograph bench" in done.stdout
    assert "soak" in done.stdout
