"""A command in a process of its own, watched: which of our modules it has loaded, and the way that a request takes.

Run as `python -m benchmarks.house.watched COMMAND …`; each line on stdin is answered by one of JSON on stdout: `begin`
and `end` count frames between them, `modules` names the files of our modules. Imports nothing of ours before.
"""

import json
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SPEC = find_spec("stenograph")
assert SPEC is not None
PRODUCT = str(Path(str(SPEC.origin)).parent) + "/"


@dataclass
class RequestWay:
    """The functions entered. `num_changes` counts frames of another file than the one before, by thread."""

    functions: set[CodeType] = field(default_factory=set[CodeType])
    num_changes: int = 0
    latest: dict[int, str] = field(default_factory=dict[int, str])

    def entered(self, frame: FrameType) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(PRODUCT):
            return
        thread = threading.get_ident()
        self.num_changes += self.latest.get(thread, file) != file
        self.latest[thread] = file
        self.functions.add(frame.f_code)

    @property
    def figures(self) -> tuple[int, int, int]:
        """Lines of the functions, lines of their files, changes of file."""
        own = {(code.co_filename, line) for code in self.functions for _, _, line in code.co_lines()}
        files = {code.co_filename for code in self.functions}
        return len(own), sum(len(Path(file).read_text().splitlines()) for file in files), self.num_changes


class Tracer:
    """Sees every frame of every thread that starts after it, and counts while it is asked to."""

    def __init__(self) -> None:
        self.way: RequestWay | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.way is not None:
            self.way.entered(frame)

    @contextmanager
    def counting(self) -> Generator[RequestWay]:
        self.way = way = RequestWay()
        try:
            yield way
        finally:
            self.way = None


def answer(tracer: Tracer) -> None:
    """Answer the lines on stdin until it ends."""
    way = RequestWay()
    for line in sys.stdin:
        said: list[Any] = []
        match line.strip():
            case "begin":
                tracer.way = way = RequestWay()
            case "end":
                tracer.way = None
                said = list(way.figures)
            case "modules":
                said = sorted({str(one.__file__) for one in list(sys.modules.values()) if _is_ours(one)})
            case other:
                raise ValueError(f"nobody asks {other!r}")
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def _is_ours(module: object) -> bool:
    return str(getattr(module, "__file__", "")).startswith(PRODUCT)


def main() -> int:
    tracer = Tracer()
    threading.Thread(target=answer, args=(tracer,), daemon=True).start()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    return int(import_module("stenograph.cli.main").main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
