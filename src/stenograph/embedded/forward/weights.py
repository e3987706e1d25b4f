"""A model's weights in the layout that the forward reads, and the two file formats they come from.

Owns names, shapes and row orders of two architectures: Llama (GGUF `llama`, Hugging Face `LlamaForCausalLM`), and
Llama's blocks with a mixture of experts and norms of heads (`qwen3moe`, `Qwen3MoeForCausalLM`). Everything becomes
float32; matrices are [out, in], C-contiguous; q, k, v are one matrix, so are gate and up. q and k rows are in
Hugging Face's order (rotate-half rope): those of GGUF's `llama`, permuted for interleaved rope, are put back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import StartupError
from stenograph.embedded.forward.gguf_tensors import GgufTensors
from stenograph.embedded.forward.safetensors_folder import SafetensorsFolder
from stenograph.embedded.forward.weight_memory import WeightMemory

F32Array = NDArray[np.float32]

_CHECKED_ITEMS = 2**20
"""Numbers checked at once: the result takes a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3's stretching of low rope frequencies. Source: Hugging Face's `rope_type: llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a layer, `num_experts` MLPs: a router sends each token to `top_k`. `normalizes`: their weights sum
    to 1; else they are as given by the router's softmax over all experts."""

    num_experts: int
    top_k: int
    normalizes: bool

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts < 2**16:
            raise ValueError(f"a token cannot go to {self.top_k} of {self.num_experts} experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes of a model. `ffn` is the width of the MLP, or of one expert where there is a `mixture`."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    rms_eps: float
    tied_embeddings: bool
    max_context: int
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, self.ffn)
        if min(*sizes, self.vocab_size, self.max_context) < 1:
            raise ValueError("every size must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"the head dimension must be even, got {self.head_dim}")
        if not (self.rms_eps > 0 and self.rope_theta > 0):
            raise ValueError("rms_eps and rope_theta must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. `qkv` [(H + 2 K) D, hidden], `out` [hidden, H D], `gate_up` [2 ffn, hidden], `down` [hidden, ffn].

    With a mixture of experts `gate_up` and `down` have a first dimension, the expert, and there are `router` [experts,
    hidden] and the norms of each head, `q_norm` and `k_norm` [D].
    """

    attn_norm: F32Array
    qkv: F32Array
    out: F32Array
    ffn_norm: F32Array
    gate_up: F32Array
    down: F32Array
    router: F32Array | None = None
    q_norm: F32Array | None = None
    k_norm: F32Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights, and their memory. `embed` and `head` [vocab, hidden] (one array where tied); `inv_freq` [D / 2],
    radians a token."""

    embed: F32Array
    layers: tuple[LayerWeights, ...]
    final_norm: F32Array
    head: F32Array
    inv_freq: NDArray[np.float64]
    memory: WeightMemory


class _Source(Protocol):
    @property
    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, out: F32Array) -> None: ...


_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
_GGUF_MIXTURE_NAMES = _GGUF_NAMES | {
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "router": "blk.{}.ffn_gate_inp.weight",
    "gate": "blk.{}.ffn_gate_exps.weight",
    "up": "blk.{}.ffn_up_exps.weight",
    "down": "blk.{}.ffn_down_exps.weight",
}
_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
_HF_MIXTURE_NAMES = _HF_NAMES | {
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "router": "model.layers.{}.mlp.gate.weight",
    "gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}


def load_weights(path: Path, memory: WeightMemory | None = None) -> tuple[LlamaConfig, LlamaWeights]:
    """Read a GGUF file or a folder with config.json and safetensors. `memory` is cleared, and used where it is given.

    Raises StartupError, one line with the file's name: no such file, cut short, another architecture, a tensor that
    is missing, has another shape or a type we cannot read, NaN or infinite weights, or a bias; or too little memory.
    """
    memory = WeightMemory() if memory is None else memory
    memory.clear()
    try:
        if path.is_dir():
            return _load_folder(path, memory)
        return _load_gguf(path, memory)
    except ValueError as error:
        raise StartupError(f"{path}: {error}") from error
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error}") from error
    except MemoryError as error:
        raise StartupError(f"{path}: there is not enough memory for its weights: {error}") from error


# -- GGUF


def _load_gguf(path: Path, memory: WeightMemory) -> tuple[LlamaConfig, LlamaWeights]:
    source = GgufTensors(path)
    architecture = source.field("general.architecture")
    if architecture not in ("llama", "qwen3moe"):
        raise ValueError(f"its architecture is {str(architecture)[:40]!r}; supported are llama and qwen3moe")
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in source.fields.items() if name.startswith(prefix)}
    scaling = fields.get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise ValueError(f"its rope scaling is {str(scaling)[:40]!r}, which is not supported")
    is_mixture = architecture == "qwen3moe"
    if not is_mixture and fields.get("expert_count") not in (None, 0):
        raise ValueError("it is a mixture of experts of llama's architecture; supported is qwen3moe")
    embed = source.shape("token_embd.weight")
    hidden, heads = _int(fields, "embedding_length"), _int(fields, "attention.head_count")
    rope_dim = fields.get("rope.dimension_count")
    head_dim = fields.get("attention.key_length") or hidden // max(1, heads)
    if rope_dim not in (None, head_dim):
        raise ValueError(f"rope covers {rope_dim} of {head_dim} dimensions; only full rope is supported")
    mixture = None
    if is_mixture:  # llama.cpp normalizes for this architecture, whatever its config.json said
        num, top_k = _int(fields, "expert_count"), _int(fields, "expert_used_count")
        mixture = Mixture(num_experts=num, top_k=top_k, normalizes=True)
    config = LlamaConfig(
        num_layers=_int(fields, "block_count"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_int(fields, "attention.head_count_kv") if "attention.head_count_kv" in fields else heads,
        head_dim=_int({"head_dim": head_dim}, "head_dim"),
        ffn=_int(fields, "expert_feed_forward_length" if is_mixture else "feed_forward_length"),
        vocab_size=embed[0],
        rope_theta=_float(fields, "rope.freq_base", 10_000.0),
        rms_eps=_float(fields, "attention.layer_norm_rms_epsilon", None),
        tied_embeddings="output.weight" not in source.names,
        max_context=_int(fields, "context_length"),
        mixture=mixture,
    )
    inv_freq = rope_frequencies(config)
    if "rope_freqs.weight" in source.names:
        _check(source, "rope_freqs.weight", (config.head_dim // 2,))
        inv_freq = inv_freq / _read(source, "rope_freqs.weight", np.empty(config.head_dim // 2, np.float32))
    names = _GGUF_MIXTURE_NAMES if is_mixture else _GGUF_NAMES
    return config, _assemble(config, source, names, inv_freq, memory, permuted=not is_mixture)


# -- Hugging Face


def _load_folder(folder: Path, memory: WeightMemory) -> tuple[LlamaConfig, LlamaWeights]:
    try:
        raw = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    except FileNotFoundError as error:
        raise StartupError(f"{folder / 'config.json'}: there is no such file") from error
    except msgspec.DecodeError as error:
        raise StartupError(f"{folder / 'config.json'}: is not a JSON object: {error}") from error
    architectures = raw.get("architectures")
    is_mixture = architectures == ["Qwen3MoeForCausalLM"]
    if architectures != ["LlamaForCausalLM"] and not is_mixture:
        raise ValueError(
            f"its architectures are {str(architectures)[:60]}; supported are LlamaForCausalLM and Qwen3MoeForCausalLM"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"its hidden_act is {str(raw['hidden_act'])[:40]!r}; only silu is supported")
    hidden, heads = _int(raw, "hidden_size"), _int(raw, "num_attention_heads")
    rope = _rope_section(raw)
    config = LlamaConfig(
        num_layers=_int(raw, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads if raw.get("num_key_value_heads") is None else _int(raw, "num_key_value_heads"),
        head_dim=hidden // max(1, heads) if raw.get("head_dim") is None else _int(raw, "head_dim"),
        ffn=_int(raw, "moe_intermediate_size" if is_mixture else "intermediate_size"),
        vocab_size=_int(raw, "vocab_size"),
        rope_theta=_float({**raw, **rope}, "rope_theta", 10_000.0),
        rope_scaling=_rope_scaling(rope),
        rms_eps=_float(raw, "rms_norm_eps", 1e-6),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_context=_int(raw, "max_position_embeddings"),
        mixture=_folder_mixture(raw) if is_mixture else None,
    )
    names, source = _HF_MIXTURE_NAMES if is_mixture else _HF_NAMES, SafetensorsFolder(folder)
    return config, _assemble(config, source, names, rope_frequencies(config), memory, permuted=False)


def _folder_mixture(raw: Mapping[str, object]) -> Mixture:
    """The mixture of a Qwen3-MoE config, each of whose layers has one. Source: transformers' `Qwen3MoeConfig`."""
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ValueError("some of its layers have no experts, which is not supported")
    if raw.get("use_sliding_window"):
        raise ValueError("it has a sliding window, which is not supported")
    num, top_k = _int(raw, "num_experts"), _int(raw, "num_experts_per_tok")
    return Mixture(num_experts=num, top_k=top_k, normalizes=bool(raw.get("norm_topk_prob", False)))


def _rope_section(raw: Mapping[str, object]) -> dict[str, object]:
    """`rope_scaling`, or what newer configs call `rope_parameters`."""
    section: object = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(section, dict):
        raise ValueError("rope_scaling must be an object")
    return cast("dict[str, object]", section)


def _rope_scaling(section: Mapping[str, object]) -> Llama3Rope | None:
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"its rope scaling is {str(kind)[:40]!r}; supported are default and llama3")
    return Llama3Rope(
        factor=_float(section, "factor", None),
        low_freq_factor=_float(section, "low_freq_factor", None),
        high_freq_factor=_float(section, "high_freq_factor", None),
        original_max_context=_int(section, "original_max_position_embeddings"),
    )


# -- both


def rope_frequencies(config: LlamaConfig) -> NDArray[np.float64]:
    """Rope frequencies [D / 2], float64, as a config says them: with llama3's stretching applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = np.asarray(config.rope_theta**-exponents, dtype=np.float64)
    if (scaling := config.rope_scaling) is None:
        return inv_freq
    wavelengths = 2 * math.pi / inv_freq
    turns = scaling.original_max_context / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray((1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq, dtype=np.float64)


def _assemble(
    config: LlamaConfig,
    source: _Source,
    names: Mapping[str, str],
    inv_freq: NDArray[np.float64],
    memory: WeightMemory,
    *,
    permuted: bool,
) -> LlamaWeights:
    if biases := sorted(name for name in source.names if name.endswith(".bias")):
        raise ValueError(f"tensor {biases[0]} is a bias, which this architecture does not have")

    def get(role: str, *shape: int) -> F32Array:
        _check(source, names[role], shape)
        return _read(source, names[role], memory.empty(shape))

    embed = get("embed", config.vocab_size, config.hidden)
    head = embed if config.tied_embeddings else get("head", config.vocab_size, config.hidden)
    return LlamaWeights(
        embed=embed,
        layers=tuple(
            _layer(config, source, names, index, memory, permuted=permuted) for index in range(config.num_layers)
        ),
        final_norm=get("norm", config.hidden),
        head=head,
        inv_freq=inv_freq,
        memory=memory,
    )


def _layer(
    config: LlamaConfig, source: _Source, names: Mapping[str, str], index: int, memory: WeightMemory, *, permuted: bool
) -> LayerWeights:
    hidden, ffn, mixture = config.hidden, config.ffn, config.mixture
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def get(role: str, *shape: int) -> F32Array:
        name = names[role].format(index)
        _check(source, name, shape)
        return _read(source, name, memory.empty(shape))

    def stacked(*parts: tuple[str, int]) -> F32Array:
        """Matrices [rows, hidden] one below the other, each read to where it belongs."""
        for role, rows in parts:
            _check(source, names[role].format(index), (rows, hidden))
        whole, start = memory.empty((sum(rows for _, rows in parts), hidden)), 0
        for role, rows in parts:
            _read(source, names[role].format(index), whole[start : start + rows])
            start += rows
        return whole

    def experts(*roles: str, rows: int, columns: int) -> F32Array:
        assert mixture is not None, "asked for where there are experts"
        formats = [names[role].format(index, "{}") for role in roles]
        return _experts(source, formats, (mixture.num_experts, rows, columns), memory)

    qkv = stacked(("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    if permuted:
        q, k = qkv[:q_rows], qkv[q_rows : q_rows + kv_rows]
        q[...], k[...] = _unpermuted(q.copy(), config.num_heads), _unpermuted(k.copy(), config.num_kv_heads)
    return LayerWeights(
        attn_norm=get("attn_norm", hidden),
        qkv=qkv,
        out=get("o", hidden, q_rows),
        ffn_norm=get("ffn_norm", hidden),
        gate_up=stacked(("gate", ffn), ("up", ffn))
        if mixture is None
        else experts("gate", "up", rows=ffn, columns=hidden),
        down=get("down", hidden, ffn) if mixture is None else experts("down", rows=hidden, columns=ffn),
        router=None if mixture is None else get("router", mixture.num_experts, hidden),
        q_norm=None if mixture is None else get("q_norm", config.head_dim),
        k_norm=None if mixture is None else get("k_norm", config.head_dim),
    )


def _experts(source: _Source, formats: Sequence[str], shape: tuple[int, int, int], memory: WeightMemory) -> F32Array:
    """The experts' matrices of each format, [experts, rows, columns], one below the other in each expert.

    A format with a place in it names one expert's tensor; another that of all of them.
    """
    num, rows, columns = shape
    are_apart = "{}" in formats[0]
    names = [[name.format(n) for name in formats] for n in range(num if are_apart else 1)]
    for name in chain.from_iterable(names):
        _check(source, name, (rows, columns) if are_apart else shape)
    whole = memory.empty((num, len(formats) * rows, columns))
    for expert, of_expert in enumerate(names):
        for begin, name in zip(range(0, whole.shape[1], rows), of_expert, strict=True):
            if are_apart:
                _read(source, name, whole[expert, begin : begin + rows])
            else:
                whole[:, begin : begin + rows] = _read(source, name, np.empty(shape, np.float32))
    return whole


def _unpermuted(rows: F32Array, num_heads: int) -> F32Array:
    """Rows of a GGUF q or k matrix in Hugging Face's order: the inverse of llama.cpp's `LlamaModel.permute`."""
    num_rows, width = rows.shape
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(num_rows, width)


def _check(source: _Source, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a tensor that is not there, or has another shape: before there is memory for it."""
    if name not in source.names:
        raise ValueError(f"tensor {name} is missing")
    if (told := source.shape(name)) != shape:
        raise ValueError(f"tensor {name} has shape {told}, expected {shape}")


def _read(source: _Source, name: str, out: F32Array) -> F32Array:
    """Read a tensor to `out`, contiguous and of its shape; returns `out`. Raises ValueError for NaN or infinities."""
    with np.errstate(all="ignore"):  # a scale that is NaN is reported below, by the tensor's name
        source.read(name, out)
    flat = out.reshape(-1)
    starts = range(0, len(flat), _CHECKED_ITEMS)
    num_bad = sum(_num_not_finite(flat[start : start + _CHECKED_ITEMS]) for start in starts)
    if num_bad:
        raise ValueError(
            f"tensor {name} has {num_bad} NaN or infinite values of {len(flat)}: the model cannot sample with"
            " them; load an older checkpoint, and check the training step that wrote this one"
        )
    return out


def _num_not_finite(values: F32Array) -> int:
    finite = np.isfinite(values)
    return 0 if finite.all() else len(values) - int(np.count_nonzero(finite))


def _int(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{key} must be a positive integer, got {str(value)[:40]!r}")
    return value


def _float(values: Mapping[str, object], key: str, default: float | None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a number, got {str(value)[:40]!r}")
    return float(value)
