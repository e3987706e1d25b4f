"""Writes a model of a GGUF file as a folder for torch: float32 safetensors, tokenizer and chat template.

The layout is Hugging Face's, read by `transformers`, vLLM and trainers. The folder gets its name once it is whole, and
its weights have been read back and compared.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no argument

from stenograph.core.errors import StartupError
from stenograph.embedded.forward.safetensors_folder import SafetensorsFolder
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights, load_weights, rope_frequencies
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.progress import Progress

_STEPS = 4


def write_folder(gguf: Path, folder: Path, *, progress: Progress) -> None:
    """Write the model of a GGUF file into a new folder. Raises StartupError; then there is no folder."""
    what = f"writing {folder}"
    if not gguf.is_file():
        raise StartupError(f"--folder: the model {str(gguf)!r} is a folder already: use it as it is, or copy it")
    if folder.exists():
        raise StartupError(f"--folder: {str(folder)!r} is there already: name another folder, or remove it")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        progress(what, 0, _STEPS)
        files = load_model_files(gguf)
        config, weights = load_weights(gguf)
        if not np.array_equal(weights.inv_freq, rope_frequencies(config)):
            raise StartupError(
                f"--folder: {str(gguf)!r} has rope factors of its own (rope_freqs.weight), as Llama 3.1 and later do,"
                " and no config.json written here could say them: download the model's own folder instead"
            )
        tensors = _tensors(config, weights)
        progress(what, 1, _STEPS)
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        progress(what, 2, _STEPS)
        _write(part / "tokenizer.json", files.tokenizer_json)
        _write(part / "tokenizer_config.json", json.dumps(_tokenizer_config(files)))
        _write(part / "config.json", json.dumps(_config(config, files)))
        _check(part / "model.safetensors", tensors)
        progress(what, 3, _STEPS)
        part.rename(folder)
        progress(what, _STEPS, _STEPS)
    except OSError as error:
        raise StartupError(f"--folder: cannot write {str(folder)!r}: {error.strerror or error}") from error
    except SafetensorError as error:  # so it says that the disk is full
        raise StartupError(f"--folder: cannot write {str(folder)!r}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as written:
        written.write(text)
        written.flush()
        os.fsync(written.fileno())


def _check(file: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    """Read the tensors back. Raises OSError for one that differs."""
    file.chmod(0o644)  # safetensors makes it its owner's alone
    with file.open("rb+") as written:
        os.fsync(written.fileno())
    read = SafetensorsFolder(file.parent)
    if read.names != frozenset(tensors):
        raise OSError(f"{file.name} has other tensors than were written")
    for name, tensor in tensors.items():
        found = np.empty(read.shape(name), np.float32)
        read.read(name, found)
        if not np.array_equal(found, tensor):
            raise OSError(f"{file.name}: tensor {name} is not what was written")


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
