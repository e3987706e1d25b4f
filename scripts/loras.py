"""Random LoRAs of a Llama, as PEFT writes them, and sessions by each through a real engine, held to torch.

The engine's own environment has torch and transformers: torch_logprobs.py runs there.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType] - as in hf_folder.py

from scripts.agent_session import PlayedTurn, check_exact, played
from scripts.real_engine import ask, torch_logprobs

RANK, ALPHA = 8, 16
SIZE = 0.05
"""Of the random numbers: the two LoRAs are nats apart from each other and from the model."""
TOLERANCE_NATS = 1e-4
MAX_TOKENS = 40
QUESTIONS = ("What is the capital of France?", "And of Italy?", "Name three rivers.")


def write_lora(model: Path, folder: Path, *, seed: int) -> Path:
    """A random LoRA of the attention and the MLP of each layer."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    shapes = {
        "self_attn.q_proj": (hidden, heads * size),
        "self_attn.k_proj": (hidden, kv_heads * size),
        "self_attn.v_proj": (hidden, kv_heads * size),
        "self_attn.o_proj": (heads * size, hidden),
        "mlp.gate_proj": (hidden, config["intermediate_size"]),
        "mlp.up_proj": (hidden, config["intermediate_size"]),
        "mlp.down_proj": (config["intermediate_size"], hidden),
    }
    draw, tensors = np.random.default_rng(seed), dict[str, Any]()
    for layer in range(config["num_hidden_layers"]):
        for name, (num_in, num_out) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            for half, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
                drawn = draw.standard_normal(shape, dtype=np.float32)
                tensors[f"{at}.lora_{half}.weight"] = drawn * np.float32(SIZE / math.sqrt(RANK))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [name.rpartition(".")[2] for name in shapes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def check_sessions(url: str, python: str, model: Path, loras: Mapping[str, Path]) -> None:
    """A session of three turns by each LoRA, all at once; each token is held to torch."""
    with ThreadPoolExecutor(len(loras)) as pool:
        played_by = dict(zip(loras, pool.map(partial(play_by, url), loras), strict=True))
    for name, turns in played_by.items():
        check_turns(turns, python, model, loras, name)


def check_turns(turns: Sequence[PlayedTurn], python: str, model: Path, loras: Mapping[str, Path], name: str) -> None:
    """Hold each token to torch with the LoRA `name`, and see that it is none of the others. Says how far apart they
    are."""
    check_exact(turns)
    lines = [([*turn.prompt_ids, *turn.ids], len(turn.prompt_ids)) for turn in turns]
    recorded = [logprob for turn in turns for logprob in turn.logprobs]
    apart = {
        other: max(_apart(recorded, torch_logprobs(python, model, lines, lora=folder)))
        for other, folder in loras.items()
    }
    sys.stdout.write(f"\n{len(recorded)} tokens by {name!r}: at most so many nats from torch with each: {apart}\n")
    assert apart.pop(name) < TOLERANCE_NATS
    assert min(apart.values()) > 100 * TOLERANCE_NATS, "by another LoRA they would be others"


def check_reload(url: str, python: str, model: Path, loras: Mapping[str, Path], live: Path) -> None:
    """Load each LoRA from the one folder `live` by the server, under one name: each is sampled after its load, also
    where a turn's prompt was cached before."""
    for number, (name, folder) in enumerate(loras.items(), start=1):
        shutil.copytree(folder, live, dirs_exist_ok=True)
        told = ask(url, "/load_lora_adapter", {"lora_name": "live", "lora_path": str(live)})
        assert (told["success"], told["weight_version"]) == (True, str(number))
        turns = play_by(url, "live", version=str(number))
        assert turns[0].num_cached == 0, "what another LoRA computed"
        check_turns(turns, python, model, loras, name)
    assert ask(url, "/unload_lora_adapter", {"lora_name": "live"})["success"]


def _apart(recorded: Sequence[float], lines: Sequence[Sequence[float]]) -> list[float]:
    told = [logprob for line in lines for logprob in line]
    return [abs(one - other) for one, other in zip(recorded, told, strict=True)]


def play_by(url: str, policy: str, *, version: str | None = None) -> list[PlayedTurn]:
    """A session's turns by a LoRA, all of this version of it."""
    session, messages = ask(url, "/sessions", {"policy": policy}), list[dict[str, Any]]()
    for text in QUESTIONS:
        messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": messages, "temperature": 1, "max_tokens": MAX_TOKENS}
        (choice,) = ask(session["base_url"], "/chat/completions", body)["choices"]
        messages.append(choice["message"])
    records = ask(url, f"/sessions/{session['session_id']}")["records"]
    assert {record["policy"] for record in records} == {policy}
    if version is not None:
        assert {span["version"] for record in records for span in record["weight_versions"]} == {version}
    return [played(record) for record in records]
