"""The smallest mixture of experts that is real: the tiny Llama's blocks with a router, in the layout of Qwen3-MoE.

Random weights, written as a safetensors folder or as a GGUF file, under the names that transformers and llama.cpp use.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from standins.tiny import llama
from standins.tiny.llama import HEAD_DIM, HIDDEN, LAYERS, Tensors, tiny_tensors, write_tiny_folder

EXPERTS, TOP_K, EXPERT_FFN = 8, 2, 24


def mixture_tensors(seed: int = 0) -> Tensors:
    """Weights under Hugging Face's names, the tiny Llama's but for the MLPs; the same for the same seed."""
    random = np.random.default_rng([seed, EXPERTS])

    def matrix(*shape: int) -> NDArray[np.float32]:
        return np.asarray(random.standard_normal(shape) / np.sqrt(shape[-1]), np.float32)

    tensors = {name: tensor for name, tensor in tiny_tensors(seed).items() if ".mlp." not in name}
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        for norm in ("q_norm", "k_norm"):
            tensors[layer + f"self_attn.{norm}.weight"] = (1 + 0.3 * matrix(HEAD_DIM)).astype(np.float32)
        tensors[layer + "mlp.gate.weight"] = 2 * matrix(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            name = layer + f"mlp.experts.{expert}."
            tensors[name + "gate_proj.weight"] = 2 * matrix(EXPERT_FFN, HIDDEN)
            tensors[name + "up_proj.weight"] = 2 * matrix(EXPERT_FFN, HIDDEN)
            tensors[name + "down_proj.weight"] = matrix(HIDDEN, EXPERT_FFN)
    return tensors


def write_mixture_folder(folder: Path, seed: int = 0, *, normalizes: bool = True) -> Path:
    """A folder as Hugging Face lays it out. `normalizes`: the weights of a token's experts sum to 1."""
    write_tiny_folder(folder, seed)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_FFN, "norm_topk_prob": normalizes,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save(mixture_tensors(seed)))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def write_mixture_gguf(path: Path, seed: int = 0) -> Path:
    """The same model as one GGUF file: an expert's matrices are in one tensor for all, no head is permuted."""
    tensors = mixture_tensors(seed)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(llama.CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(llama.FFN)
    writer.add_expert_feed_forward_length(EXPERT_FFN)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_head_count(llama.HEADS)
    writer.add_head_count_kv(llama.KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(llama.ROPE_THETA)
    writer.add_layer_norm_rms_eps(llama.RMS_EPS)
    llama.add_tokenizer(writer)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"])
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        for theirs, ours in _GGUF_NAMES.items():
            writer.add_tensor(f"blk.{index}.{ours}.weight", tensors[f"{layer}{theirs}.weight"])
        for role in ("gate", "up", "down"):
            of_all = [tensors[f"{layer}mlp.experts.{expert}.{role}_proj.weight"] for expert in range(EXPERTS)]
            writer.add_tensor(f"blk.{index}.ffn_{role}_exps.weight", np.stack(of_all))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
