"""Figures of the source alone: tokens, files, classes, lines, and the imports against six rules."""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip

PARTS = (
    "accounts", "backup", "cluster", "console", "embedded", "fork", "otel", "replay", "scores", "tenants", "verify",
    "weights",
)  # fmt: skip
"""The rooms of parts. What is in none is the core, but for the rooms outside it."""

OUTSIDE = ("cli", "conformance", "client", "trainers")
"""Rooms that are neither core nor part: the command line names the parts, the others know the server by HTTP."""

PROTOCOLS = ("openai", "anthropic", "responses", "gemini")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of some source."""

    files: int
    classes: int
    lines: int
    tokens: int


def code_tokens(source: str) -> int:
    """The tokens of a module without comments, docstrings and layout. Raises SyntaxError."""
    strings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in NO_CODE and token.start not in strings for token in tokens)


def size_of(files: list[Path]) -> Size:
    texts = [file.read_text(encoding="utf-8") for file in files]
    return Size(
        files=len(files),
        classes=sum(isinstance(node, ast.ClassDef) for text in texts for node in ast.walk(ast.parse(text))),
        lines=sum(text.count("\n") for text in texts),
        tokens=sum(map(code_tokens, texts)),
    )


def imports_of(root: Path) -> dict[str, dict[str, int]]:
    """For each module below `root/stenograph`, those of ours that it imports, by statement or by text, and the line."""
    package = root / "stenograph"
    files = {str(file.relative_to(package).with_suffix("")): file for file in sorted(package.rglob("*.py"))}
    modules = {name.removesuffix("/__init__"): file for name, file in files.items()}
    found: dict[str, dict[str, int]] = {}
    for name, file in modules.items():
        named: dict[str, int] = {}
        for text, line in _imported(ast.parse(file.read_text(encoding="utf-8"))):
            other = text.removeprefix("stenograph.").replace(".", "/")
            if text.startswith("stenograph.") and other in modules and other != name:
                named.setdefault(other, line)
        # `from a.b import c` names the folder too.
        found[name] = {
            other: line for other, line in named.items() if not any(one.startswith(f"{other}/") for one in named)
        }
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of modules, and of what could be one. A text that names a module is how `import_module` is given it."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield module, node.lineno
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in names)
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.Constant(value=str(text)):
                yield text.partition(":")[0], node.lineno
            case _:
                pass


def nevers(root: Path) -> dict[str, list[str]]:
    """Each rule, and the imports against it."""
    imports = imports_of(root)

    def against(rule: Callable[[str, str], bool]) -> list[str]:
        pairs = ((name, other, line) for name, named in imports.items() for other, line in named.items())
        return [f"{name}.py:{line} imports {other}" for name, other, line in pairs if rule(name, other)]

    return {
        "no protocol stands on another": against(
            lambda name, other: None not in (_protocol(name), _protocol(other)) and _protocol(name) != _protocol(other)
        ),
        "export is on trajectory alone": against(
            lambda name, other: _is_in(name, "export") and not _is_in(other, "export", "trajectory", "core")
        ),
        "records are no client's protocol": against(
            lambda name, other: _is_in(name, "export", "store", "trajectory") and _is_in(other, "dialects")
        ),
        "an engine knows no client's protocol": against(
            lambda name, other: _is_in(name, "engine", "embedded") and _is_in(other, "dialects")
        ),
        "a session knows no other process": against(
            lambda name, other: _is_in(name, "session") and part_of(other) == "cluster"
        ),
        "the core imports no part": against(
            lambda name, other: not _is_in(name, *OUTSIDE) and part_of(other) not in (None, part_of(name))
        ),
    }


def part_of(module: str) -> str | None:
    """The part that a module belongs to; None for one of the core, or outside."""
    return next((part for part in PARTS if _is_in(module, part)), None)


def _protocol(module: str) -> str | None:
    return next((name for name in PROTOCOLS if _is_in(module, f"dialects/{name}")), None)


def _is_in(module: str, *folders: str) -> bool:
    return any(module == folder or module.startswith(f"{folder}/") for folder in folders)
