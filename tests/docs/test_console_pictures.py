"""The pictures of docs/console.md are of today's page; `scripts/console-pictures` takes them in a real browser."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "console"
STATIC = ROOT / "src" / "stenograph" / "console" / "static"


def noted() -> dict[str, str]:
    """The digest of each picture, and of each file of the page that they were taken of."""
    lines = (PICTURES / "page.sha256").read_text(encoding="utf-8").splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


def digest_of(path: str) -> str | None:
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def test_the_pictures_are_of_today_s_page() -> None:
    changed = [path for path, digest in noted().items() if digest_of(path) != digest]
    assert changed == [], "scripts/console-pictures takes them anew"
    page = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix != ".txt"]
    assert {str(path.relative_to(ROOT)) for path in page} <= noted().keys()


def test_the_page_shows_six_and_no_other_lies_there() -> None:
    shown = re.findall(r"\]\((console/\w+\.png)\)", (ROOT / "docs" / "console.md").read_text(encoding="utf-8"))
    lying = {f"console/{path.name}" for path in PICTURES.glob("*.png")}
    assert sorted(shown) == sorted(lying)
    assert len(shown) == 6
