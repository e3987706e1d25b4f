"""The lines of Python that the pages show of the client are run as they stand, but for the server's address."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stenograph.client.rollouts import BatchOptions

from .conftest import Live

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8080"


def programs(page: str, name: str) -> list[str]:
    """The blocks of Python on a page with this name in them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [block for block in blocks if name in block]


async def printed(live: Live, program: str) -> str:
    """Run a program against this server, in place of the address in it; what it prints."""
    assert ADDRESS in program
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program.replace(ADDRESS, live.url), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("page", ["README.md", "docs/client.md"])
async def test_the_lines_of_a_page_run(live: Live, page: str) -> None:
    (program,) = programs(page, "stenograph.client")
    for _ in range(16):
        live.says("In Paris.")
    assert (await printed(live, program)).count("1.0") == 8
    assert (await live.call("GET", "/sessions")).json()["sessions"] == []


async def test_the_first_lines_of_the_readme_run(live: Live) -> None:
    (program,) = programs("README.md", "httpx.post")
    live.says("In France.")
    assert await printed(live, program) == "In France.\n"
    assert len((await live.call("GET", "/sessions")).json()["sessions"]) == 1


async def test_the_programs_of_the_tutorial_run(live: Live) -> None:
    """scripts/test-tutorial runs the whole page, with a real model."""
    first, group = programs("docs/tutorial.md", "stenograph.client")
    for reply in ("In France.", "In Italy."):
        live.says(reply)
    said = await printed(live, first)
    assert "said: In France.\nsaid: In Italy.\n<DecodedSample completed:" in said
    for _ in range(8):
        live.says("ab1")
    lines = (await printed(live, group)).splitlines()
    assert [line.split()[1:] for line in lines] == [["0.67", lines[0].split()[2]]] * 8


def test_the_page_lists_every_option_of_a_batch() -> None:
    table = (ROOT / "docs" / "client.md").read_text().split("| option | default | meaning |")[1].split("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line)))
    assert listed == {*BatchOptions.__annotations__, "session", "samples", "progress", "ended"}
