"""`stenograph bench plot A.json … --out DIR`: what runs measured, as PNG files, one for each artifact."""

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.kit.artifact import Artifact, BadArtifact, read_artifact
from benchmarks.kit.options import PLOT_NEEDS, can_plot
from benchmarks.kit.plots import PLOTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("artifacts", type=Path, nargs="+", metavar="A.json", help="artifacts of any benchmark")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where A.png goes. Default: here.")


def run(options: argparse.Namespace) -> int:
    """Draw; returns the exit code. Raises ValueError if one of them cannot be drawn, and then none is."""
    if not can_plot():
        raise ValueError(f"plot {PLOT_NEEDS}")
    drawn = {options.out / f"{path.stem}.png": _drawable(path) for path in options.artifacts}
    if len(drawn) < len(options.artifacts):
        raise ValueError("two of the artifacts would be drawn to one file: give them different names")
    options.out.mkdir(parents=True, exist_ok=True)
    for place, artifact in drawn.items():
        PLOTS[artifact.bench](artifact, place)
        sys.stderr.write(f"{place}\n")
    sys.stdout.write(msgspec.json.encode({"bench": "plot", "plots": [str(place) for place in drawn]}).decode() + "\n")
    return 0


def _drawable(path: Path) -> Artifact:
    """Raises BadArtifact."""
    artifact = read_artifact(path)
    if artifact.bench not in PLOTS:
        raise BadArtifact(f"{path}: there is no plot of {artifact.bench!r}, only of {', '.join(PLOTS)}")
    if not artifact.scenarios:
        raise BadArtifact(f"{path}: nothing was measured")
    return artifact
