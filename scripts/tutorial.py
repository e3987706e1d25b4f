"""Runs docs/tutorial.md as a reader would, in a folder of its own: each block in order, with a real model.

A `stenograph serve` runs until the next one begins, or the page ends. The pip lines run as they stand, but for
TORCH_REQUIREMENT in the place of `torch`. Prints each block with its seconds, by the clock and of CPU; a server's are
those of the block that ends it.
"""

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The blocks to run, in order: `sh` or `python`, and what stands in them."""
    yield from re.findall(r"^```(sh|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Reader:
    """A reader's shell: a copy of the checkout, and at most one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[str] | None = None

    def follow(self, kind: str, block: str) -> None:
        if kind == "sh" and block.startswith("stenograph serve"):
            self.stop()
            self.serve(block)
        else:
            asked = os.environ.get("TORCH_REQUIREMENT", "torch")
            text = block.replace("pip install torch ", f"pip install {shlex.quote(asked)} ")
            command = ["bash", "-ec", self.activated(text)] if kind == "sh" else [self.python(), "-c", block]
            subprocess.run(command, cwd=self.folder, check=True)

    def serve(self, block: str) -> None:
        command = ["bash", "-ec", self.activated("exec " + block)]
        self.server = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        if "ready at" not in line:
            raise SystemExit(f"the server did not come up: {line}")
        say(line.rstrip())

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()
            self.server = None

    def activated(self, block: str) -> str:
        ready = self.folder / ".venv" / "bin" / "activate"
        return f". .venv/bin/activate\n{block}" if ready.exists() else block

    def python(self) -> str:
        return str(self.folder / ".venv" / "bin" / "python")


def spent() -> tuple[float, float]:
    """The clock, and the CPU of all children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), ended.ru_utime + ended.ru_stime


def since(before: tuple[float, float]) -> tuple[float, float]:
    """The seconds by the clock, and those of CPU."""
    clock, cpu = spent()
    return clock - before[0], cpu - before[1]


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    reader, began = Reader(folder), spent()
    try:
        for kind, block in blocks(PAGE.read_text(encoding="utf-8")):
            start = spent()
            say(f"$ {block.strip().splitlines()[0]} …")
            reader.follow(kind, block)
            say("  {:.0f} s, CPU {:.0f} s".format(*since(start)))
    finally:
        reader.stop()
    say("the whole page: {:.0f} s, CPU {:.0f} s".format(*since(began)))


if __name__ == "__main__":
    main()
