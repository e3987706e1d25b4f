"""Samples as a tree: what several of them begin with is there once. Pure.

A payload is safetensors, of one session. Sessions of one answer are one tree: a token's place is its number in the
whole answer (`TreeJoin`). Its tensors:

    nodes int32 [n, 3]     (parent, start, end): the new tokens [start, end) behind the place `parent`, -1 for none
    tokens int32           the ids of the new nodes, in order
    paths int32 [S, 3]     each sample's last place, T and R
    trained int32 [X, 3]   (sample, start, end): spans of its line with mask 1
    log_probs float64      `rollout_log_probs` of these, by sample; in the JSON raw ones, scores, rewards likewise
    rollout_routed_experts.k, rollout_indexer_topk.k
                           rows of node k of the payload, without one where its last token ends a line
    media_keys int64       where there are images: as `tokens`, but below 0 and by its hash where one stands for one
    _samples_meta          the JSON: other facts as of flat samples (docs/samples.md), `replays` the types of the rows
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.json_pieces import joined, json_pieces
from stenograph.core.prefix_tree import Ints, Keys, LineTree, Rows, TreeRun, token_keys
from stenograph.export.safetensors import FORMAT_NAMES, META, Tensor, payload, tensor_of
from stenograph.export.samples import Sample, SampleSet, as_numpy, describe

REPLAYS = ("rollout_routed_experts", "rollout_indexer_topk")
SIZE_BYTES = 8
_FORMATS = {name: dtype for dtype, name in FORMAT_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNodes:
    """The new nodes of a payload. `keys` are there where media are."""

    nodes: list[TreeRun] = field(default_factory=list[TreeRun])
    tokens: list[Ints] = field(default_factory=list[Ints])
    keys: list[Keys] = field(default_factory=list[Keys])
    rows: list[Rows] = field(default_factory=list[Rows])

    def take(self, node: TreeRun | None, tokens: Ints, keys: Keys, rows: Rows) -> None:
        """Take a node, which is the end of these tokens."""
        if node is None:
            return
        first = len(tokens) - (node.end - node.start)
        self.nodes.append(node)
        self.tokens.append(tokens[first:])
        self.keys.append(keys[first:])
        self.rows.append([None if row is None else row[first:] for row in rows])

    def tensors(self) -> Iterator[Tensor]:
        """`nodes`, `tokens`, and rows to replay by the node's number in the payload."""
        table = [(node.parent, node.start, node.end) for node in self.nodes]
        yield tensor_of("nodes", "<i4", np.array(table, np.int32).reshape(-1, 3))
        yield tensor_of("tokens", "<i4", np.concatenate([np.zeros(0, np.int32), *self.tokens]))
        keys = np.concatenate([np.zeros(0, np.int64), *self.keys])
        if (keys < 0).any():
            yield tensor_of("media_keys", "<i8", keys)
        for number, rows in enumerate(self.rows):
            for name, row in zip(REPLAYS, rows, strict=True):
                if row is not None:
                    yield tensor_of(f"{name}.{number}", row.dtype.newbyteorder("<").str, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTree:
    """A session's samples as a tree of its own. `paths` [S, 3]: each one's last place, T and R. `trained` [X, 3]: its
    number, and a span of trained tokens in its line."""

    nodes: TreeNodes
    paths: NDArray[np.int32]
    trained: NDArray[np.int32]
    made: SampleSet

    def pieces(self, session_metadata: Mapping[str, object]) -> Iterator[bytes]:
        """The payload, in pieces as those of flat samples."""
        facts = {key: value for key, value in session_metadata.items() if key != "accumulated_token_ids"}
        metas = (_meta(sample) for sample in self.made.samples)
        described = {"samples": metas, "session_metadata": facts, "empty_reason": self.made.empty_reason}
        meta: list[bytes] = []
        for piece in joined(json_pieces(described)):
            meta.append(piece)
            yield b""
        nats = [_trained(sample, sample.rollout_log_probs) for sample in self.made.samples]
        tensors = [
            *self.nodes.tensors(),
            tensor_of("paths", "<i4", self.paths),
            tensor_of("trained", "<i4", self.trained),
            tensor_of("log_probs", "<f8", np.concatenate([np.zeros(0), *nats])),
            Tensor(name=META, dtype="|u1", shape=(sum(map(len, meta)),), pieces=iter(meta)),
        ]
        yield from payload(tensors)


def sample_tree(made: SampleSet) -> SampleTree:
    """The tree of a session's samples. Work for a worker."""
    tree, nodes = LineTree(), TreeNodes()
    paths, trained = list[tuple[int, int, int]](), list[NDArray[np.int32]]()
    for number, sample in enumerate(made.samples):
        tokens = np.frombuffer(sample.tokens, np.int32)
        media = [(row["sha256"], row["start"], row["length"]) for row in sample.media]
        keys, rows = token_keys(tokens, media), (sample.routed_experts, sample.indexer_topk)
        places, node = tree.add(-1, keys, rows)
        nodes.take(node, tokens, keys, rows)
        paths.append((int(places[-1]), len(tokens), sample.response_length))
        edges = np.flatnonzero(np.diff(np.frombuffer(b"\0" + sample.loss_mask + b"\0", np.int8)))
        spans = edges.reshape(-1, 2).astype(np.int32) + len(tokens) - sample.response_length
        trained.append(np.insert(spans, 0, number, axis=1))
    return SampleTree(
        nodes=nodes,
        paths=np.array(paths, np.int32).reshape(-1, 3),
        trained=np.concatenate([np.zeros((0, 3), np.int32), *trained]),
        made=made,
    )


def _meta(sample: Sample) -> dict[str, object]:
    """A sample's part of the JSON: as flat, but numbers are those of the trained tokens alone, and no text."""
    facts: dict[str, object] = {**describe(sample), "response": ""}
    for name in ("raw_log_probs", "sampling_log_probs", "token_rewards"):
        values = getattr(sample, name)
        facts[name] = None if values is None else _trained(sample, values)
    if sample.scores:
        facts["scores"] = {name: _trained(sample, values) for name, values in sample.scores.items()}
    types = zip(REPLAYS, (sample.routed_experts, sample.indexer_topk), strict=True)
    facts["replays"] = {name: FORMAT_NAMES[row.dtype.newbyteorder("<").str] for name, row in types if row is not None}
    return facts


def _trained(sample: Sample, values: Any) -> NDArray[np.float64]:
    """The numbers of the trained tokens, of those of all R."""
    found: NDArray[np.float64] = as_numpy(values)[np.frombuffer(sample.loss_mask, np.bool_)].astype(np.float64)
    return found


class TreeJoin:
    """Makes one tree of the payloads of sessions, one after the other, in the order of their arrival."""

    def __init__(self) -> None:
        self._tree = LineTree()

    def __repr__(self) -> str:
        return f"<TreeJoin {self._tree!r}>"

    def frame(self, frame: bytes) -> bytes:
        """A session's frame, its payload's tree as a part of the whole. Work for a worker."""
        size = int.from_bytes(frame[:SIZE_BYTES], "little")
        start = 2 * SIZE_BYTES + size
        if len(frame) == start:  # an error has no payload
            return frame
        made = b"".join(self._payload(memoryview(frame)[start:]))
        return frame[: SIZE_BYTES + size] + len(made).to_bytes(SIZE_BYTES, "little") + made

    def _payload(self, content: memoryview) -> Iterator[bytes]:
        tensors = _read(content)
        tokens, paths, nodes = tensors.pop("tokens"), tensors.pop("paths").copy(), TreeNodes()
        keys = tensors.pop("media_keys", tokens).astype(np.int64)
        where = np.full(len(tokens) + 1, -1, np.int32)  # the last one stands for none
        for number, (parent, start, end) in enumerate(tensors.pop("nodes").tolist()):
            rows = [tensors.pop(f"{name}.{number}", None) for name in REPLAYS]
            where[start:end], node = self._tree.add(int(where[parent]), keys[start:end], rows)
            nodes.take(node, tokens[start:end], keys[start:end], rows)
        paths[:, 0] = where[paths[:, 0]]
        kept = [tensor_of(name, values.dtype.str, values) for name, values in tensors.items()]
        yield from payload([*nodes.tensors(), tensor_of("paths", "<i4", paths), *kept])


def _read(content: memoryview) -> dict[str, NDArray[Any]]:
    """The tensors of a payload that this module wrote, without a copy."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = msgspec.json.decode(content[8:start])
    found: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(content[start + begin : start + end], _FORMATS[entry["dtype"]])
        found[name] = flat.reshape(entry["shape"])
    return found
