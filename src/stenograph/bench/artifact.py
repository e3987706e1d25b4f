"""What a benchmark leaves behind: one JSON file, written whole or not at all, and read back checked."""

import os
from pathlib import Path
from typing import Any

import msgspec

from stenograph.bench.figures import Figures

FORMAT = 1


class ScenarioResult(msgspec.Struct, kw_only=True):
    """All repeats of one scenario, by what was driven: `direct`, `server`, and `before` where that was asked for.

    `goals` are (figure, value). `raw` has what the figures were made of.
    """

    name: str
    title: str
    sessions: int
    turns: int
    message_bytes: int
    goals: list[tuple[str, float]]
    figures: dict[str, list[Figures]]
    raw: dict[str, list[dict[str, Any]]] = {}


class Artifact(msgspec.Struct, kw_only=True):
    """A run of a benchmark."""

    bench: str
    format: int = FORMAT
    commit: str | None = None
    dirty: bool | None = None
    begun: str = ""
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    scenarios: list[ScenarioResult] = []


class BadArtifact(Exception):
    """A file is no artifact; `str()` says why, in a line."""


def write_artifact(path: Path, artifact: Artifact) -> None:
    """Write it beside its place, then move it there. Raises OSError."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(artifact), indent=1) + b"\n")
    os.replace(part, path)


def read_artifact(path: Path) -> Artifact:
    """Raises BadArtifact."""
    try:
        artifact = msgspec.json.decode(path.read_bytes(), type=Artifact)
    except OSError as error:
        raise BadArtifact(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise BadArtifact(f"{path}: is no artifact of a benchmark: {error}") from error
    if artifact.format != FORMAT:
        raise BadArtifact(f"{path}: has format {artifact.format}, this version reads {FORMAT}")
    return artifact
