"""The artifact of a benchmark: one JSON file, written whole or not at all, and read back checked."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kit.figures import Figures

FORMAT = 1
ENGINE = "engine"
"""The column of a benchmark without a server: its figures are the engine's."""

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures of one repeat, and what they were made of."""

    figures: Figures
    raw: Raw


class ScenarioResult(msgspec.Struct, kw_only=True):
    """All repeats of one scenario, by what was driven: `direct`, `server`, and `before` where that was asked for.

    `goals` are (figure, value), and `before_goals` (figure, its ratio to that of `before`). `raw` has what the figures
    were made of.
    """

    name: str
    title: str
    sessions: int
    turns: int
    message_bytes: int = 0
    goals: list[tuple[str, float]] = []
    before_goals: list[tuple[str, float]] = []
    figures: dict[str, list[Figures]] = {}
    raw: dict[str, list[Raw]] = {}

    def keep(self, column: str, measured: Measurement) -> None:
        """Add a repeat of what was driven."""
        self.figures.setdefault(column, []).append(measured.figures)
        self.raw.setdefault(column, []).append(measured.raw)


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


class BadArtifact(ValueError):
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
