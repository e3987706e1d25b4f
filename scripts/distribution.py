"""Samples hold all it takes to compute the distribution that they were sampled from: sampled many ways, computed again.

`recompute` knows a sample as its reader gets it, in JSON, and a model's forward pass; nothing of the server. The
fields: docs/samples.md. distribution_run.py does it on a real model.
"""

import asyncio
import itertools
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from stenograph.core.support import MAX_OTHERS, split, supports
from stenograph.core.varints import read_varints, varint
from stenograph.embedded.forward.base import Forward, LogitsFor, RowSpan, Segment
from stenograph.embedded.sampler import log_sum_exp

Logits = NDArray[np.float64]

TEMPERATURES = (0.6, 0.8, 1.0, 1.3)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 40}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.2, "logit_bias": {"70": 5, "71": -5}},
    {"min_tokens": 8},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05, "top_p": 0.95},
    {"top_p": 0.8, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"regex": "[a-z ]{60,200}\\."},
    {"json_schema": _SCHEMA},
    {"json_schema": _SCHEMA, "top_p": 0.95, "frequency_penalty": 0.5},
)
"""Parameters of completions, besides the temperature."""


async def mixed_samples(
    url: str, prompts: Sequence[str], *, num_tokens: int, max_tokens: int, concurrency: int = 16, first: int = 0
) -> list[dict[str, Any]]:
    """The samples of sessions of two completions each, until they have `num_tokens` sampled tokens. The sessions are
    numbered from `first`, and each number samples the same."""
    samples: list[dict[str, Any]] = []
    numbers, num_sampled = itertools.count(first), 0
    kinds = list(itertools.product(WAYS, TEMPERATURES))

    async def work(http: aiohttp.ClientSession) -> None:
        nonlocal num_sampled
        while num_sampled < num_tokens:
            number = next(numbers)
            how, temperature = kinds[number % len(kinds)]
            asked = {**_asked(how), "temperature": temperature, "seed": number, "max_tokens": max_tokens}
            (sample,) = await _two_turns(http, prompts[number % len(prompts)], asked)
            samples.append(sample)
            num_sampled += sum(row["end"] - row["start"] for row in sample["turns"])

    # The server has its own limits of time; this process may have been stopped meanwhile.
    endless = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=endless) as http, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work(http))
    return samples


def _asked(how: Mapping[str, Any]) -> dict[str, Any]:
    if "json_schema" in how:
        asked = {key: value for key, value in how.items() if key != "json_schema"}
        schema = {"name": "schema", "schema": how["json_schema"]}
        return {**asked, "response_format": {"type": "json_schema", "json_schema": schema}}
    return dict(how) if "regex" in how else {**how, "ignore_eos": "min_tokens" not in how}


async def _two_turns(http: aiohttp.ClientSession, prompt: str, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of a session in which a completion goes on from the one before it, and a token more."""
    session = f"/sessions/{(await _post(http, '/sessions', {'support': True}))['session_id']}"
    wanted = {"format": "json", "include_side": True}
    await _post(http, f"{session}/v1/completions", {**asked, "prompt": prompt})
    (first,) = (await _post(http, f"{session}/samples", wanted))["samples"]
    line = [*first["tokens"], first["tokens"][0]]
    await _post(http, f"{session}/v1/completions", {**asked, "prompt": line})
    samples: list[dict[str, Any]] = (await _post(http, f"{session}/samples", wanted))["samples"]
    async with http.delete(session) as response:
        assert response.status == 204
    return samples


async def _post(http: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Any:
    async with http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


# -- computing again


@dataclass(slots=True)
class Figures:
    """Absolute log-ratios of recorded and recomputed tokens, in nats, and how many bytes their supports take."""

    apart: list[float] = field(default_factory=list[float])
    ignored: list[float] = field(default_factory=list[float])
    num_bytes: list[int] = field(default_factory=list[int])
    num_ids: list[int] = field(default_factory=list[int])

    def __str__(self) -> str:
        apart, sizes, known = np.array(self.apart), np.array(self.num_bytes), np.array(self.num_ids)
        return (
            f"{len(apart)} sampled tokens: log-ratio mean {apart.mean():.2e}, max {apart.max():.2e} nats;"
            f" with the support ignored mean {np.mean(self.ignored):.3f};"
            f" support bytes a token: median {np.median(sizes):g}, mean {sizes.mean():.1f}, p90"
            f" {np.quantile(sizes, 0.9):g}, max {sizes.max()}; {np.mean(known >= 0):.0%} of tokens have one,"
            f" of {np.median(known[known >= 0]):g} ids and {np.median(sizes[known >= 0]):g} bytes in the median"
        )


def recompute(sample: Mapping[str, Any], model: Forward, figures: Figures) -> None:
    """Compute each sampled token's log-probability under the distribution that it was sampled from, from the sample
    alone, and add how far it is from the recorded one. Overwrites rows of the model's store."""
    tokens: list[int] = sample["tokens"]
    first = len(tokens) - sample["response_length"]
    logits = _all_logits(model, tokens)
    for row in sample["turns"]:
        ids = tokens[row["start"] : row["end"]]
        kept = [None] * len(ids) if "support" not in row else list(supports(b64decode(row["support"]), ids))
        figures.num_bytes += [0] * len(ids) if "support" not in row else token_bytes(b64decode(row["support"]))
        for place, (id_, support) in enumerate(zip(ids, kept, strict=True)):
            at = row["start"] + place
            scores = _penalized(logits[at - 1], row, tokens[: row["start"]], ids[:place]) / row["temperature"]
            recorded = sample["sampling_log_probs"][at - first]
            among = scores if support is None else scores[support]
            figures.apart.append(abs(scores[id_] - log_sum_exp(among) - recorded))
            figures.ignored.append(abs(scores[id_] - log_sum_exp(scores) - recorded))
            figures.num_ids.append(-1 if support is None else len(support))


def _all_logits(model: Forward, tokens: Sequence[int]) -> Logits:
    """Logits [T, V], each after a token and all before it."""
    ids = np.array(tokens, np.intc)
    segment = Segment(ids=ids, start=0, spans=(RowSpan(0, len(ids)),), logits_for=LogitsFor.ALL)
    return np.asarray(model.forward([segment]), np.float64)


def _penalized(logits: Logits, row: Mapping[str, Any], prompt: Sequence[int], sampled: Sequence[int]) -> Logits:
    """Logits [V] as the turn's row says that they were changed. Owes nothing to the sampler that it is held against."""
    scores = logits.copy()
    if (factor := row.get("repetition_penalty", 1.0)) != 1.0:
        for id_ in {*(prompt if row["repetition_over"] == "line" else ()), *sampled}:
            scores[id_] = scores[id_] / factor if scores[id_] > 0 else scores[id_] * factor
    for id_, count in Counter(sampled).items():
        scores[id_] -= row.get("presence_penalty", 0.0) + count * row.get("frequency_penalty", 0.0)
    for one in row.get("logit_bias", ()):
        scores[one["id"]] += one["bias"]
    return scores


def token_bytes(whole: bytes) -> list[int]:
    """The bytes that each token takes in a turn's supports, without the turn's header; a set counts where it is new."""
    _, piece = split(whole)
    heads = read_varints(piece.heads).tolist()
    gaps = iter(read_varints(piece.gaps).tolist())
    num_new = heads.count(2)
    sizes: list[int] = []
    for head in heads:
        size = len(varint(head))
        if head % 2:
            assert head // 2 <= MAX_OTHERS
            size += sum(len(varint(gap)) for gap in itertools.islice(gaps, head // 2))
        sizes.append(size + (len(piece.sets) // num_new if head == 2 else 0))
    return sizes
