"""Runs docs/tutorial.md as a reader would, in a folder of its own: each block in order, with a real model.

A `stenograph serve` runs until the next one begins, or the page ends. The pip lines run as they stand, but for
TORCH_REQUIREMENT in the place of `torch`. Prints each block with its seconds.
"""

import os
import re
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


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    reader, began = Reader(folder), time.monotonic()
    try:
        for kind, block in blocks(PAGE.read_text(encoding="utf-8")):
            start = time.monotonic()
            say(f"$ {block.strip().splitlines()[0]} …")
            reader.follow(kind, block)
            say(f"  {time.monotonic() - start:.0f} s")
    finally:
        reader.stop()
    say(f"the whole page: {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
