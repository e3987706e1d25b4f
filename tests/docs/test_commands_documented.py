"""Every `stenograph …` line of the docs, in a block or in a sentence, is read by the real parsers.

What stands for something else (`[flags]`, `…`) is left out, and the rest is read all the same. None is run here: a
server, an agent or a cluster would be needed. tests/process runs `serve`, for each engine by the line that is here,
`run`, `chat`, `fetch`, `verify`, `bench` and `ray`; tests/service runs `inspect`, `check` and `export`.
"""

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from stenograph.cli.commands import COMMANDS, CommandParser
from stenograph.cli.main import parsed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = {"LOG.md", "CHANGES.md"}
"""Pages of what was."""

STANDS_FOR_MORE = re.compile(r"\[[^\]]*\]|…|\.\.\.$")


def commands() -> Iterator[tuple[str, str]]:
    """Each command with its page; continued lines are one."""
    for page in PAGES:
        if page.name in HISTORY:
            continue
        for block in re.findall(r"^```(?:sh|bash|console|)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            text = re.sub(r"\s*\\\n\s*", " ", block)
            for line in text.splitlines():
                found = re.search(r"(?:^|[ ;&|(=])stenograph (.+)$", line.removeprefix("$ "))
                if found and not line.startswith(("stenograph:", "stenograph ready at", "#")):
                    yield page.name, found[1]


def named() -> Iterator[tuple[str, str]]:
    """Each command of a sentence, with its page."""
    for page in PAGES:
        for text in re.findall(r"(?<!`)`stenograph ([^`\n]+)`(?!`)", page.read_text()):
            if page.name not in HISTORY and not text.startswith("ready at "):
                yield page.name, text


NAMED = set(named())
MAY_BE_LEFT_OUT = ("arguments are required", "expected one argument", "name a benchmark")
"""The errors of a command that a sentence only names, with nothing of what it needs."""
DOCUMENTED = sorted({*commands(), *NAMED})


def words_of(text: str) -> list[str]:
    """The words of a command, without the rest of its pipe and what stands for more."""
    text = re.split(r"\s+(?:#|\||&&|&$|>|<|2>)", text)[0]
    return shlex.split(STANDS_FOR_MORE.sub(" ", text))


def test_the_docs_show_every_command() -> None:
    assert {words_of(text)[0] for _, text in DOCUMENTED} >= COMMANDS.keys()


@pytest.mark.parametrize(("page", "text"), DOCUMENTED, ids=lambda value: value[:60])
def test_a_documented_command_line_is_read_by_the_real_parsers(
    page: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(text)
    if "--" in words:
        words = words[: words.index("--")]
    unknown: list[str] = []
    with contextlib.suppress(SystemExit):
        if words[0] == "bench":
            parser = CommandParser(prog="stenograph bench")
            parser.check_named(words[1:], BENCHMARKS, "benchmark", "serving")
            BENCHMARKS[words[1]].add_arguments(parser)
            unknown = parser.parse_known_args(words[2:])[1]
        else:
            parsed(words)
    said = capsys.readouterr().err
    is_name = any(one in said for one in MAY_BE_LEFT_OUT) and (page, text) in NAMED
    assert not unknown, f"{page}: stenograph {text}"
    assert not said or is_name, f"{page}: stenograph {text}: {said}"
