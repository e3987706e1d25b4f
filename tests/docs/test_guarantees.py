"""Each guarantee of docs/guarantees.md, and each test that a page names behind a link, is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs" / "guarantees.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LINKED_NAMES = re.compile(r"\]\(([\w./-]+\.py)\)((?:[\s,]+`\w+`)+)")
"""A link to a file, and the names in it that follow the link."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_behind_a_link_to_a_file_is_defined_in_it(page: Path) -> None:
    for file, names in LINKED_NAMES.findall(page.read_text(encoding="utf-8")):
        code = (page.parent / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(class|def|async def) {name}\b", code, re.MULTILINE), (file, name)


def test_every_guarantee_names_a_test() -> None:
    rows = [line for line in GUARANTEES.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    guarantees = [row for row in rows if not row.startswith("| guarantee |")]
    assert len(guarantees) > 25
    for row in guarantees:
        targets = re.findall(r"\]\(\.\./([\w./-]+)\)", row.split("|")[2])
        assert [target for target in targets if target.startswith("tests/")], row


def test_what_a_fast_run_leaves_out_is_there() -> None:
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    left_out = re.findall(r"^    (tests/\S+)$", script, re.MULTILINE)
    assert len(left_out) > 1
    assert [path for path in left_out if not (ROOT / path).exists()] == []
