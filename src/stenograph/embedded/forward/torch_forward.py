"""The forward pass of a Llama model over a ragged batch, in torch: on a GPU, or on the CPU for comparison.

Owns the weights and the KV store on their device. Needs torch: larger than all else together and so an extra (`pip
install -e '.[torch]'`); it is imported when the first TorchForward is made. Knows no requests, no sampling, no time.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import StartupError
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
from stenograph.parts import TorchDtype

Tensor: TypeAlias = Any
"""torch.Tensor; types are checked where there is no torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """LayerWeights on the device."""

    attn_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(slots=True, kw_only=True)
class TorchWeights:
    """LlamaWeights on the device, with the angles of rope [context, 1, D / 2]."""

    config: LlamaConfig
    embed: Tensor
    head: Tensor
    final_norm: Tensor
    layers: tuple[_Layer, ...]
    cos: Tensor
    sin: Tensor
    memory: WeightMemory | None

    def free(self) -> WeightMemory | None:
        """See `PreparedWeights.free`."""
        self.embed = self.head = self.final_norm = self.cos = self.sin = None
        while self.layers:  # one after the other: other threads run between two
            self.layers = self.layers[1:]
        return self.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """Sequences [B] with one new token each. A mask [B, 1, 1, L] is added to the scores of their positions [B, L]."""

    tokens: Tensor
    rows: RowSpan | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One sequence with n new tokens and positions [1, S]. A mask [n, S] is added to scores; None: it begins here."""

    tokens: slice
    rows: RowSpan | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Inputs of all layers of one forward: of the new tokens [T], their angles [T, 1, D / 2] and their rows [T]."""

    cos: Tensor
    sin: Tensor
    rows: Tensor
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


class TorchForward:
    """A model with its keys and values, on one device.

    `device` is `auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N`. `pads_decodes` says whether the
    attention of decoding sequences is done together; None: on a GPU, where each call costs a launch. On the CPU the
    copies of keys that this takes cost more (measured: docs/LOG.md, 2026-11-21).
    Raises StartupError: no torch, no such device, too little memory; ValueError for a store of no tokens. One thread's.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        *,
        num_kv_tokens: int,
        device: str = "auto",
        dtype: TorchDtype = TorchDtype.FLOAT32,
        pads_decodes: bool | None = None,
    ) -> None:
        if num_kv_tokens < 1:
            raise ValueError(f"a KV store needs at least one token, got {num_kv_tokens}")
        self.num_kv_tokens = num_kv_tokens
        self._torch = import_torch()
        self._functional = self._torch.nn.functional
        self._device = _device(self._torch, device)
        self._dtype = getattr(self._torch, dtype)
        self._pads_decodes = self._device.type == "cuda" if pads_decodes is None else pads_decodes
        try:
            self._model = self._placed(config, weights)
            shape = (config.num_layers, 2, num_kv_tokens, config.num_kv_heads, config.head_dim)
            self._kv = self._torch.empty(shape, dtype=self._dtype, device=self._device)
            self._routes: Tensor = None  # [rows, layers, top_k], where there are experts
            if (mixture := config.mixture) is not None:
                routed = (num_kv_tokens, config.num_layers, mixture.top_k)
                self._routes = self._torch.zeros(routed, dtype=self._torch.int32, device=self._device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StartupError(
                f"{num_kv_tokens} KV tokens and the model do not fit on {self._device}: {reason}"
            ) from error

    @property
    def config(self) -> LlamaConfig:
        """The model's sizes."""
        return self._model.config

    @property
    def device(self) -> str:
        """The device in use, as torch names it: `auto` is resolved."""
        return str(self._device)

    def __repr__(self) -> str:
        config = self.config
        sizes = f"{config.num_layers} layers, hidden {config.hidden}, vocab {config.vocab_size}"
        return f"<TorchForward {sizes}, {self.num_kv_tokens} KV tokens of {self._dtype} on {self._device}>"

    def forward(self, segments: Sequence[Segment]) -> F32Array:
        """Logits [rows, vocab], float32: the rows requested by the segments, in order. Writes the new tokens' KV.

        Raises ValueError, before anything is written, for an id, a position or a row out of range: on a GPU it would
        end the process.
        """
        if not segments:
            raise ValueError("a batch has at least one segment")
        ids = np.concatenate([segment.ids for segment in segments]).astype(np.int64)
        self._check(ids, segments)
        model, given = self._model, given_routes(segments, self.config)
        with self._torch.inference_mode():
            forced = None if given is None else self._on_device(given.astype(np.int64))
            hidden = model.embed[self._on_device(ids)]
            batch = self._batch(segments)
            for index, layer in enumerate(model.layers):
                hidden += self._attention(layer, self._kv[index], self._norm(hidden, layer.attn_norm), batch)
                normed = self._norm(hidden, layer.ffn_norm)
                if layer.router is None:
                    hidden += self._mlp(layer.gate_up, layer.down, normed)
                    continue
                chosen, weights = self._route(layer.router, normed, None if forced is None else forced[:, index])
                self._routes[batch.rows, index] = chosen.to(self._routes.dtype)
                self._add_experts(layer, normed, chosen, weights, hidden)
            hidden = self._norm(hidden[self._on_device(logit_rows(segments))], model.final_norm)
            logits = self._functional.linear(hidden, model.head)
            result: F32Array = logits.float().cpu().numpy()
            return result

    def copy_kv(self, source: int, target: int, num_tokens: int) -> None:
        """Copy rows [source, source + num_tokens) of the store to [target, …); they do not overlap."""
        if min(source, target, num_tokens) < 0 or max(source, target) + num_tokens > self.num_kv_tokens:
            raise ValueError(f"{num_tokens} rows at {source} and {target} of {self.num_kv_tokens}")
        with self._torch.inference_mode():
            self._kv[:, :, target : target + num_tokens] = self._kv[:, :, source : source + num_tokens]
            if self._routes is not None:
                self._routes[target : target + num_tokens] = self._routes[source : source + num_tokens]

    def routes(self, spans: Sequence[RowSpan]) -> Routes | None:
        """See `Forward.routes`."""
        if self._routes is None or (mixture := self.config.mixture) is None:
            return None
        found: NDArray[np.int32] = self._torch.cat([self._routes[one.begin : one.end] for one in spans]).cpu().numpy()
        return found.astype(np.uint8) if mixture.num_experts <= 2**8 else found.astype(np.uint16)

    def prepare(self, config: LlamaConfig, weights: LlamaWeights) -> TorchWeights:
        """See `Forward.prepare`."""
        check_same_shape(self.config, config)
        try:
            return self._placed(replace(config, max_context=self.config.max_context), weights)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StartupError(f"a second set of weights does not fit on {self._device}: {reason}") from error

    def swap(self, prepared: PreparedWeights) -> TorchWeights:
        """See `Forward.swap`."""
        assert isinstance(prepared, TorchWeights), "prepared by this forward"
        before, self._model = self._model, prepared
        return before

    # -- for each set of weights

    def _placed(self, config: LlamaConfig, weights: LlamaWeights) -> TorchWeights:
        """The weights and the angles on the device."""
        embed = self._weight(weights.embed)
        angles = np.arange(config.max_context, dtype=np.float64)[:, None] * weights.inv_freq
        return TorchWeights(
            config=config,
            embed=embed,
            head=embed if weights.head is weights.embed else self._weight(weights.head),
            final_norm=self._weight(weights.final_norm),
            layers=tuple(self._layer(layer) for layer in weights.layers),
            cos=self._on_device(np.cos(angles).astype(np.float32)[:, None, :]),
            sin=self._on_device(np.sin(angles).astype(np.float32)[:, None, :]),
            memory=weights.memory if self._computes_in(weights) else None,
        )

    def _computes_in(self, weights: LlamaWeights) -> bool:
        """Whether the tensors are the arrays themselves, and no copies."""
        return bool(self._weight(weights.final_norm).data_ptr() == weights.final_norm.ctypes.data)

    def _layer(self, layer: LayerWeights) -> _Layer:
        return _Layer(
            attn_norm=self._weight(layer.attn_norm),
            qkv=self._weight(layer.qkv),
            out=self._weight(layer.out),
            ffn_norm=self._weight(layer.ffn_norm),
            gate_up=self._weight(layer.gate_up),
            down=self._weight(layer.down),
            router=None if layer.router is None else self._weight(layer.router),
            q_norm=None if layer.q_norm is None else self._weight(layer.q_norm),
            k_norm=None if layer.k_norm is None else self._weight(layer.k_norm),
        )

    def _weight(self, array: F32Array) -> Tensor:
        return self._on_device(array).to(self._dtype)

    def _on_device(self, array: NDArray[Any]) -> Tensor:
        """The array on the device; on the CPU its own memory, but for a read-only one."""
        owned = array if array.flags.writeable else array.copy()
        return self._torch.from_numpy(owned).to(self._device)

    # -- for each batch

    def _check(self, ids: NDArray[np.int64], segments: Sequence[Segment]) -> None:
        if not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            raise ValueError(f"ids must be from 0 to {self.config.vocab_size - 1}")
        if max(segment.start + len(segment.ids) for segment in segments) > self.config.max_context:
            raise ValueError(f"a sequence has more positions than {self.config.max_context}")
        spans = [span for segment in segments for span in segment.spans]
        if not all(0 <= span.begin < span.end <= self.num_kv_tokens for span in spans):
            raise ValueError(f"a span is not among {self.num_kv_tokens} rows")

    def _batch(self, segments: Sequence[Segment]) -> _Batch:
        num_tokens = [len(segment.ids) for segment in segments]
        firsts = np.cumsum([0, *num_tokens[:-1]])
        positions = np.concatenate([np.arange(len(s.ids)) + s.start for s in segments])
        where = self._on_device(positions)
        placed = list(zip(firsts.tolist(), segments, strict=True))
        groups = self._grouped([(first, segment) for first, segment in placed if len(segment.ids) == 1])
        return _Batch(
            cos=self._model.cos[where],
            sin=self._model.sin[where],
            rows=self._on_device(np.concatenate([_rows(s.spans)[s.start :] for s in segments])),
            decodes=tuple(map(self._decodes, groups)),
            chunks=tuple(self._chunk(first, segment) for first, segment in placed if len(segment.ids) > 1),
        )

    def _grouped(self, decodes: list[tuple[int, Segment]]) -> Iterable[list[tuple[int, Segment]]]:
        """Sequences with their attention done together: lengths within a factor of two, so less than half is
        padding."""
        if not self._pads_decodes:
            return [[decode] for decode in decodes]
        groups: dict[int, list[tuple[int, Segment]]] = {}
        for first, segment in decodes:
            groups.setdefault((segment.start + 1).bit_length(), []).append((first, segment))
        return groups.values()

    def _decodes(self, group: list[tuple[int, Segment]]) -> _Decodes:
        tokens = self._on_device(np.array([first for first, _ in group], np.int64))
        if len(group) == 1:
            return _Decodes(tokens=tokens, rows=self._positions(group[0][1].spans), mask=None)
        lengths = np.array([segment.start + 1 for _, segment in group], np.int64)
        longest = int(lengths.max())
        rows = np.empty((len(group), longest), np.int64)
        for row, (_, segment) in zip(rows, group, strict=True):
            row[: segment.start + 1] = _rows(segment.spans)
            row[segment.start + 1 :] = segment.spans[0].begin  # a row of its own: what others left could be NaN
        return _Decodes(tokens=tokens, rows=self._on_device(rows), mask=self._padding_mask(lengths, longest))

    def _padding_mask(self, lengths: NDArray[np.int64], longest: int) -> Tensor | None:
        if lengths.min() == longest:
            return None
        padding = self._torch.arange(longest, device=self._device) >= self._on_device(lengths)[:, None]
        mask = self._torch.zeros(padding.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(padding, float("-inf"))[:, None, None]

    def _chunk(self, first: int, segment: Segment) -> _Chunk:
        num_new = len(segment.ids)
        tokens, rows = slice(first, first + num_new), self._positions(segment.spans)
        if not segment.start:
            return _Chunk(tokens=tokens, rows=rows, mask=None)
        shape = (num_new, segment.start + num_new)
        future = self._torch.full(shape, float("-inf"), dtype=self._dtype, device=self._device)
        return _Chunk(tokens=tokens, rows=rows, mask=future.triu(segment.start + 1))

    def _positions(self, spans: tuple[RowSpan, ...]) -> RowSpan | Tensor:
        return spans[0] if len(spans) == 1 else self._on_device(_rows(spans)[None])

    # -- for each layer

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._functional.rms_norm(hidden, weight.shape, weight, self.config.rms_eps)

    def _attention(self, layer: _Layer, kv: Tensor, hidden: Tensor, batch: _Batch) -> Tensor:
        config, attend = self.config, self._functional.scaled_dot_product_attention
        num_q, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        group = num_q // num_kv
        qkv = self._functional.linear(hidden, layer.qkv).view(len(hidden), num_q + 2 * num_kv, dim)
        heads = qkv[:, : num_q + num_kv]
        if layer.q_norm is not None:
            normed = (self._norm(qkv[:, :num_q], layer.q_norm), self._norm(heads[:, num_q:], layer.k_norm))
            heads = self._torch.cat(normed, dim=1)
        rotated = self._rotated(heads, batch)
        keys, values = kv
        keys.index_copy_(0, batch.rows, rotated[:, num_q:])
        values.index_copy_(0, batch.rows, qkv[:, num_q + num_kv :])
        queries = rotated[:, :num_q].unflatten(1, (num_kv, group))  # [T, K, G, D]
        mixed = self._torch.empty_like(queries)
        for decodes in batch.decodes:  # the heads of a group are each other's rows: they read the same keys
            old_keys, old_values = (_read(half, decodes.rows).transpose(1, 2) for half in (keys, values))
            asked = queries[decodes.tokens]
            mixed[decodes.tokens] = attend(asked, old_keys, old_values, attn_mask=decodes.mask)
        for chunk in batch.chunks:
            old_keys, old_values = (  # [K, G, S, D] without a copy: each KV head stands for its group
                _read(half, chunk.rows)[0].transpose(0, 1)[:, None].expand(-1, group, -1, -1) for half in (keys, values)
            )
            asked = queries[chunk.tokens].permute(1, 2, 0, 3)
            seen = attend(asked, old_keys, old_values, attn_mask=chunk.mask, is_causal=chunk.mask is None)
            mixed[chunk.tokens] = seen.permute(2, 0, 1, 3)
        return self._functional.linear(mixed.view(len(hidden), num_q * dim), layer.out)

    def _rotated(self, heads: Tensor, batch: _Batch) -> Tensor:
        """Rope, rotate-half, in float32. `heads` [T, heads, D]."""
        first, second = heads.chunk(2, dim=2)
        halves = (first * batch.cos - second * batch.sin, second * batch.cos + first * batch.sin)
        return self._torch.cat(halves, dim=2).to(self._dtype)

    def _route(self, router: Tensor, hidden: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts [T, top_k] of tokens, the likeliest first or those `given`, and their weights, computed in
        float32."""
        mixture = self.config.mixture
        assert mixture is not None, "a layer has a router where there are experts"
        scores = self._functional.linear(hidden, router).float().softmax(dim=1)
        chosen = scores.topk(mixture.top_k, dim=1).indices
        if given is not None:
            chosen = self._torch.where(given[:, :1] < 0, chosen, given)
        weights = scores.gather(1, chosen)
        if mixture.normalizes:
            weights = weights / weights.sum(dim=1, keepdim=True)
        return chosen, weights.to(self._dtype)

    def _add_experts(self, layer: _Layer, hidden: Tensor, chosen: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add to `out` what the experts make of their tokens, one expert after the other."""
        for expert in chosen.unique().tolist():
            tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
            made = self._mlp(layer.gate_up[expert], layer.down[expert], hidden[tokens])
            out.index_add_(0, tokens, made * weights[tokens, ranks, None])

    def _mlp(self, gate_up_weight: Tensor, down: Tensor, hidden: Tensor) -> Tensor:
        gate, up = self._functional.linear(hidden, gate_up_weight).chunk(2, dim=1)
        return self._functional.linear(self._functional.silu(gate) * up, down)


def import_torch() -> Any:
    """The module `torch`. Raises StartupError, one line, if it cannot be imported."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise StartupError("--forward is torch, but torch is not installed: pip install torch") from error
    except (ImportError, OSError) as error:  # a library that it needs is missing
        raise StartupError(f"--forward is torch, but it cannot be imported: {' '.join(str(error).split())}") from error


def _device(torch: Any, name: str) -> Any:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (num_gpus := torch.cuda.device_count()):
        raise StartupError(f"--torch-device is {name}, but torch {torch.__version__} sees {num_gpus} GPUs")
    return device


def _read(half: Tensor, rows: RowSpan | Tensor) -> Tensor:
    """Keys or values [B, L, K, D] of rows [B, L]; those of a span [1, L, K, D] are not copied."""
    return half[None, rows.begin : rows.end] if isinstance(rows, RowSpan) else half[rows]


def _rows(spans: Iterable[RowSpan]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(span.begin, span.end, dtype=np.int64) for span in spans])
