"""docs/design.md shows the imports that there are, and its table of steps names files that are there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design.md"


def test_the_picture_of_imports_is_what_the_script_draws() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_imports.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_steps_name_files_that_are_there() -> None:
    steps = PAGE.read_text(encoding="utf-8").split("## The ten steps of a request\n")[1].split("\n## ")[0]
    named = re.findall(r"`(\w+/[\w/]+)`", steps)
    assert len(named) >= 10
    source = ROOT / "src" / "stenograph"
    missing = [name for name in named if not (source / name).is_dir() and not (source / f"{name}.py").is_file()]
    assert missing == []


def test_the_glossary_has_at_most_forty_nouns_each_with_one_meaning() -> None:
    """The classes that it names are there: a class renamed alone would leave its word with two names."""
    glossary = PAGE.read_text(encoding="utf-8").split("## Glossary\n")[1].split("\n## ")[0]
    nouns = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]
    assert len(nouns) == len(set(nouns)) <= 40
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "stenograph").rglob("*.py"))
    classes = re.findall(r"`([A-Z]\w+)`", glossary)
    assert classes
    assert [name for name in classes if f"class {name}(" not in source and f"class {name}:" not in source] == []
