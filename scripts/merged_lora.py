"""Log-probabilities of given tokens by torch, with a LoRA merged into the weights: `python merged_lora.py MODEL LORA`.

Reads a line of JSON, `[[ids, start], …]`, and answers with one: ln p of `ids[start:]` of each. Needs transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def _merged(model: Path, lora: Path) -> Any:
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    told = json.loads((lora / "adapter_config.json").read_text())
    tensors = load_file(lora / "adapter_model.safetensors")
    scale, prefix = told["lora_alpha"] / told["r"], "base_model.model."
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                stem = name.removesuffix(".lora_A.weight")
                parameters[f"{stem.removeprefix(prefix)}.weight"] += scale * tensors[f"{stem}.lora_B.weight"] @ a
    return made.eval()


def main() -> None:
    """Answer the line on the standard input."""
    made, told = _merged(Path(sys.argv[1]), Path(sys.argv[2])), list[list[float]]()
    for ids, start in json.loads(sys.stdin.readline()):
        with torch.no_grad():
            rows = torch.log_softmax(made(torch.tensor([ids])).logits[0].double(), -1)
        told.append([rows[at - 1, ids[at]].item() for at in range(start, len(ids))])
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
