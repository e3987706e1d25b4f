"""Tokens scored by the embedded engine, each held to torch over the same weights.

    scripts/rl held [--tokens 1000000] [--model smollm2-135m] [--out FOLDER]

The tokens are lines of a thousand of this repository's own text. Each line's result is appended to FOLDER/exact.jsonl;
started again, it goes on after them. Exits with 1 if one is further than 1e-4 nats off.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from policy import written_folder

from scripts.torch_logprobs import exact_angles
from stenograph.core.types import RequestId
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.scoring import ScoreRequest
from stenograph.model.fetch import resolve_model
from stenograph.model.files import load_model_files
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir
from stenograph.model.tokenizer import Tokenizer

LINE_TOKENS = 1000
TOLERANCE_NATS = 1e-4
ROOT = Path(__file__).parents[2]
TEXTS = ("docs/*.md", "src/**/*.py", "tests/**/*.py", "scripts/**/*.py", "benchmarks/**/*.py", "standins/**/*.py")


def lines_of(tokenizer: Tokenizer, num_lines: int, done: int) -> "list[array[int]]":
    """The lines from number `done` on, each of other text. Raises SystemExit for more than there are."""
    ids = array("i")
    for file in (file for pattern in TEXTS for file in sorted(ROOT.glob(pattern))):
        if len(ids) >= num_lines * LINE_TOKENS:
            break
        ids.extend(tokenizer.encode(file.read_text(encoding="utf-8")))
    if len(ids) < num_lines * LINE_TOKENS:
        raise SystemExit(f"the repository has {len(ids)} tokens of text: ask for fewer with --tokens")
    return [ids[number * LINE_TOKENS :][:LINE_TOKENS] for number in range(done, num_lines)]


def by_torch(model: Any, line: "array[int]") -> torch.Tensor:
    """ln p of each token but the first [T - 1], in nats."""
    ids = torch.tensor(line, dtype=torch.long)[None]
    with torch.no_grad():
        nats = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return nats.gather(-1, ids[0, 1:, None])[:, 0].double()


async def held(model: Any, folder: Path, lines: "Sequence[array[int]]", done: int, file: Path) -> None:
    """Score and compare line by line."""
    engine = EmbeddedEngine(folder, EmbeddedOptions(threads=1, max_batch=1, kv_tokens=2 * LINE_TOKENS))
    await engine.start()
    try:
        for number, line in enumerate(lines, start=done):
            began = time.process_time()
            request = ScoreRequest(request_id=RequestId(f"line-{number}"), ids=line, start=1)
            scores = await engine.score(request)
            expected = await asyncio.to_thread(by_torch, model, line)
            apart = (torch.tensor(scores.logprobs, dtype=torch.float64) - expected).abs()
            told = {"line": number, "tokens": len(apart), "max": float(apart.max()), "sum": float(apart.sum())}
            told["torch_cpu_s"] = time.process_time() - began
            with file.open("a") as out:
                out.write(json.dumps(told) + "\n")
            print(f"line {number}: at most {told['max']:.1e} nats apart", flush=True)
    finally:
        await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/rl held", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="scored tokens, at least. Default: 1000000.")
    parser.add_argument("--out", type=Path, default=Path("out/held"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    cache = Path(os.environ.get("STENOGRAPH_CACHE") or default_cache_dir(os.environ))
    source = resolve_model(options.model, cache_dir=cache, progress=StreamProgress(sys.stderr))
    folder, file = options.out / "model", options.out / "exact.jsonl"
    model = written_folder(source, folder)
    exact_angles(model)  # else torch is up to 1e-4 nats off in lines of a thousand, by angles in float32
    done = len(file.read_text().splitlines()) if file.exists() else 0
    num_lines = -(-options.tokens // (LINE_TOKENS - 1))
    tokenizer = Tokenizer(load_model_files(folder).tokenizer_json)
    asyncio.run(held(model.eval(), folder, lines_of(tokenizer, num_lines, done), done, file))
    told = [json.loads(one) for one in file.read_text().splitlines()]
    num, worst = sum(one["tokens"] for one in told), max(one["max"] for one in told)
    print(f"{num} tokens: at most {worst:.1e} nats from torch, on average {sum(one['sum'] for one in told) / num:.1e}")
    if worst > TOLERANCE_NATS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
