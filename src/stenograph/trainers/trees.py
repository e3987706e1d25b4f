"""A tree as one sequence: shared history runs through a trainer's model once. Pure.

`packed` fits any model that takes positions and a mask (or FlexAttention, MagiAttention by `Tree.ranges`). `areal_trie`
has the shape of AReaL's tree training, areal/models/tree_attn/tree.py `TrieNode` at 4aef98d8. verl 0.9.1 has no tree:
its draft (pull request 6689) packs a batch's prefixes by itself from flat rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.tree import Tree, TreePath
from stenograph.trainers.rows import WrongRows, built

Made = TypeVar("Made")

AREAL = "AReaL at 4aef98d8"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTree:
    """One sequence of N tokens, and the M trained ones in the order of the samples; a shared token can be trained by
    several.

    `tokens`, `positions` int64 [N]. The logits at `predicted_by` [M] / `temperatures` [M] are of `targets` [M], at the
    places `places` [M]; `log_probs` [M] are the recorded ones, `samples` [M] the numbers of their samples, and
    `advantages` [M] those of the samples. `mask()` of the tree is the attention's.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    places: NDArray[np.int64]
    predicted_by: NDArray[np.int64]
    targets: NDArray[np.int64]
    samples: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    temperatures: NDArray[np.float64]
    advantages: NDArray[np.float64] | None


def packed(tree: Tree, advantages: Sequence[float] | None = None) -> PackedTree:
    """The tree as one sequence; `advantages` has one for each sample, in the order of the paths."""
    places = [tree.line(path)[path.trained] for path in tree.paths]
    sizes = [len(one) for one in places]
    flat = np.concatenate([np.zeros(0, np.int64), *places])
    of_tokens = [_temperatures(path) for path in tree.paths]
    return PackedTree(
        tokens=tree.tokens,
        positions=tree.positions,
        places=flat,
        predicted_by=tree.parents[flat].astype(np.int64),
        targets=tree.tokens[flat],
        samples=np.repeat(np.arange(len(sizes)), sizes),
        log_probs=np.concatenate([np.zeros(0), *(path.sample.log_probs for path in tree.paths)]),
        temperatures=np.concatenate([np.zeros(0), *of_tokens]),
        advantages=None if advantages is None else np.repeat(np.array(advantages, np.float64), sizes),
    )


def _temperatures(path: TreePath) -> NDArray[np.float64]:
    """Of each trained token of a path."""
    found = np.ones(path.num_tokens)
    for turn in path.sample.turns:
        found[cast("int", turn["start"]) : cast("int", turn["end"])] = cast("float", turn["temperature"])
    return found[path.trained]


def areal_trie(tree: Tree, make: Callable[..., Made], *, tree_id: int = 0) -> tuple[Made, NDArray[np.int64]]:
    """The root of AReaL's `TrieNode`s (`make`), and the order [N] in which its flattened tokens are those of the tree:
    depth first, `input_ids = tree.tokens[order]`, `position_ids = tree.positions[order]`. Its sequences are the paths.

    Raises WrongRows for a tree in which lines part at equal ids, by their images or routes: a node has one child an id.
    """
    passing: list[list[int]] = [[] for _ in tree.tokens]
    for number, path in enumerate(tree.paths):
        places: list[int] = tree.line(path).tolist()
        for place in places:
            passing[place].append(number)
    below: list[list[int]] = [[] for _ in tree.tokens]
    firsts: list[int] = []
    parents: list[int] = tree.parents.tolist()
    for place, parent in enumerate(parents):
        (firsts if parent < 0 else below[parent]).append(place)
    root = built(make, {"tree_id": tree_id}, written_against=AREAL)
    order, nodes = list[int](), list[Made]()
    waiting: list[tuple[int, list[Made]]] = [(place, []) for place in reversed(firsts)]
    while waiting:
        place, above = waiting.pop()
        run = [place]
        while len(below[run[-1]]) == 1 and len(passing[below[run[-1]][0]]) == len(passing[place]):
            run.append(below[run[-1]][0])
        tokens: list[int] = tree.tokens[run].tolist()
        fields: dict[str, object] = {
            "tree_id": tree_id,
            "start_idx": len(order),
            "end_idx": len(order) + len(run) - 1,
            "tokens": tokens,
            "sequence_ids": passing[place],
            "ancestors": above,
        }
        node: Any = built(make, fields, written_against=AREAL)
        upper: Any = above[-1] if above else root
        if tokens[0] in upper.children:
            raise WrongRows("two lines part at equal ids, by images or routes; AReaL's trie has one child for an id")
        upper.children[tokens[0]] = node
        nodes.append(node)
        order += run
        waiting += [(child, [*above, node]) for child in reversed(below[run[-1]])]
    root_of: Any = root
    root_of.nodes = nodes
    return root, np.array(order, np.int64)
