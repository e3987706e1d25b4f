"""Trainer tokens of rollouts, flat and as a tree, by group: what a shared history costs a trainer that repeats it.

    python scripts/tree_tokens.py DIR...      # folders of `stenograph rollout`, with --fork-at or without

`by_task` is a tree for each task's rollouts and their branches, `as_batch` one tree for all of a folder. Prints a row
for each folder, then one line of JSON.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from stenograph.client import DecodedSample, decoded, tree_of
from stenograph.envs.folder import RolloutFolder


def groups_of(path: Path) -> dict[str, list[DecodedSample]]:
    """The samples of a folder by task, those of branches behind their rollout's."""
    folder, groups = RolloutFolder(path), defaultdict[str, list[DecodedSample]](list)
    folder.read()
    for ended in folder:
        branches = [cast("str", row["samples"]) for row in ended.branches]
        for place in [*([] if ended.samples is None else [ended.samples]), *branches]:
            groups[ended.task] += decoded((path / place).read_bytes())
    return groups


def figures(path: Path) -> dict[str, object]:
    """A folder's sums, over its groups."""
    groups = groups_of(path)
    trees = [tree_of(samples) for samples in groups.values()]
    batch = tree_of(sample for samples in groups.values() for sample in samples)
    return {
        "folder": path.name,
        "tasks": len(trees),
        "samples": len(batch.paths),
        "trained": sum(len(one.trained) for one in batch.paths),
        "flat": batch.num_flat,
        "by_task": sum(len(tree.tokens) for tree in trees),
        "as_batch": len(batch.tokens),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, then the JSON."""
    parser = argparse.ArgumentParser(description="Trainer tokens of rollouts, flat and as a tree.")
    parser.add_argument("folder", type=Path, nargs="+")
    rows = [figures(path) for path in parser.parse_args(arguments).folder]
    table = [[*rows[0]], ["---"] * len(rows[0]), *([*map(str, row.values())] for row in rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    sys.stdout.write("\n".join([*lines, json.dumps(rows), ""]))


if __name__ == "__main__":
    main()
