"""The processes that several benchmarks start: the engine stand-in, the server, and the probe of `/health`."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.kit.client import address
from benchmarks.kit.probe import ProbePlan
from benchmarks.kit.processes import Child, ChildFailed, Children
from benchmarks.kit.reply_shape import ReplyShape


@dataclass(frozen=True, slots=True)
class Checkout:
    """Another checkout of the source, whose server is started instead of ours. Raises ValueError if it is none."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "src/stenograph/cli/main.py").is_file():
            raise ValueError(f"--before {self.folder} is no checkout: it has no src/stenograph/cli/main.py")

    @property
    def python(self) -> tuple[str, ...]:
        """Its own interpreter, or ours. With -P, as ours."""
        own = self.folder / ".venv/bin/python"
        return (str(own) if own.exists() else sys.executable, "-P")

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Python finds its source."""
        return {"PYTHONPATH": str(self.folder / "src")}


def start_standin(children: Children, shape: ReplyShape) -> tuple[Child, str]:
    """An engine stand-in, and its URL."""
    shape_json = msgspec.json.encode(shape).decode()
    child = children.start(
        "the engine stand-in", ["benchmarks.kit.standin", "--shape", shape_json, "--until-stdin-closes"]
    )
    return child, child.event()["url"]


def start_serve(children: Children, flags: Sequence[str], *, checkout: Checkout | None = None) -> tuple[Child, str]:
    """A server whose settings are its flags alone, and its URL. Raises ChildFailed where it does not start."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("STENOGRAPH_") or name == "STENOGRAPH_CACHE"
    }
    serve = ["stenograph.cli.main", "serve", "--port", "0", *flags]
    if checkout is None:
        child = children.start("the server", serve, environment=environment)
    else:
        environment |= checkout.environment
        child = children.start("the server before", serve, environment=environment, python=checkout.python)
    line = child.line()
    found = re.search(r"ready at (http://\S+)", line)
    if found is None:
        raise ChildFailed(f"{child.name} said {line!r}: {child.stderr_tail()}")
    return child, found[1]


def start_probe(children: Children, url: str) -> Child:
    """A probe that asks `/health` from now on; any step ends it, and brings its report."""
    host, port = address(url)
    return children.start_planned("the probe", "benchmarks.kit.probe", ProbePlan(host=host, port=port))[0]
