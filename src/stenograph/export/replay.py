"""Replay data: the arrays with which a trainer routes a sample's tokens as the engine did. Base64 to int32. Pure.

An engine reports the data of all tokens of a turn, prompt included, so a line's array is that of its last turn. A line
in which only some turns have data is refused, never padded: a trainer could not see the difference.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.export.lines import SampleLine, inconsistent, without_empty_end
from stenograph.trajectory.turn import Node

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


def replayable(line: SampleLine) -> SampleLine:
    """A line without its last turn, if that was aborted before it sampled a token and so has nothing to replay.

    Nothing of such a turn is trained, and with it no array would cover the line.
    """
    replays = [part.node.turn.sampled.replay for part in line.parts]
    return without_empty_end(line) if replays[-1] is None and any(replays[:-1]) else line


def routed_experts(line: SampleLine, shape: ReplayShape | None) -> NDArray[np.int32] | None:
    """The experts of each token but the last: [T - 1, layers, top_k] int32; None if no turn of `line` has them.

    Raises SamplesInconsistent: only some turns have them, damaged base64, `shape` is not known, or another size.
    """
    name = "routed experts"
    node = line.parts[-1].node
    values = _values(line, [_replay(part.node)[0] for part in line.parts], name)
    if values is None:
        return None
    if shape is None:
        raise inconsistent(node, f"it has {name}, but the model's layers and top_k are not known")
    rows = node.num_tokens - 1
    if values.size != rows * shape.layers * shape.top_k:
        raise inconsistent(
            node,
            f"its {name} have {values.size} values, but {rows} tokens in {shape.layers} layers with top_k"
            f" {shape.top_k} make {rows * shape.layers * shape.top_k}",
        )
    return values.reshape(rows, shape.layers, shape.top_k)[: len(line.ids) - 1]


def indexer_topk(line: SampleLine) -> NDArray[np.int32] | None:
    """The indexer's choice for each token but the last: [T - 1, K] int32; None if no turn has it.

    K is what the engine's data makes it. Raises SamplesInconsistent: only some turns have it, damaged base64, or a
    size that is no multiple of the rows.
    """
    name = "indexer top-k ids"
    node = line.parts[-1].node
    values = _values(line, [_replay(part.node)[1] for part in line.parts], name)
    if values is None:
        return None
    rows = node.num_tokens - 1
    width, rest = divmod(values.size, rows) if rows else (0, values.size)
    if rest or (rows and not width):
        raise inconsistent(node, f"its {name} have {values.size} values, which {rows} tokens do not divide")
    return values.reshape(rows, width)[: len(line.ids) - 1]


def _replay(node: Node) -> tuple[str | None, str | None]:
    replay = node.turn.sampled.replay
    return (None, None) if replay is None else (replay.routed_experts, replay.indexer_topk)


def _values(line: SampleLine, payloads: Sequence[str | None], name: str) -> NDArray[np.int32] | None:
    """The values of the last turn, which cover the line whatever was cut or trimmed from it; None if no turn has any.

    `payloads` are base64, one for each part of the line.
    """
    if all(payload is None for payload in payloads):
        return None
    for part, payload in zip(line.parts, payloads, strict=True):
        if payload is None:
            raise inconsistent(part.node, f"it has no {name}, but other turns of the line to node {line.leaf.id} have")
    return _decoded(line.parts[-1].node, payloads[-1] or "", name)


def _decoded(node: Node, text: str, name: str) -> NDArray[np.int32]:
    """Decode base64 in pieces, because each call holds the GIL. Only the last piece may have padding."""
    data = bytearray()
    try:
        for start in range(0, len(text), _PIECE_CHARS):
            if len(data) != start // 4 * 3:
                raise inconsistent(node, f"its {name} are not base64: there is data after the padding")
            data += base64.b64decode(text[start : start + _PIECE_CHARS], validate=True)
    except ValueError as error:  # binascii.Error is one
        raise inconsistent(node, f"its {name} are not base64: {error}") from error
    if len(data) % 4:
        raise inconsistent(node, f"its {name} have {len(data)} bytes, which is not a whole number of int32 values")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
