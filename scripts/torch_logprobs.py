"""Log-probabilities of given tokens by torch: `python torch_logprobs.py MODEL [--lora LORA] [--dtype float64]`.

A LoRA is merged into the weights. With float64 the angles of rope are in float64 too: transformers computes them in
float32 for every dtype, 5e-5 radians off at position 900. Reads a line of JSON, `[[ids, start], …]`, and answers with
one: ln p of `ids[start:]` of each. Needs transformers.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def _merge(made: Any, lora: Path) -> None:
    told = json.loads((lora / "adapter_config.json").read_text())
    tensors = load_file(lora / "adapter_model.safetensors")
    scale, prefix = told["lora_alpha"] / told["r"], "base_model.model."
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                stem = name.removesuffix(".lora_A.weight")
                parameters[f"{stem.removeprefix(prefix)}.weight"] += scale * tensors[f"{stem}.lora_B.weight"] @ a


def exact_angles(made: Any) -> None:
    """Have a model of transformers compute the angles of rope in float64."""
    rope, told = made.model.rotary_emb, made.config.rope_parameters
    assert told["rope_type"] == "default", "the angles of others are scaled"
    size = 2 * len(rope.inv_freq)
    inv_freq = told["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    def forward(hidden: Any, position_ids: Any) -> Any:
        angles = position_ids[..., None].double() * inv_freq
        both = torch.cat((angles, angles), -1)
        return both.cos().to(hidden.dtype), both.sin().to(hidden.dtype)

    rope.forward = forward


def main() -> None:
    """Answer the line on the standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    made = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    told = list[list[float]]()
    if options.lora is not None:
        _merge(made, options.lora)
    if options.dtype == "float64":
        exact_angles(made)
    for ids, start in json.loads(sys.stdin.readline()):
        with torch.no_grad():
            rows = torch.log_softmax(made(torch.tensor([ids])).logits[0].double(), -1)
        told.append([rows[at - 1, ids[at]].item() for at in range(start, len(ids))])
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
