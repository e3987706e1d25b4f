"""Prints what builds the site, a requirement a line: mkdocs and its plugins, of the extra `docs` of pyproject.toml."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in project["optional-dependencies"]["docs"]:
    if requirement.startswith("mkdocs"):
        sys.stdout.write(f"{requirement}\n")
