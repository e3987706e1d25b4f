"""A list of runs of `scripts/rl`, one at a time at low priority; started again, it goes on where it was interrupted.

    scripts/rl experiment examples/rl/experiments.toml FOLDER [--only NAME]

Each experiment of the file has seeds, options of all its runs, and arms: a name, and options of its own, in which
{seed} and {out} are replaced. A run's folder is FOLDER/EXPERIMENT/ARM-SEED. All options are checked before the first
run. A run is over once its folder has a summary.json. At the end each experiment is compared, in its compare.md.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options import parsed

HERE = Path(__file__).parent
LOWEST_PRIORITY = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One arm with one seed. `arguments` are those of train.py, with --seed and --out."""

    experiment: str
    folder: Path
    arguments: Sequence[str]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return (self.folder / "summary.json").exists()


def listed(file: Path, out: Path, only: str | None = None) -> list[ListedRun]:
    """The runs in their order: by experiment, then by seed, so that an interrupted list has whole seeds.

    Raises SystemExit if there is no experiment of the name `only`.
    """
    found: Mapping[str, Any] = tomllib.loads(file.read_text())
    if only is not None and only not in found:
        raise SystemExit(f"{file} has no experiment {only}: it has {', '.join(found)}")
    return [run for name in found if only in (None, name) for run in _of_experiment(name, found[name], out)]


def _of_experiment(name: str, experiment: Mapping[str, Any], out: Path) -> Iterator[ListedRun]:
    for seed in experiment["seeds"]:
        for arm, options in experiment["arms"].items():
            folder = out / name / f"{arm}-{seed}"
            words = shlex.split(f"{experiment['options']} {options}")
            own = [word.replace("{seed}", str(seed)).replace("{out}", str(out)) for word in words]
            arguments = [*own, "--seed", str(seed), "--out", str(folder)]
            yield ListedRun(experiment=name, folder=folder, arguments=arguments)


def run_all(runs: Sequence[ListedRun], check: Callable[[Sequence[str]], object], command: Sequence[str]) -> list[Path]:
    """Check all runs, then run those that are not over, one at a time; returns the folders of those that failed.

    A run with a summary that exits with 1 broke a promise: it is over, and named too.
    """
    for run in runs:
        check(run.arguments)
    failed = []
    for number, run in enumerate(runs, start=1):
        if run.is_over:
            continue
        print(f"run {number} of {len(runs)}: {run.folder}", flush=True)
        if subprocess.run([*command, *run.arguments], check=False).returncode:
            failed.append(run.folder)
    return failed


def compare(runs: Sequence[ListedRun]) -> None:
    """The table of each experiment that has a run with steps, in its folder."""
    for name in dict.fromkeys(run.experiment for run in runs):
        members = [run.folder for run in runs if run.experiment == name]
        folders = [folder for folder in members if (folder / "run.json").exists()]
        if folders:
            table = folders[0].parent / "compare.md"
            program = [sys.executable, str(HERE / "compare.py")]
            subprocess.run([*program, *map(str, folders), "--table", str(table)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="the experiments")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where the folders of the runs are, or will be")
    parser.add_argument("--only", metavar="NAME", help="one experiment of the file. Default: all.")
    options = parser.parse_args()
    runs = listed(options.file, options.out, options.only)
    os.nice(LOWEST_PRIORITY)
    failed = run_all(runs, parsed, [sys.executable, str(HERE / "train.py")])
    compare(runs)
    if failed:
        raise SystemExit(f"failed, or not as promised: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
