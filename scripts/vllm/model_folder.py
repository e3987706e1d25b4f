"""Write the embedded engine's SmolLM2 as a folder that vLLM loads: float32 safetensors, tokenizer, chat template.

Usage: model_folder.py FOLDER. The weights are fetched as `stenograph serve` does it; a folder that is whole is kept.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights, load_weights
from stenograph.model.fetch import resolve_model
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir


def write_folder(folder: Path, gguf: Path) -> None:
    """The GGUF file `gguf` as Hugging Face lays a model out; config.json comes last, so that it tells of the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    files = load_model_files(gguf)
    config, weights = load_weights(gguf)
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(files)))
    save_file(_tensors(config, weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(config, files)))


def _tokenizer_config(files: ModelFiles) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": files.chat_template,
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "model_max_length": files.max_context_tokens,
        "clean_up_tokenization_spaces": False,
    }


def _config(config: LlamaConfig, files: ModelFiles) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": list(files.eos_token_ids),
        "torch_dtype": "float32",
    }


def _tensors(config: LlamaConfig, weights: LlamaWeights) -> dict[str, NDArray[np.float32]]:
    """Under Hugging Face's names; the forward's joined matrices are cut again."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        name = f"model.layers.{index}."
        tensors |= {
            name + "input_layernorm.weight": layer.attn_norm,
            name + "self_attn.q_proj.weight": layer.qkv[:q_rows],
            name + "self_attn.k_proj.weight": layer.qkv[q_rows : q_rows + kv_rows],
            name + "self_attn.v_proj.weight": layer.qkv[q_rows + kv_rows :],
            name + "self_attn.o_proj.weight": layer.out,
            name + "post_attention_layernorm.weight": layer.ffn_norm,
            name + "mlp.gate_proj.weight": layer.gate_up[: config.ffn],
            name + "mlp.up_proj.weight": layer.gate_up[config.ffn :],
            name + "mlp.down_proj.weight": layer.down,
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def main() -> None:
    """The command line."""
    folder = Path(sys.argv[1])
    if (folder / "config.json").exists():
        return
    cache = Path(os.environ.get("STENOGRAPH_CACHE") or default_cache_dir(os.environ))
    write_folder(folder, resolve_model("smollm2-135m", cache_dir=cache, progress=StreamProgress(sys.stderr)))


if __name__ == "__main__":
    main()
