"""Samples as a tree: a history shared by several of them is in it once, and a trainer runs it once. Pure.

The flat samples are its paths. Read from the server (`format: "tree"`), or made of flat samples that are there.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stenograph.client.errors import BadPayload
from stenograph.client.samples import DTYPES, META, DecodedSample, read_sample, read_tensors
from stenograph.core.prefix_tree import LineTree, token_keys

REPLAYS = ("rollout_routed_experts", "rollout_indexer_topk")
_SIZE_BYTES = 8
_NOT_FOUND = "session_not_found"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreePath:
    """A sample in a tree: its last token's place, its lengths T and R, and the places `[M]` in its line of its trained
    tokens. `sample` has these tokens and their numbers alone, and the facts of the whole, but no text."""

    last: int
    num_tokens: int
    response_length: int
    trained: NDArray[np.int64]
    sample: DecodedSample
    replays: Mapping[str, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeNode:
    """The tokens at the places `[start, end)`, the first behind the token at `parent`, -1 for none. `replays` have rows
    for all of them, or for all but the last."""

    parent: int
    start: int
    end: int
    replays: Sequence[NDArray[Any] | None]


class Tree:
    """Tokens [N] int64, and the `paths` through them. `parents` [N] int32 has the place of the token before each, -1
    for a first one; it is always lower. `positions` [N] int64 count from 0 along a path."""

    def __init__(self, tokens: NDArray[np.int64], nodes: Sequence[TreeNode], paths: Sequence[TreePath]) -> None:
        self.tokens, self.nodes, self.paths = tokens, tuple(nodes), tuple(paths)
        self._starts = np.array([node.start for node in nodes], np.int64)
        self.parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        self.positions = np.arange(len(tokens), dtype=np.int64)
        for node in nodes:
            first = 0 if node.parent < 0 else int(self.positions[node.parent]) + 1
            self.parents[node.start] = node.parent
            self.positions[node.start : node.end] += first - node.start

    def __repr__(self) -> str:
        return f"<Tree {len(self.tokens)} tokens for {len(self.paths)} samples of {self.num_flat}>"

    @property
    def num_flat(self) -> int:
        """Tokens of the flat samples."""
        return sum(path.num_tokens for path in self.paths)

    def line(self, path: TreePath) -> NDArray[np.int64]:
        """The places [T] of a path's tokens, from the first on."""
        runs = [np.arange(start, end) for _, start, end in self._runs(path.last)]
        return np.concatenate(runs[::-1])

    def samples(self) -> tuple[DecodedSample, ...]:
        """The flat samples, in order, bit for bit but for `response`, which is empty."""
        return tuple(map(self._flat, self.paths))

    def mask(self) -> NDArray[np.bool_]:
        """[N, N]: whether the token of the row attends to that of the column, itself or one before it on its paths."""
        mask = np.zeros((len(self.tokens), len(self.tokens)), np.bool_)
        for place, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask[place] = mask[parent]
            mask[place, place] = True
        return mask

    def ranges(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """The mask as rectangles: tokens `[start, end)` that attend [K, 2], those attended to [K, 2], and whether
        causally (a node to itself) or all to all (a node to what is above it)."""
        found: list[tuple[int, int, int, int]] = []
        for node in self.nodes:
            found += ((node.start, node.end, start, end) for _, start, end in self._runs(node.end - 1))
        table = np.array(found, np.int32).reshape(-1, 4)
        return table[:, :2], table[:, 2:], table[:, 0] == table[:, 2]

    def _runs(self, last: int) -> Iterator[tuple[int, int, int]]:
        """The nodes of a path, from its end on: each one's number, and its places on the path."""
        while last >= 0:
            number = int(np.searchsorted(self._starts, last, side="right")) - 1
            node = self.nodes[number]
            yield number, node.start, last + 1
            last = node.parent

    def _flat(self, path: TreePath) -> DecodedSample:
        tokens, start = self.tokens[self.line(path)], path.num_tokens - path.response_length
        at, cut, rows = path.trained - start, path.sample, self._replays(path)
        mask = np.zeros(path.response_length, np.uint8)
        mask[at] = 1

        def spread(values: NDArray[np.float64] | None) -> Any:
            if values is None:
                return None
            found = np.zeros(path.response_length, np.float64)
            found[at] = values
            return found

        return replace(
            cut,
            tokens=tokens,
            loss_mask=mask,
            log_probs=spread(cut.log_probs),
            raw_log_probs=spread(cut.raw_log_probs),
            sampling_log_probs=spread(cut.sampling_log_probs),
            token_rewards=spread(cut.token_rewards),
            scores={name: spread(values) for name, values in cut.scores.items()},
            routed_experts=rows[0],
            indexer_topk=rows[1],
        )

    def _replays(self, path: TreePath) -> list[Any]:
        """A path's two arrays to replay, in their own types."""
        found: list[Any] = []
        runs = list(self._runs(path.last))[::-1]
        for kind, name in enumerate(REPLAYS):
            if name not in path.replays:
                found.append(None)
                continue
            rows = [cast("NDArray[Any]", self.nodes[one].replays[kind])[: end - start] for one, start, end in runs]
            found.append(np.concatenate(rows)[: path.num_tokens - 1].astype(path.replays[name]))
        return found


def tree_of(samples: Iterable[DecodedSample]) -> Tree:
    """The tree of flat samples. Raises ValueError for one with numbers where its mask is 0: a tree keeps none there."""
    made, nodes, paths, tokens = LineTree(), list[TreeNode](), list[TreePath](), list[NDArray[np.int64]]()
    for sample in samples:
        keys = token_keys(sample.tokens, [(one.sha256, one.start, one.length) for one in sample.media])
        rows = (sample.routed_experts, sample.indexer_topk)
        places, node = made.add(-1, keys, rows)
        if node is not None:
            first = len(keys) - (node.end - node.start)
            replays = [None if row is None else row[first:] for row in rows]
            nodes.append(TreeNode(parent=node.parent, start=node.start, end=node.end, replays=replays))
            tokens.append(sample.tokens[first:])
        types = {name: row.dtype for name, row in zip(REPLAYS, rows, strict=True) if row is not None}
        paths.append(_path_of(sample, int(places[-1]), types))
    return Tree(np.concatenate([np.zeros(0, np.int64), *tokens]), nodes, paths)


def _path_of(sample: DecodedSample, last: int, types: Mapping[str, np.dtype[Any]]) -> TreePath:
    is_trained = sample.loss_mask == 1
    scores = sample.scores.values()
    for values in (sample.log_probs, sample.raw_log_probs, sample.sampling_log_probs, sample.token_rewards, *scores):
        if values is not None and values[~is_trained].any():
            raise ValueError("a sample has numbers at tokens with mask 0, and a tree keeps those of trained ones alone")

    def cut(values: NDArray[np.float64] | None) -> Any:
        return None if values is None else values[is_trained]

    trained = np.flatnonzero(is_trained) + sample.prompt_length
    return TreePath(
        last=last,
        num_tokens=len(sample.tokens),
        response_length=sample.response_length,
        trained=trained,
        replays=types,
        sample=replace(
            sample,
            tokens=sample.tokens[trained],
            loss_mask=np.ones(len(trained), np.uint8),
            log_probs=cut(sample.log_probs),
            raw_log_probs=cut(sample.raw_log_probs),
            sampling_log_probs=cut(sample.sampling_log_probs),
            token_rewards=cut(sample.token_rewards),
            scores={name: cut(values) for name, values in sample.scores.items()},
            routed_experts=None,
            indexer_topk=None,
            response="",
        ),
    )


def decoded_tree(payloads: Iterable[bytes]) -> Tree:
    """The tree of the payloads of one answer. Raises BadPayload."""
    nodes, paths, tokens = list[TreeNode](), list[TreePath](), list[NDArray[np.int64]]()
    try:
        for payload in payloads:
            tensors = read_tensors(payload)
            tokens.append(tensors["tokens"].astype(np.int64))
            for number, (parent, start, end) in enumerate(tensors["nodes"].tolist()):
                rows = [tensors.get(f"{name}.{number}") for name in REPLAYS]
                nodes.append(TreeNode(parent=parent, start=start, end=end, replays=rows))
            paths += _paths(tensors)
        whole = np.concatenate([np.zeros(0, np.int64), *tokens])
        _check(nodes, paths, len(whole))
        tree = Tree(whole, nodes, paths)
        tree.paths = tuple(
            replace(path, sample=replace(path.sample, tokens=whole[tree.line(path)[path.trained]])) for path in paths
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError) as error:
        raise BadPayload(f"an answer is no tree of samples: {error!r}") from error
    return tree


def _check(nodes: Sequence[TreeNode], paths: Sequence[TreePath], num_tokens: int) -> None:
    """Raise ValueError for places that are not there."""
    end = 0
    for node in nodes:
        if not (-1 <= node.parent < node.start == end < node.end):
            raise ValueError(f"a node has the places {node.start} to {node.end} below {node.parent}")
        end = node.end
    if end != num_tokens or not all(0 <= path.last < end for path in paths):
        raise ValueError(f"the nodes have {end} tokens of {num_tokens}, or a path ends elsewhere")


def _paths(tensors: Mapping[str, NDArray[np.generic]]) -> Iterator[TreePath]:
    """The paths of a payload; the tokens of their samples are not yet there."""
    spans, nats = cast("NDArray[np.int32]", tensors["trained"]), cast("NDArray[np.float64]", tensors["log_probs"])
    metas, done = json.loads(tensors[META].tobytes())["samples"], 0
    for number, (last, num_tokens, response_length) in enumerate(tensors["paths"].tolist()):
        of_sample = cast("list[list[int]]", spans[spans[:, 0] == number].tolist())
        places = [np.arange(start, end, dtype=np.int64) for _, start, end in of_sample]
        trained = np.concatenate([np.zeros(0, np.int64), *places])
        here: dict[str, NDArray[np.generic]] = {
            f"tokens.{number}": np.zeros(len(trained), np.int64),
            f"loss_mask.{number}": np.ones(len(trained), np.uint8),
            f"rollout_log_probs.{number}": nats[done : done + len(trained)],
        }
        done += len(trained)
        types = {name: np.dtype(DTYPES[dtype]) for name, dtype in metas[number]["replays"].items()}
        yield TreePath(
            last=last,
            num_tokens=num_tokens,
            response_length=response_length,
            trained=trained,
            sample=read_sample(metas[number], here, number),
            replays=types,
        )


def framed_tree(answer: bytes, absent: set[str]) -> Tree:
    """The tree of an answer of many sessions; those that the server does not have are added to `absent`. Raises
    BadPayload: it is cut, or a session failed."""
    return decoded_tree(_payloads(answer, absent))


def _payloads(answer: bytes, absent: set[str]) -> Iterator[bytes]:
    at, head = 0, dict[str, Any]()
    while at < len(answer):
        parts: list[bytes] = []
        for _ in range(2):
            size = int.from_bytes(answer[at : at + _SIZE_BYTES], "little")
            parts.append(answer[at + _SIZE_BYTES : at + _SIZE_BYTES + size])
            at += _SIZE_BYTES + size
        head = json.loads(parts[0])
        if "error" in head and head["error"]["code"] == _NOT_FOUND:
            absent.add(head["session_id"])
        elif "error" in head:
            raise BadPayload(f"session {head['session_id']} has no samples: {head['error']}")
        elif not head.get("done"):
            yield parts[1]
    if at != len(answer) or not head.get("done"):
        raise BadPayload("an answer of many sessions was cut")
