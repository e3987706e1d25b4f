"""Replay data: the arrays with which a trainer routes a sample's tokens as the engine did. Pure.

Row i of a line comes from the forward pass of token i, as reported to the turn of token i + 1, sampled or prompt. So
each turn gives the rows from the last token kept of its parent up to, not including, its own last token: the engine
never fed that one in this turn. An engine may report rows of earlier positions again; they are another pass's, maybe of
other weights. A line with data for only some turns is refused, never padded: a trainer could not see the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from stenograph.core.replay import Ints, PackedInts, Replay
from stenograph.export.lines import SampleLine, inconsistent, without_empty_end
from stenograph.trajectory.turn import Node

ReplayRows = NDArray[np.uint8 | np.uint16 | np.uint32 | np.int32]
"""An array of one row for each token of a line but the last, of the smallest unsigned type for its values; int32 where
one is below 0. Of a line of one turn it is a view of the bytes that the turn keeps."""

_NONE = Replay()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayShape:
    """A mixture-of-experts model's number of routing `layers`, and the number `top_k` of experts chosen in each for a
    token."""

    layers: int
    top_k: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.top_k < 1:
            raise ValueError(f"layers and top_k are at least 1, got {self.layers} and {self.top_k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnRows:
    """Rows `[start, end)` of a line, given by its turn `node`."""

    node: Node
    start: int
    end: int

    @property
    def num_reported(self) -> int:
        """Positions fed by the engine up to the end of the turn."""
        return self.node.num_effective - 1


def replayable(line: SampleLine) -> SampleLine:
    """A line without its last turn, if that was aborted before it sampled a token and so has nothing to replay.

    Nothing of such a turn is trained, and with it no array would cover the line.
    """
    replays = [part.node.turn.sampled.replay for part in line.parts]
    return without_empty_end(line) if replays[-1] is None and any(replays[:-1]) else line


def routed_experts(line: SampleLine, shape: ReplayShape | None) -> ReplayRows | None:
    """The experts of each token but the last: [T - 1, layers, top_k]; None if no turn of `line` has them.

    Raises SamplesInconsistent: only some turns have them, `shape` is not known, or another size.
    """
    name = "routed experts"
    payloads = [(part.node.turn.sampled.replay or _NONE).routed_experts for part in line.parts]
    if not any(payload is not None for payload in payloads):
        return None
    turns = _turns(line, payloads, name)
    if shape is None:
        raise inconsistent(turns[-1].node, f"it has {name}, but the model's layers and top_k are not known")
    pieces = [
        _experts_of(turn, payload.values, shape, name)
        for turn, payload in zip(turns, payloads, strict=True)
        if payload is not None
    ]
    return _joined(pieces)


def _experts_of(turn: _TurnRows, values: Ints, shape: ReplayShape, name: str) -> ReplayRows:
    """The turn's rows, out of everything the engine reported, or of the rows from the requested one on."""
    node, width = turn.node, shape.layers * shape.top_k
    asked = (node.turn.sampled.replay or _NONE).first_row
    first = asked if values.size == (turn.num_reported - asked) * width else 0
    if values.size != (turn.num_reported - first) * width:
        from_asked = f", and from token {asked} on {(turn.num_reported - asked) * width}" if asked else ""
        raise inconsistent(
            node,
            f"its {name} have {values.size} values, but {turn.num_reported} tokens in {shape.layers} layers with top_k"
            f" {shape.top_k} make {turn.num_reported * width}{from_asked}",
        )
    if turn.start < first:
        raise inconsistent(node, f"its {name} begin with token {first}, but the line needs those of {turn.start} too")
    return _smallest(values.reshape(-1, shape.layers, shape.top_k)[turn.start - first : turn.end - first])


def indexer_topk(line: SampleLine) -> ReplayRows | None:
    """The indexer's choice for each token but the last: [T - 1, K]; None if no turn has it.

    K follows from the engine's data. Raises SamplesInconsistent: only some turns have it, or sizes that are no
    multiples of the rows, or of rows of different lengths.
    """
    name = "indexer top-k ids"
    payloads = [(part.node.turn.sampled.replay or _NONE).indexer_topk for part in line.parts]
    if not any(payload is not None for payload in payloads):
        return None
    turns = _turns(line, payloads, name)
    pieces: list[ReplayRows] = []
    for turn, payload in zip(turns, payloads, strict=True):
        if payload is None:
            continue
        values, rows = payload.values, turn.num_reported
        width, rest = divmod(values.size, rows) if rows else (0, values.size)
        if rest or (rows and not width):
            raise inconsistent(turn.node, f"its {name} have {values.size} values, which {rows} tokens do not divide")
        piece = _smallest(values.reshape(rows, width)[turn.start : turn.end])
        if pieces and pieces[-1].size and width != pieces[-1].shape[1]:
            raise inconsistent(
                turn.node, f"it has {width} {name} for a token, and the turn before it {pieces[-1].shape[1]}"
            )
        pieces.append(piece)
    return _joined([piece for piece in pieces if piece.size] or pieces[-1:])


def _turns(line: SampleLine, payloads: Sequence[PackedInts | None], name: str) -> list[_TurnRows]:
    """The rows given by each turn. Raises SamplesInconsistent where a turn gives rows and has no payload."""
    turns: list[_TurnRows] = []
    end = 0
    for part, payload in zip(line.parts, payloads, strict=True):
        start = max(0, end - 1)
        end += part.num_tokens
        if payload is None and start < end - 1:
            raise inconsistent(part.node, f"it has no {name}, but other turns of the line to node {line.leaf.id} have")
        turns.append(_TurnRows(node=part.node, start=start, end=end - 1))
    return turns


def _smallest(values: Ints) -> ReplayRows:
    """The values in the smallest unsigned type for them, in int32 where one is below 0: a view where they are so."""
    if not values.size:
        return values.astype(np.uint8)
    if values.dtype == np.uint8:
        return cast("ReplayRows", values)
    dtype = values.dtype if np.minimum.reduce(values, axis=None) < 0 else np.min_scalar_type(int(values.max()))
    return cast("ReplayRows", values.astype(dtype, copy=False))


def _joined(pieces: Sequence[ReplayRows]) -> ReplayRows:
    """One array of all pieces: the piece itself, where there is one."""
    if len(pieces) == 1:
        return pieces[0]
    dtypes = (piece.dtype for piece in pieces)
    dtype = max(dtypes, key=lambda dtype: (dtype.kind == "i", dtype.itemsize))
    return np.concatenate(pieces, dtype=dtype)
