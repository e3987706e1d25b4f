"""Ten thousand tokens scored by a real engine, held to a pass of the NumPy forward over the same weights."""

import asyncio
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from standins.teacher_forcing import line_logprobs
from stenograph.core.types import RequestId, token_ids
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.scoring import ScoreRequest, Scores
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

LINE_TOKENS, NUM_LINES, START, NUM_TOP = 900, 12, 20, 2
TOLERANCE_NATS = 1e-3
"""Of float32 on a CPU, where the same tokens are computed in batches of other shapes."""
PAGES = Path(__file__).parent.parent / "docs"


def check_scores(url: str, model: Path, adapter: Callable[[AdapterOptions], EngineAdapter]) -> None:
    """Score lines of text at the engine, four at once, and compare each token. Says how far apart they are."""
    files = load_model_files(model)
    options = AdapterOptions(model=files.name, vocab_size=files.vocab_size, tokenizer_json=files.tokenizer_json)
    text = "".join(
        (PAGES / name).read_text(encoding="utf-8") for name in ("http-api.md", "operations.md", "samples.md")
    )
    ids = Tokenizer(files.tokenizer_json).encode(text)
    lines = [ids[number * LINE_TOKENS :][:LINE_TOKENS] for number in range(NUM_LINES)]
    began = time.monotonic()
    told = asyncio.run(_scored(url, adapter(options), lines))
    took_s = time.monotonic() - began
    config, weights = load_weights(model)
    forward = NumpyForward(config, weights, num_kv_tokens=LINE_TOKENS)
    apart: list[float] = []
    for line, scores in zip(lines, told, strict=True):
        expected = line_logprobs(forward, line, START)
        apart += [abs(one - other) for one, other in zip(scores.logprobs, expected, strict=True)]
        best = scores.top.logprobs[::NUM_TOP]
        assert all(top >= one for top, one in zip(best, scores.logprobs, strict=True))
    sys.stdout.write(
        f"\n{len(apart)} tokens scored in {took_s:.1f} s: at most {max(apart):.1e} nats apart, on average"
        f" {sum(apart) / len(apart):.1e}\n"
    )
    assert len(apart) > 10_000
    assert max(apart) < TOLERANCE_NATS


async def _scored(url: str, adapter: EngineAdapter, lines: "Sequence[array[int]]") -> list[Scores]:
    engine = HttpEngine(HttpEngineOptions(url=url), adapter)
    await engine.start()
    places = asyncio.Semaphore(4)

    async def one(number: int) -> Scores:
        async with places:
            request = ScoreRequest(
                request_id=RequestId(f"s{number}"), ids=token_ids(lines[number]), start=START, num_top=NUM_TOP
            )
            return await engine.score(request)

    try:
        return list(await asyncio.gather(*map(one, range(len(lines)))))
    finally:
        await engine.aclose()
