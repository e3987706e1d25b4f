"""What the pages point at is there: files and headings that are linked to, and the code that engine.md names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EMBEDDED = ROOT / "src" / "stenograph" / "embedded"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_the_code_that_the_engine_page_names_is_there() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", page)
    assert len(named) >= 10
    for file, symbol in named:
        code = (EMBEDDED / file).read_text()
        for part in symbol.split("."):
            assert re.search(rf"^\s*(class|def|async def) {part}\b", code, re.MULTILINE), (file, symbol)
    for name in re.findall(r"`(tests/[\w/.]+)`", page):
        assert (ROOT / name).exists(), name
