"""What a trainer needs to route a sample's tokens the same way again: base64 of the engine to int32 arrays. Pure.

An engine tells it with each turn for all tokens of that turn, prompt included, so that a line's array is its last
turn's. A line that is told it in part is refused, never filled up: a trainer could not tell the difference.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.export.lines import Line, inconsistent, without_empty_end
from stenograph.session.history import Node

_PIECE_CHARS = 256 * 1024
"""Base64 that is decoded at once, in a millisecond. A multiple of 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayShape:
    """A mixture-of-experts model's `layers` that route, and the `top_k` experts that each chooses for a token."""

    layers: int
    top_k: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.top_k < 1:
            raise ValueError(f"layers and top_k are at least 1, got {self.layers} and {self.top_k}")


def replayable(line: Line) -> Line:
    """A line without its last turn, if that was aborted before it drew anything and so was told nothing to replay.

    Nothing of such a turn is trained, and with it no array would cover the line.
    """
    told = [part.node.turn.sampled.replay for part in line.parts]
    return without_empty_end(line) if told[-1] is None and any(told[:-1]) else line


def routed_experts(line: Line, shape: ReplayShape | None) -> NDArray[np.int32] | None:
    """The experts of each token but the last: [T - 1, layers, top_k] int32; None if no turn of `line` has them.

    Raises SamplesInconsistent: only some turns have them, `shape` is not known, damaged base64, or another size.
    """
    name = "routed experts"
    told = [_replay(part.node)[0] for part in line.parts]
    last = _last(line, told, name)
    if last is None:
        return None
    node = line.parts[-1].node
    if shape is None:
        raise inconsistent(node, f"there are {name} with it, but the model's layers and top_k are not known")
    values = _decoded(node, last, name)
    rows = node.num_tokens - 1
    if values.size != rows * shape.layers * shape.top_k:
        raise inconsistent(
            node,
            f"its {name} have {values.size} values, but {rows} tokens in {shape.layers} layers with top_k"
            f" {shape.top_k} make {rows * shape.layers * shape.top_k}",
        )
    return values.reshape(rows, shape.layers, shape.top_k)[: len(line.ids) - 1]


def indexer_topk(line: Line) -> NDArray[np.int32] | None:
    """What the model's indexer chose for each token but the last: [T - 1, K] int32; None if no turn has it.

    K is what the engine's data makes it. Raises SamplesInconsistent: only some turns have it, damaged base64, or a
    size that is no multiple of the rows.
    """
    name = "indexer top-k ids"
    told = [_replay(part.node)[1] for part in line.parts]
    last = _last(line, told, name)
    if last is None:
        return None
    node = line.parts[-1].node
    values = _decoded(node, last, name)
    rows = node.num_tokens - 1
    width, rest = divmod(values.size, rows) if rows else (0, values.size)
    if rest or (rows and not width):
        raise inconsistent(node, f"its {name} have {values.size} values, which {rows} tokens do not divide")
    return values.reshape(rows, width)[: len(line.ids) - 1]


def _replay(node: Node) -> tuple[str | None, str | None]:
    replay = node.turn.sampled.replay
    return (None, None) if replay is None else (replay.routed_experts, replay.indexer_topk)


def _last(line: Line, told: Sequence[str | None], name: str) -> str | None:
    """The last turn's, which covers the line, whatever was cut or trimmed from it; None if no turn has any."""
    if all(value is None for value in told):
        return None
    for part, value in zip(line.parts, told, strict=True):
        if value is None:
            raise inconsistent(
                part.node, f"there are no {name} with it, but other turns of the line to node {line.leaf.id} do"
            )
    return told[-1]


def _decoded(node: Node, text: str, name: str) -> NDArray[np.int32]:
    """The values in `text`, decoded in pieces: each call holds the GIL. Padding belongs to the last one alone."""
    data = bytearray()
    try:
        for start in range(0, len(text), _PIECE_CHARS):
            if len(data) != start // 4 * 3:
                raise inconsistent(node, f"its {name} are not base64: there is data after the padding")
            data += base64.b64decode(text[start : start + _PIECE_CHARS], validate=True)
    except ValueError as error:  # binascii.Error is one
        raise inconsistent(node, f"its {name} are not base64: {error}") from error
    if len(data) % 4:
        raise inconsistent(node, f"its {name} have {len(data)} bytes, which is no number of int32 values")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
