"""Measures the house and prints it: two tables, each import against the six rules, and one line of JSON.

    scripts/measure-house [SRC]

Two servers of a tiny model are watched: one that speaks OpenAI's protocols alone to one SGLang, a stand-in, with
SQLite; and one of the default flags. The way is that of a session's fourth turn. CPU is user and system time of a
process and its children, the least of five. SRC is another checkout's `src`: its source alone is measured.
"""

import json
import os
import re
import resource
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.house.source import nevers, size_of
from benchmarks.kit.processes import Child, Children, cpu_s_of
from benchmarks.kit.reply_shape import ReplyShape
from benchmarks.kit.servers import start_standin
from standins.tiny.llama import write_tiny_folder

SRC = Path(__file__).parents[2] / "src"
ROUNDS = 5
COMMANDS = ("--version", "--help", "run --url http://127.0.0.1:9 -- true", "inspect /nowhere")
Figures = dict[str, float]


def asked(url: str, body: object) -> dict[str, Any]:
    """The answer to a POST. Raises OSError where it is an error."""
    sent = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(sent) as answer:
        read: dict[str, Any] = json.load(answer)
    return read


def told(child: Child, line: str) -> list[Any]:
    """A watched process's answer to a line."""
    child.tell(line)
    answer: list[Any] = json.loads(child.line())
    return answer


def ready(child: Child) -> str:
    found = re.search(r"ready at (http://\S+)", child.line())
    assert found is not None, child.stderr_tail()
    return found[1]


def chatted(children: Children, flags: Sequence[str]) -> tuple[list[Path], tuple[int, int, int]]:
    """The files of our modules that a server has loaded after a session's chats, and the way of the fourth."""
    child = children.start("the server", ["benchmarks.house.watched", "serve", "--port", "0", *flags])
    url = ready(child)
    session, messages = asked(f"{url}/sessions", {})["session_id"], list[dict[str, Any]]()
    for number in range(4):
        messages.append({"role": "user", "content": f"question {number}"})
        if number == 3:
            told(child, "begin")
        chat = {"model": "tiny", "messages": messages, "max_tokens": 4}
        messages.append(asked(f"{url}/sessions/{session}/v1/chat/completions", chat)["choices"][0]["message"])
    own, lines, changes = told(child, "end")
    files = [Path(file) for file in told(child, "modules")]
    assert child.end() == 0, child.stderr_tail()
    return files, (own, lines, changes)


def served(children: Children, flags: Sequence[str]) -> Figures:
    """The figures of a server."""
    files, way = chatted(children, flags)
    size = size_of(files)
    return {
        "modules": size.files,
        "tokens": size.tokens,
        **dict(zip(("way_own_lines", "way_lines", "way_changes"), way, strict=True)),
        "start_cpu_s": min(start_cpu_s(flags) for _ in range(ROUNDS)),
    }


def start_cpu_s(flags: Sequence[str]) -> float:
    """CPU until a server is ready, with its children's."""
    command = [sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        assert b"ready at" in server.stdout.readline()
        used = sum(map(cpu_s_of, [server.pid, *descendants(server.pid)]))
        server.terminate()
    return used


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(one) for task in tasks for one in task.read_text().split()]
    return [*found, *(other for one in found for other in descendants(one))]


def command_cpu_s(arguments: Sequence[str]) -> float:
    """CPU of a command, whatever its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "stenograph.cli.main", *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def one_engine(model: Path, engine: str, data: Path) -> list[str]:
    """The flags of a server that speaks OpenAI's chats and completions to one SGLang, and keeps sessions in SQLite."""
    of_engine = ("--engine", "sglang", "--engine-url", engine, "--family", "smollm2")
    return ["--model", str(model), *of_engine, "--data-dir", str(data), "--dialects", "openai"]


def measured(model: Path, data: Path) -> dict[str, Figures]:
    """The figures of both servers, and CPU by command."""
    found: dict[str, Figures] = {}
    with Children() as children:
        _, engine = start_standin(children, ReplyShape(num_tokens=4, vocab_size=250))
        found["one engine"] = served(children, one_engine(model, engine, data))
        found["default"] = served(children, ["--model", str(model)])
    found["cpu_s"] = {command: min(command_cpu_s(command.split()) for _ in range(ROUNDS)) for command in COMMANDS}
    return found


def main() -> int:
    parser = ArgumentParser(prog="scripts/measure-house", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("src", nargs="?", type=Path, help="another tree: only its source is measured")
    other: Path | None = parser.parse_args().src
    root = other or SRC
    if not (root / "stenograph").is_dir():
        parser.error(f"there is no stenograph in {root}")
    whole = size_of(sorted((root / "stenograph").rglob("*.py")))
    said: dict[str, Any] = {
        "files": whole.files, "classes": whole.classes, "lines": whole.lines, "wheel_tokens": whole.tokens,
    }  # fmt: skip
    if other is None:
        for name in [name for name in os.environ if name.startswith("STENOGRAPH_")]:
            del os.environ[name]
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled once, not at each start
        with TemporaryDirectory() as folder:
            said |= measured(write_tiny_folder(Path(folder) / "tiny"), Path(folder) / "data")
    against = nevers(root)
    lines = [f"{name}: {value}" for name, value in said.items()]
    for rule, found in against.items():
        lines += ["", f"{rule}: {len(found)}", *(f"    {one}" for one in found)]
    lines += ["", json.dumps(said | {"nevers": {rule: len(found) for rule, found in against.items()}})]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
