"""Prints requirements of the extra `docs` of pyproject.toml, one a line: those that begin with the argument, by default
`mkdocs`, the site's builder and its plugins."""

import sys
import tomllib
from pathlib import Path

wanted = sys.argv[1] if len(sys.argv) > 1 else "mkdocs"
project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in project["optional-dependencies"]["docs"]:
    if requirement.startswith(wanted):
        sys.stdout.write(f"{requirement}\n")
