"""The site and its pages: each page has its place, the client's classes are all there, and people can finish them.

`scripts/docs` builds the site itself, with warnings as errors.
"""

import re
from pathlib import Path
from typing import cast

import pytest
import yaml

import stenograph.client

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]

MAX_WORDS = 60_000
"""Of all pages together; a mark without a letter or a digit, such as a table's bar, is no word."""


def paths(nav: object) -> list[str]:
    """The pages that a part of the navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = cast("dict[str, object]", nav).values() if isinstance(nav, dict) else cast("list[object]", nav)
    return [path for part in parts for path in paths(part)]


def navigation() -> list[str]:
    """Of mkdocs.yml, whose tags for Python names are mkdocs' own."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    return paths(yaml.safe_load(nav))


def test_each_page_is_once_in_the_navigation() -> None:
    assert sorted(navigation()) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_site_s_warnings_are_errors() -> None:
    """mkdocs counts the warnings that it logs: `--quiet` would let every one pass."""
    (build,) = [line for line in (ROOT / "scripts" / "docs").read_text().splitlines() if " build " in line]
    assert "--strict" in build.split()
    assert not {"--quiet", "-q"} & set(build.split())
    assert "scripts/docs" in (ROOT / "scripts" / "check").read_text().splitlines()


def test_the_index_leads_to_each_guide_and_reference() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert named >= set(navigation()) - {"index.md", "client-api.md"}


def test_the_client_s_page_has_each_public_class_and_function() -> None:
    listed = re.findall(r"^::: stenograph\.client\.(\w+)$", (DOCS / "client-api.md").read_text(), re.MULTILINE)
    public = {name for name in vars(stenograph.client) if not name.startswith("_") and name[0].isupper()}
    assert set(listed) == public | {"decoded", "silent"}
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_text_is_longer_than_160_characters(page: Path) -> None:
    """But for a table's row, which Markdown does not let wrap, a picture's line, and what a program printed."""
    text = re.sub(r"^( {4,}|\|).*$|^!\[.*$|^```(?s:.*?)^```", "", page.read_text(encoding="utf-8"), flags=re.M)
    assert [line for line in text.splitlines() if len(line) > 160] == []


def test_the_pages_can_be_read_in_an_afternoon() -> None:
    words = [word for page in DOCS.glob("*.md") for word in page.read_text(encoding="utf-8").split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= MAX_WORDS


def test_the_readme_is_a_front_door() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    figures = text.split("## Figures\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| ", figures, re.MULTILINE)) == 1 + 3
    assert len(re.findall(r"\d{4}-\d\d-\d\d", figures)) == 1  # one date


def test_the_log_has_at_most_forty_decisions_of_eight_lines() -> None:
    decisions = re.split(r"^### ", (DOCS / "LOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(decisions) <= 40
    for decision in decisions:
        lines = [line for line in decision.split("\n## ")[0].splitlines() if line]
        assert len(lines) <= 9, lines[0]  # its title, and eight
