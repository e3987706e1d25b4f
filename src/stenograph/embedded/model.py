"""The forward pass of a Llama model over a ragged batch, in numpy.

Owns the arithmetic. Tokens of several sequences lie one after another, so that every matrix is multiplied once per
step; only attention is done sequence by sequence, each against its own keys and values. Knows no requests, no
sampling, no time.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.embedded.kvcache import SequenceKv
from stenograph.embedded.weights import F32Array, LayerWeights, LlamaConfig, LlamaWeights


class LogitsFor(enum.Enum):
    """Which rows of a segment get logits: each costs a product with the whole vocabulary."""

    NONE = enum.auto()
    LAST = enum.auto()
    ALL = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [n] that follow what `kv` holds. `kv` grows by n in the forward."""

    ids: NDArray[np.intc]
    kv: SequenceKv
    logits_for: LogitsFor = LogitsFor.LAST

    def __post_init__(self) -> None:
        if not len(self.ids):
            raise ValueError("a segment has at least one token")


class LlamaModel:
    """The weights, and what is computed once from them."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        angles = np.arange(config.max_context, dtype=np.float64)[:, None] * weights.inv_freq
        self._cos = np.cos(angles).astype(np.float32)[:, None, :]  # [context, 1, D/2]
        self._sin = np.sin(angles).astype(np.float32)[:, None, :]

    def __repr__(self) -> str:
        config = self.config
        return f"<LlamaModel {config.num_layers} layers, hidden {config.hidden}, vocab {config.vocab_size}>"

    def forward(self, segments: Sequence[Segment]) -> F32Array:
        """Logits [rows, vocab], float32: the rows that the segments ask for, in order. Appends to each `kv`.

        No segment may share its `kv` with another. Raises ValueError where a sequence outgrows its reservation.
        If it raises, the buffers hold what they held: `length` moves only at the end.
        """
        if not segments:
            raise ValueError("a batch has at least one segment")
        for segment in segments:
            segment.kv.grow(segment.kv.length + len(segment.ids))
        ids = np.concatenate([segment.ids for segment in segments])
        positions = np.concatenate([np.arange(len(s.ids)) + s.kv.length for s in segments])
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = self._weights.embed[ids]
        for index, layer in enumerate(self._weights.layers):
            hidden += self._attention(layer, index, self._norm(hidden, layer.attn_norm), segments, cos, sin)
            hidden += self._mlp(layer, self._norm(hidden, layer.ffn_norm))
        rows = _logit_rows(segments)
        logits = _linear(self._norm(hidden[rows], self._weights.final_norm), self._weights.head)
        for segment in segments:
            segment.kv.length += len(segment.ids)
        return logits

    def _norm(self, hidden: F32Array, weight: F32Array) -> F32Array:
        mean_square = np.einsum("ij,ij->i", hidden, hidden) / np.float32(hidden.shape[1])
        scaled: F32Array = hidden * (1.0 / np.sqrt(mean_square + np.float32(self.config.rms_eps)))[:, None]
        scaled *= weight
        return scaled

    def _attention(
        self,
        layer: LayerWeights,
        index: int,
        hidden: F32Array,
        segments: Sequence[Segment],
        cos: F32Array,
        sin: F32Array,
    ) -> F32Array:
        config = self.config
        num_q, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = _linear(hidden, layer.qkv).reshape(len(hidden), num_q + 2 * num_kv, dim)
        _rotate(qkv[:, : num_q + num_kv], cos, sin)
        qkv[:, :num_q] *= np.float32(dim**-0.5)
        mixed = np.empty((len(hidden), num_q * dim), np.float32)
        start = 0
        for segment in segments:
            end = start + len(segment.ids)
            _attend(qkv[start:end], segment.kv, index, num_q, num_kv, mixed[start:end])
            start = end
        return _linear(mixed, layer.out)

    def _mlp(self, layer: LayerWeights, hidden: F32Array) -> F32Array:
        gate_up = _linear(hidden, layer.gate_up)
        gate, up = gate_up[:, : self.config.ffn], gate_up[:, self.config.ffn :]
        with np.errstate(over="ignore"):  # exp of a large number is inf, and x / inf is the 0 that silu wants
            denominator = -gate
            np.exp(denominator, out=denominator)
            denominator += 1
            up *= gate
            up /= denominator
        return _linear(up, layer.down)


FEW_ROWS = 64
"""Up to so many rows, a product is computed as its transpose (measured: docs/LOG.md, 2026-11-21)."""


def _linear(x: F32Array, weight: F32Array) -> F32Array:
    """x @ weight.T: [T, in] and [out, in] to [T, out].

    With few rows, BLAS is up to twice as fast when the many outputs are the rows of the product; with many, slower.
    """
    if len(x) <= FEW_ROWS:
        return np.ascontiguousarray((weight @ x.T).T, np.float32)
    return np.asarray(x @ weight.T, np.float32)


def _rotate(heads: F32Array, cos: F32Array, sin: F32Array) -> None:
    """Rope in place, rotate-half. `heads` [T, heads, D]; `cos`, `sin` [T, 1, D/2]."""
    half = heads.shape[2] // 2
    first, second = heads[..., :half], heads[..., half:]
    rotated = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = rotated


def _attend(qkv: F32Array, kv: SequenceKv, index: int, num_q: int, num_kv: int, out: F32Array) -> None:
    """Causal attention of n new tokens over length + n positions; writes their keys and values, and `out` [n, H D]."""
    num_new, _, dim = qkv.shape
    old, total, group = kv.length, kv.length + num_new, num_q // num_kv
    kv.data[index, 0, :, old:total] = qkv[:, num_q : num_q + num_kv].swapaxes(0, 1)
    kv.data[index, 1, :, old:total] = qkv[:, num_q + num_kv :].swapaxes(0, 1)
    keys, values = kv.data[index, 0, :, :total], kv.data[index, 1, :, :total]  # [K, S, D]
    queries = qkv[:, :num_q].reshape(num_new, num_kv, group, dim).transpose(1, 2, 0, 3)
    scores = queries.reshape(num_kv, group * num_new, dim) @ keys.swapaxes(1, 2)  # [K, G n, S]
    if num_new > 1:
        positions: NDArray[np.intp] = np.arange(total, dtype=np.intp)
        future = positions > positions[old:, None]
        scores.reshape(num_kv, group, num_new, total)[:, :, future] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    mixed = scores @ values
    mixed /= scores.sum(axis=2, keepdims=True)
    out.reshape(num_new, num_kv, group, dim)[...] = mixed.reshape(num_kv, group, num_new, dim).transpose(2, 0, 1, 3)


def _logit_rows(segments: Sequence[Segment]) -> NDArray[np.intp]:
    rows: list[int] = []
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.ids)
        if segment.logits_for is LogitsFor.ALL:
            rows.extend(range(start, end))
        elif segment.logits_for is LogitsFor.LAST:
            rows.append(end - 1)
    return np.asarray(rows, np.intp)
