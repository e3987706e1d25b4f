"""The smallest Llama that is real: random weights, written as a safetensors folder or as a GGUF file.

Large enough for grouped-query attention and several layers, small enough to be checked against a forward that is
written out in loops.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from standins.tiny.tokenizer import tiny_tokenizer_json

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 320, 32, 3, 4, 2, 8, 48, 256
ROPE_THETA, RMS_EPS = 10_000.0, 1e-5

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Tensors = dict[str, NDArray[np.float32]]


def tiny_tensors(seed: int = 0) -> Tensors:
    """Weights under Hugging Face's names, [out, in], tied embeddings; the same for the same seed."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return np.asarray(random.standard_normal(shape) / np.sqrt(shape[-1]), np.float32)

    tensors = {
        "model.embed_tokens.weight": (4 * matrix(VOCAB, HIDDEN)).astype(np.float32),
        "model.norm.weight": (1 + 0.1 * matrix(HIDDEN)).astype(np.float32),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        tensors |= {
            layer + "input_layernorm.weight": (1 + 0.1 * matrix(HIDDEN)).astype(np.float32),
            layer + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            layer + "post_attention_layernorm.weight": (1 + 0.1 * matrix(HIDDEN)).astype(np.float32),
            layer + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return tensors


def write_tiny_folder(folder: Path, seed: int = 0) -> Path:
    """A folder as Hugging Face lays it out: config, tokenizer, chat template, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": FFN, "vocab_size": VOCAB, "rope_theta": ROPE_THETA,
        "rms_norm_eps": RMS_EPS, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(VOCAB))
    tokens = {"chat_template": TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "model.safetensors").write_bytes(save(tiny_tensors(seed)))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_tiny_gguf(
    path: Path,
    seed: int = 0,
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    context: int = CONTEXT,
    rope_factors: NDArray[np.float32] | None = None,
) -> Path:
    """The same model as one GGUF file; q and k permuted, as converters do.

    Matrices whose rows are whole blocks of the type `matrices` have it, all else is F32. `context` is how many tokens
    it says that it takes, `rope_factors` [head dimension / 2] what its rope frequencies are divided by.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    add_tokenizer(writer)
    for name, tensor in tiny_tensors(seed).items():
        data = (
            _permuted(tensor, HEADS if "q_proj" in name else KV_HEADS)
            if ".q_proj" in name or ".k_proj" in name
            else tensor
        )
        is_whole = data.ndim == 2 and not data.shape[1] % gguf.GGML_QUANT_SIZES[matrices][0]
        kind = matrices if is_whole else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The tiny tokenizer and its chat template, as metadata of a file."""
    model = json.loads(tiny_tokenizer_json(VOCAB))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _permuted(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head with its two halves interleaved."""
    out, hidden = rows.shape
    halves = rows.reshape(num_heads, 2, out // num_heads // 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(out, hidden))
