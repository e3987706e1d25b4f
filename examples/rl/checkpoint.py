"""What a run needs to go on after an interruption: the steps that are done, the weights, the optimizer, the draws."""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compare import PLAIN

SAME = (
    *("model", "family", "task", "trainer", "drift", "teacher", "seed"),
    *("prompts", "group_size", "lr", "cold_steps", "cold_lr"),
    *PLAIN,
)
"""The options that a run is known by: with others it would be another run."""


def load_checkpoint(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the folder's run had come to; None if a run begins, for which the folder is cleared of the one before.

    Raises SystemExit if the folder has a run that is over, or one of other options.
    """
    file, steps = options.out / "checkpoint.pt", options.out / "steps.jsonl"
    if not options.fresh and (options.out / "summary.json").exists():
        raise SystemExit(f"{options.out} has a run that is over: name another folder with --out, or say --fresh")
    if options.fresh or not file.exists():
        for name in ("checkpoint.pt", "steps.jsonl", "summary.json", "run.json"):
            (options.out / name).unlink(missing_ok=True)
        return None
    found: dict[str, Any] = torch.load(file, weights_only=True)
    wanted = known_by(options)
    differ = [
        f"{name} {found['options'][name]!r}, now {wanted[name]!r}" for name in SAME if _differs(name, found, wanted)
    ]
    if differ:
        raise SystemExit(
            f"{options.out} has a run with other options ({'; '.join(differ)}): name another folder with --out, or say"
            " --fresh"
        )
    lines = steps.read_text().splitlines()[: found["num_steps"]]
    steps.write_text("".join(line + "\n" for line in lines))
    found["steps"] = [json.loads(line) for line in lines]
    return found


def _differs(name: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return bool(found["options"].get(name, PLAIN.get(name)) != wanted[name])


def known_by(options: argparse.Namespace) -> dict[str, Any]:
    """The options that are the run's."""
    known = {name: getattr(options, name) for name in SAME}
    return {**known, "teacher": None if options.teacher is None else str(options.teacher)}


def save_checkpoint(options: argparse.Namespace, state: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    part = options.out / "checkpoint.part"
    torch.save({"options": known_by(options), **state}, part)
    os.replace(part, options.out / "checkpoint.pt")


def forget_checkpoint(out: Path) -> None:
    """After the end: what is there is the summary."""
    (out / "checkpoint.pt").unlink(missing_ok=True)


def commit() -> str:
    """The commit of this tree, with `-dirty` where a tracked file differs from it; `unknown` outside a repository."""
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def note_commit(out: Path) -> None:
    """A run that goes on has the commits of each part."""
    file = out / "run.json"
    begun = json.loads(file.read_text())
    commits = dict.fromkeys([*begun.get("commits", ["unknown"]), commit()])
    file.write_text(json.dumps({**begun, "commits": list(commits)}, indent=1))
