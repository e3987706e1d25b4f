"""Draws which room of src/stenograph imports which, between the two marks in docs/design.md.

    python scripts/draw_imports.py           # writes the picture into the page
    python scripts/draw_imports.py --check   # exit code 1 where the page shows another picture

Owns nothing but those lines. The order that is allowed is in tests/pure/test_layers.py; this is what is imported.
Imports within a room are left out.
"""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "stenograph"
PAGE = ROOT / "docs" / "design.md"
BEGIN = "<!-- imports: written by scripts/draw_imports.py -->"
END = "<!-- imports: end -->"

Imports = dict[str, set[str]]


def rooms_imported_by(file: Path) -> set[str]:
    """The rooms that a file's imports name."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "stenograph" and len(part) > 1}


def imports_of_rooms() -> dict[str, set[str]]:
    """For each room, the other rooms that its files import. A room comes after those that it imports."""
    found: dict[str, set[str]] = {
        room.name: set[str]().union(*map(rooms_imported_by, room.rglob("*.py"))) - {room.name}
        for room in sorted(SRC.iterdir())
        if (room / "__init__.py").exists()
    }
    ordered: dict[str, set[str]] = {}
    while found:
        ready = sorted(room for room, others in found.items() if others <= ordered.keys())
        if not ready:
            sys.exit(f"these rooms import each other: {', '.join(found)}")
        ordered |= {room: found.pop(room) for room in ready}
    return ordered


def reachable(room: str, imports: Imports) -> set[str]:
    """All rooms below a room: those that it imports, and those that they import."""
    return imports[room].union(*(reachable(other, imports) for other in imports[room]))


def direct(room: str, imports: Imports) -> set[str]:
    """The rooms that a room imports and that no other room which it imports stands above."""
    return imports[room] - set[str]().union(*(reachable(other, imports) for other in imports[room]))


def drawn(imports: Imports) -> str:
    """The picture, from the mark that begins it to the mark that ends it."""
    arrows = [f"    {room} --> {other}" for room in reversed(imports) for other in sorted(direct(room, imports))]
    return "\n".join([BEGIN, "", "```mermaid", "flowchart TD", *arrows, "```", "", END])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is stale")
    is_check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        sys.exit(f"{PAGE.name} has not both marks: {BEGIN} and {END}")
    new = before + drawn(imports_of_rooms()) + after
    if new == page:
        return 0
    if is_check:
        sys.stderr.write(f"{PAGE.name} shows other imports than there are: run python scripts/draw_imports.py\n")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
