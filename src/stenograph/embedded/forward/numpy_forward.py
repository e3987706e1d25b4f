"""The forward pass of a Llama model over a ragged batch, in NumPy, with one MLP a layer or a mixture of experts.

Owns the arithmetic, and the store of keys and values, with the experts of each position. Tokens of several sequences
lie one after another, so that every matrix is multiplied once per step; only attention is done sequence by sequence,
each over its segment's rows. Knows no requests, no blocks, no sampling, no time.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stenograph.embedded.forward.base import (
    PreparedWeights,
    Routes,
    RowSpan,
    Segment,
    check_same_shape,
    given_routes,
    logit_rows,
)
from stenograph.embedded.forward.weight_memory import WeightMemory
from stenograph.embedded.forward.weights import F32Array, LayerWeights, LlamaConfig, LlamaWeights


class NumpyWeights:
    """Weights, and the angles of rope [positions, 1, D / 2] for the first `num_positions`."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, num_positions: int) -> None:
        self.config = config
        self.weights = weights
        angles = np.arange(num_positions, dtype=np.float64)[:, None] * weights.inv_freq
        self.cos: F32Array = np.cos(angles).astype(np.float32)[:, None, :]
        self.sin: F32Array = np.sin(angles).astype(np.float32)[:, None, :]

    def free(self) -> WeightMemory:
        """See `PreparedWeights.free`."""
        memory = self.weights.memory
        del self.weights
        return memory


class NumpyForward:
    """A model's weights, and its keys and values [layers, 2, K, num_kv_tokens, D]. A `Forward`; one thread's."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, *, num_kv_tokens: int) -> None:
        """Raises ValueError for more tokens than fit into memory. Unwritten rows take no memory."""
        self._num_kv_tokens = num_kv_tokens
        self._kv = _zeroed_pages((config.num_layers, 2, config.num_kv_heads, num_kv_tokens, config.head_dim))
        self._routes = routes_store(config, num_kv_tokens)
        self._max_positions = min(config.max_context, num_kv_tokens)  # each has a row: of no more are angles kept
        self._model = NumpyWeights(config, weights, self._max_positions)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"<NumpyForward {config.num_layers} layers, hidden {config.hidden}, vocab {config.vocab_size}, "
            f"{self.num_kv_tokens} KV tokens>"
        )

    @property
    def config(self) -> LlamaConfig:
        """The model's sizes."""
        return self._model.config

    @property
    def num_kv_tokens(self) -> int:
        """Rows of the KV store: positions of all sequences together."""
        return self._num_kv_tokens

    def copy_kv(self, source: int, target: int, num_tokens: int) -> None:
        """Copy rows [source, source + num_tokens) of the store to [target, …); they do not overlap."""
        if min(source, target, num_tokens) < 0 or max(source, target) + num_tokens > self.num_kv_tokens:
            raise ValueError(f"{num_tokens} rows at {source} and {target} of {self.num_kv_tokens}")
        self._kv[:, :, :, target : target + num_tokens] = self._kv[:, :, :, source : source + num_tokens]
        if self._routes is not None:
            self._routes[target : target + num_tokens] = self._routes[source : source + num_tokens]

    def routes(self, spans: Sequence[RowSpan]) -> Routes | None:
        """See `Forward.routes`."""
        store = self._routes
        return None if store is None else np.concatenate([store[span.begin : span.end] for span in spans])

    def forward(self, segments: Sequence[Segment]) -> F32Array:
        """Logits [rows, vocab], float32: the rows requested by the segments, in order. Writes the new tokens' KV.

        Raises ValueError as every `Forward` does. An id below 0 above all: NumPy would read it from the end.
        """
        places, model, given = self._places(segments), self._model, given_routes(segments, self.config)
        ids = np.concatenate([segment.ids for segment in segments])
        if not 0 <= ids.min() <= ids.max() < model.config.vocab_size:
            raise ValueError(f"ids must be from 0 to {model.config.vocab_size - 1}")
        positions = np.concatenate([np.arange(s.start, s.start + len(s.ids)) for s in segments])
        cos, sin = model.cos[positions], model.sin[positions]
        hidden = model.weights.embed[ids]
        for index, (layer, kv) in enumerate(zip(model.weights.layers, self._kv, strict=True)):
            hidden += self._attention(layer, kv, self._norm(hidden, layer.attn_norm), places, cos, sin)
            normed = self._norm(hidden, layer.ffn_norm)
            if layer.router is None:
                hidden += self._mlp(layer.gate_up, layer.down, normed)
            else:
                chosen, weights = self._route(layer.router, normed, None if given is None else given[:, index])
                self._record(index, chosen, places)
                self._add_experts(layer, normed, chosen, weights, hidden)
        return _linear(self._norm(hidden[logit_rows(segments)], model.weights.final_norm), model.weights.head)

    def prepare(self, config: LlamaConfig, weights: LlamaWeights) -> NumpyWeights:
        """See `Forward.prepare`."""
        check_same_shape(self.config, config)
        return NumpyWeights(replace(config, max_context=self.config.max_context), weights, self._max_positions)

    def swap(self, prepared: PreparedWeights) -> NumpyWeights:
        """See `Forward.swap`."""
        assert isinstance(prepared, NumpyWeights), "prepared by this forward"
        before, self._model = self._model, prepared
        return before

    def _places(self, segments: Sequence[Segment]) -> list["_SegmentPlace"]:
        if not segments:
            raise ValueError("a batch has at least one segment")
        places: list[_SegmentPlace] = []
        num_rows = 0
        for segment in segments:
            total = segment.start + len(segment.ids)
            spans = segment.spans
            are_rows = min(span.begin for span in spans) >= 0 and max(span.end for span in spans) <= self.num_kv_tokens
            if total > self._max_positions or not are_rows:
                raise ValueError(
                    f"{total} positions in {spans}: the context has {self.config.max_context}, "
                    f"the store {self.num_kv_tokens}"
                )
            places.append(_place(segment, num_rows))
            num_rows += len(segment.ids)
        return places

    def _norm(self, hidden: F32Array, weight: F32Array) -> F32Array:
        mean_square = np.vecdot(hidden, hidden) / np.float32(hidden.shape[-1])
        scaled: F32Array = hidden / np.sqrt(mean_square + np.float32(self.config.rms_eps))[..., None]
        scaled *= weight
        return scaled

    def _attention(
        self,
        layer: LayerWeights,
        kv: F32Array,
        hidden: F32Array,
        places: list["_SegmentPlace"],
        cos: F32Array,
        sin: F32Array,
    ) -> F32Array:
        num_q, num_kv, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = _linear(hidden, layer.qkv).reshape(len(hidden), num_q + 2 * num_kv, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :num_q] = self._norm(qkv[:, :num_q], layer.q_norm)
            qkv[:, num_q : num_q + num_kv] = self._norm(qkv[:, num_q : num_q + num_kv], layer.k_norm)
        _rotate(qkv[:, : num_q + num_kv], cos, sin)
        qkv[:, :num_q] *= np.float32(dim**-0.5)
        mixed = np.empty((len(hidden), num_q * dim), np.float32)
        for place in places:
            _attend(qkv, kv, place, num_q, num_kv, mixed)
        return _linear(mixed, layer.out)

    def _route(
        self, router: F32Array, hidden: F32Array, given: NDArray[np.intc] | None
    ) -> tuple[NDArray[np.intp], F32Array]:
        """The experts [T, top_k] that tokens go to, the likeliest first or those `given`, and their weights."""
        mixture = self.config.mixture
        assert mixture is not None, "a layer has a router where there are experts"
        scores = _linear(hidden, router)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : mixture.top_k]
        if given is not None:
            chosen = np.where(given[:, :1] < 0, chosen, given)
        weights: F32Array = np.take_along_axis(scores, chosen, axis=1)
        if mixture.normalizes:
            weights /= weights.sum(axis=1, keepdims=True)
        return chosen, weights

    def _record(self, index: int, chosen: NDArray[np.intp], places: list["_SegmentPlace"]) -> None:
        """Keep the experts that a layer sent new tokens to beside their keys and values."""
        assert self._routes is not None, "there is a store where there are experts"
        for place in places:
            for batch, rows in place.writes:
                self._routes[rows, index] = chosen[batch]

    def _add_experts(
        self, layer: LayerWeights, hidden: F32Array, chosen: NDArray[np.intp], weights: F32Array, out: F32Array
    ) -> None:
        """Add to `out` what the experts make of their tokens, one expert after the other."""
        for expert in np.unique(chosen):
            tokens, ranks = np.nonzero(chosen == expert)
            made = self._mlp(layer.gate_up[expert], layer.down[expert], hidden[tokens])
            out[tokens] += weights[tokens, ranks, None] * made

    def _mlp(self, gate_up_weight: F32Array, down: F32Array, hidden: F32Array) -> F32Array:
        gate_up = _linear(hidden, gate_up_weight)
        gate, up = gate_up[:, : self.config.ffn], gate_up[:, self.config.ffn :]
        with np.errstate(over="ignore"):  # exp of a large number is inf, and x / inf is the 0 that silu wants
            denominator = -gate
            np.exp(denominator, out=denominator)
            denominator += 1
            up *= gate
            up /= denominator
        return _linear(up, down)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentPlace:
    """Place of a segment, the same in all layers.

    `batch` are its tokens' rows in the batch. `reads` pairs positions [0, total) with rows of the store, a span a pair;
    `writes` pairs rows of the batch with rows of the store. `future` [n, n] is -inf where a new token would see a later
    one; None for one token.
    """

    batch: slice
    total: int
    reads: tuple[tuple[slice, slice], ...]
    writes: tuple[tuple[slice, slice], ...]
    future: F32Array | None


def _place(segment: Segment, first_row: int) -> _SegmentPlace:
    num_new = len(segment.ids)
    reads: list[tuple[slice, slice]] = []
    writes: list[tuple[slice, slice]] = []
    position = 0
    for span in segment.spans:
        end = position + span.end - span.begin
        reads.append((slice(position, end), slice(span.begin, span.end)))
        if end > segment.start:
            new = max(position, segment.start)
            rows = slice(first_row + new - segment.start, first_row + end - segment.start)
            writes.append((rows, slice(span.begin + new - position, span.end)))
        position = end
    return _SegmentPlace(
        batch=slice(first_row, first_row + num_new),
        total=position,
        reads=tuple(reads),
        writes=tuple(writes),
        future=np.triu(np.full((num_new, num_new), -np.inf, np.float32), 1) if num_new > 1 else None,
    )


def _attend(qkv: F32Array, kv: F32Array, place: _SegmentPlace, num_q: int, num_kv: int, out: F32Array) -> None:
    """Causal attention of a segment's n tokens over S positions, in one layer [2, K, rows, D] of the store.

    Writes their keys and values, then `out` [batch, H D]. Spans are read where they lie: each has its columns of the
    scores, softmax goes over all of them.
    """
    for batch, rows in place.writes:
        kv[0, :, rows] = qkv[batch, num_q : num_q + num_kv].swapaxes(0, 1)
        kv[1, :, rows] = qkv[batch, num_q + num_kv :].swapaxes(0, 1)
    new = qkv[place.batch, :num_q]
    num_new, _, dim = new.shape
    group = num_q // num_kv
    queries = new.reshape(num_new, num_kv, group, dim).transpose(1, 2, 0, 3).reshape(num_kv, group * num_new, dim)
    scores = np.empty((num_kv, group * num_new, place.total), np.float32)
    for positions, rows in place.reads:
        _dots(queries, kv[0, :, rows], scores[:, :, positions])
    if place.future is not None:
        scores.reshape(num_kv, group, num_new, place.total)[..., -num_new:] += place.future
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    first, *others = (scores[:, :, positions] @ kv[1, :, rows] for positions, rows in place.reads)
    mixed = sum(others, start=first)
    mixed /= scores.sum(axis=2, keepdims=True)
    mixed = mixed.reshape(num_kv, group, num_new, dim).transpose(2, 0, 1, 3)
    out[place.batch].reshape(num_new, num_kv, group, dim)[...] = mixed


def _rotate(heads: F32Array, cos: F32Array, sin: F32Array) -> None:
    """Rope in place, rotate-half. `heads` [T, heads, D]; `cos`, `sin` [T, 1, D/2]."""
    half = heads.shape[2] // 2
    first, second = heads[..., :half], heads[..., half:]
    rotated = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = rotated


BLOCK_ROWS, FEW_ROWS = 24, 64
"""Up to so many rows a product is computed in blocks, then as its transpose, then as it is (measured: docs/LOG.md)."""
BLOCK = 32
"""Columns of a block: so few that BLAS multiplies the matrix where it lies, instead of copying it into its layout."""


def _linear(x: F32Array, weight: F32Array) -> F32Array:
    """x @ weight.T: [T, in] and [out, in] to [T, out]."""
    product = np.empty((len(x), len(weight)), np.float32)
    if BLOCK_ROWS < len(x) <= FEW_ROWS:
        product[...] = (weight @ x.T).T
    else:
        _dots(x, weight, product)
    return product


def _dots(x: F32Array, others: F32Array, out: F32Array) -> None:
    """out[..., t, o] = x[..., t, :] · others[..., o, :], in blocks of `others` where `x` has a few rows."""
    *outer, num_others, dim = others.shape
    num_blocks = num_others // BLOCK if 1 < x.shape[-2] <= BLOCK_ROWS else 0
    rest = num_blocks * BLOCK
    if num_blocks:
        blocks = others[..., :rest, :].reshape(*outer, num_blocks, BLOCK, dim).swapaxes(-1, -2)
        columns = out[..., :rest].reshape(*out.shape[:-1], num_blocks, BLOCK).swapaxes(-2, -3)
        np.matmul(x[..., None, :, :], blocks, out=columns)
    if rest < num_others:
        np.matmul(x, others[..., rest:, :].swapaxes(-1, -2), out=out[..., rest:])


def routes_store(config: LlamaConfig, num_kv_tokens: int) -> Routes | None:
    """A store of routes [rows, layers, top_k], in the smallest type that holds an expert; None without experts."""
    if (mixture := config.mixture) is None:
        return None
    shape = (num_kv_tokens, config.num_layers, mixture.top_k)
    return np.zeros(shape, np.uint8) if mixture.num_experts <= 2**8 else np.zeros(shape, np.uint16)


def _zeroed_pages(shape: tuple[int, ...]) -> F32Array:
    """Zeros of which only written pages take memory.

    Not `np.zeros`, which asks for pages of 2 MiB: the first tokens of SmolLM2 took 750 MB, here 24 (docs/LOG.md).
    """
    size = int(np.prod(shape, dtype=object)) * np.dtype(np.float32).itemsize
    if size <= 0:
        raise ValueError(f"a KV store needs at least one token, got {shape[3]}")
    try:
        pages = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{shape[3]} tokens of KV are {size / 2**30:.1f} GiB, more than the memory available"
        ) from error
    return np.frombuffer(pages, np.float32).reshape(shape)
