"""docs/dependencies.md gives a reason for every dependency, and for nothing else."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!;\[ ]", requirement)[0] for requirement in requirements}


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {
        "To run": names(project["dependencies"]),
        "For samples as Arrow": names(extras["arrow"]),
        "For a GPU": names(extras["torch"]),
        "For sessions in PostgreSQL": names(extras["postgres"]),
        "For a Ray cluster": names(extras["ray"]),
        "For models of the Hugging Face hub": names(extras["hub"]),
        "For environments by others": set().union(
            *(names(extras[extra]) for extra in ("bfcl", "inspect", "reasoning-gym", "verifiers"))
        ),
        "For traces": names(extras["otel"]),
        "For the benchmarks' plots": names(extras["bench"]),
        "For the demo": names(extras["demo"]),
        "To develop": names(extras["dev"]),
        "For the whole set of model families": names(extras["families"]),
        "For losses of power": names(extras["crash"]),
        "For real agents": names(extras["agents"]),
        "For the console in a browser": names(extras["console"]),
        "For the site": names(extras["docs"]),
        "For packaging": names(extras["packaging"]),
    }
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for heading, packages in declared.items():
        section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
        rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
        assert set(rows[1:]) == packages
        assert all(len(line.split("|")) == 5 for line in section.splitlines() if line.startswith("| "))


def test_no_hint_installs_what_is_in_no_registry() -> None:
    """Stenograph is installed from a checkout: a hint names it so, or a package that we declare."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = names(project["dependencies"]).union(*(names(extra) for extra in extras.values()))
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    hints = [
        hint
        for page in pages
        if page.name != "LOG.md"
        for hint in re.findall(r"pip install (-e '?\.[^\s'`\")]*|[\w'\[\]-]+)", page.read_text())
    ]
    in_a_checkout = {"-e '.", "-e .", *(f"-e '.[{extra}]" for extra in extras)}
    assert len(hints) > 10
    assert {hint for hint in hints if hint not in declared} <= in_a_checkout | {"pip"}  # `uv pip install pip`
