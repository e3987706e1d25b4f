"""The interface of a forward pass: the seam between the engine's bookkeeping and its arithmetic.

The block pool gives a sequence's positions their rows of the KV store, the forward owns the store and computes. So
NumPy and torch can each keep keys and values where they compute, and no bookkeeping knows an array.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stenograph.embedded.forward.weight_memory import WeightMemory
from stenograph.embedded.forward.weights import F32Array, LlamaConfig, LlamaWeights


class LogitsFor(enum.Enum):
    """The tokens of a segment with logits: each costs a product with the whole vocabulary."""

    NONE = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()


Routes: TypeAlias = NDArray[np.uint8 | np.uint16]
"""Experts [tokens, layers, top_k] of tokens, the likeliest first."""


class RowSpan(NamedTuple):
    """Rows [begin, end) of the KV store."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [n] of one sequence, at its positions [start, start + n).

    `spans` hold positions [0, start + n) in order, none is empty, and adjacent ones are merged: contiguous rows of the
    store are one span. The forward writes the keys and values of the last n positions (no other segment may read or
    write these), and reads all; the rows of earlier positions may be shared.

    `routes` [n, layers, top_k] are the experts for its tokens, whatever the router says; where the first of them is -1,
    the router's own. None: the router's own for all.
    """

    ids: NDArray[np.intc]
    start: int
    spans: tuple[RowSpan, ...]
    logits_for: LogitsFor = LogitsFor.LAST
    routes: NDArray[np.intc] | None = None

    def __post_init__(self) -> None:
        if not len(self.ids):
            raise ValueError("a segment has at least one token")
        rows = sum(span.end - span.begin for span in self.spans)
        if rows != self.start + len(self.ids):
            raise ValueError(f"{rows} rows for {self.start} + {len(self.ids)} positions")

    @property
    def num_logits(self) -> int:
        """Rows of logits requested."""
        if self.logits_for is LogitsFor.ALL:
            return len(self.ids)
        return int(self.logits_for is LogitsFor.LAST)


def given_routes(segments: Sequence[Segment], config: LlamaConfig) -> NDArray[np.intc] | None:
    """The routes [T, layers, top_k] given by a batch's segments, -1 where they give none; None if none gives any.

    Raises ValueError for routes of another shape, an unknown expert, and one twice for a token.
    """
    if not any(segment.routes is not None for segment in segments):
        return None
    if (mixture := config.mixture) is None:
        raise ValueError("the model has no experts to send tokens to")
    own = (config.num_layers, mixture.top_k)
    for segment in segments:
        if segment.routes is not None and segment.routes.shape != (len(segment.ids), *own):
            raise ValueError(f"routes have the shape {segment.routes.shape}, not {(len(segment.ids), *own)}")
    given = np.concatenate(
        [np.full((len(one.ids), *own), -1, np.intc) if one.routes is None else one.routes for one in segments]
    )
    forced = np.sort(given[given[..., 0] >= 0], axis=1)
    if forced.size and not 0 <= forced.min() <= forced.max() < mixture.num_experts:
        raise ValueError(f"experts must be from 0 to {mixture.num_experts - 1}")
    if (forced[:, 1:] == forced[:, :-1]).any():
        raise ValueError("a token cannot go to one expert twice")
    return given


def logit_rows(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """The rows of a batch with logits, in order; a batch is the segments' tokens one after another."""
    rows: list[int] = []
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.ids)
        if segment.logits_for is LogitsFor.ALL:
            rows.extend(range(start, end))
        elif segment.logits_for is LogitsFor.LAST:
            rows.append(end - 1)
    return np.asarray(rows, np.int64)


class PreparedWeights(Protocol):
    """Weights as a forward computes with them, ready to be swapped in. Their contents are the forward's own."""

    @property
    def config(self) -> LlamaConfig:
        """The model's sizes, rope and norm."""
        ...

    def free(self) -> WeightMemory | None:
        """Give them up: they are not used again. Returns the memory that they were read to, for the next ones; None
        where it went when they were prepared."""
        ...


class Forward(Protocol):
    """A model with its keys and values."""

    @property
    def config(self) -> LlamaConfig:
        """The model's sizes."""
        ...

    @property
    def num_kv_tokens(self) -> int:
        """Rows of the KV store: positions of all sequences together."""
        ...

    def forward(self, segments: Sequence[Segment]) -> F32Array:
        """Logits [rows, vocab], float32: the rows requested by the segments, in order. Writes the new tokens' KV.

        Raises ValueError, before it writes anything, for no segment, and for an id, a position or a row out of range.
        The engine never passes one (`EngineCore.add` refuses such a prompt); a caller scoring recorded ids may.
        """
        ...

    def copy_kv(self, source: int, target: int, num_tokens: int) -> None:
        """Copy rows [source, source + num_tokens) of the store to [target, …); they do not overlap."""
        ...

    def routes(self, spans: Sequence[RowSpan]) -> Routes | None:
        """The experts that the positions in these rows went to when their keys and values were computed; None of a
        model without experts."""
        ...

    def prepare(self, config: LlamaConfig, weights: LlamaWeights) -> PreparedWeights:
        """Make other weights ready for `swap`. May run on another thread than `forward`, at the same time.

        Raises ValueError for a model of another shape, and StartupError where memory is short.
        """
        ...

    def swap(self, prepared: PreparedWeights) -> PreparedWeights:
        """Compute with other weights from now on; returns those before. Keys and values in the store are of the old
        ones: none of them may be read again. Takes no time; on the thread of `forward`."""
        ...


def check_same_shape(old: LlamaConfig, new: LlamaConfig) -> None:
    """Raise ValueError, naming the first different size, for a model unable to take the other's place."""
    for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab_size", "mixture"):
        ours, theirs = getattr(old, name), getattr(new, name)
        if ours != theirs:
            raise ValueError(f"it has another shape: {name} is {theirs}, the model that runs has {ours}")
    if new.max_context < old.max_context:
        raise ValueError(f"its context is shorter: {new.max_context} tokens, the model that runs has {old.max_context}")
