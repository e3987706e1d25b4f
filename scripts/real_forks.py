"""Forks before a real engine: each continuation's log-probabilities are computed again by the embedded engine's forward
with the same weights, and the engine has the inherited tokens in its prefix cache.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.real_engine import ask
from standins.teacher_forcing import line_logprobs
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights

NUM_FORKS = 24
TOLERANCE_NATS = 1e-4
QUESTIONS = ("What is the capital of France?", "And of Italy?", "Write a sentence about the river there \U0001f642")
say = sys.stdout.write


@dataclass(slots=True)
class _Found:
    apart: list[float] = field(default_factory=list[float])
    num_inherited: int = 0
    num_uncached: list[int] = field(default_factory=list[int])


def check_forks(url: str, model: Path) -> None:
    """Fork a session of the server at `url` at random places, some of them in forks, and continue each."""
    chance, found = random.Random(7), _Found()
    forward = NumpyForward(*load_weights(model), num_kv_tokens=2048)
    session = ask(url, "/sessions", {})["session_id"]
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": text})
        messages.append(_asked(url, session, messages, seed=number, max_tokens=40))
    open_ones = [session]
    for number in range(NUM_FORKS):
        parent = chance.choice(open_ones)
        records = ask(url, f"/sessions/{parent}")["records"]
        turn = chance.randrange(len(records))
        ids = _ids(records[turn])
        token = chance.randrange(len(ids))
        place = {"turn": turn, "token": token}
        fork = ask(url, f"/sessions/{parent}/fork", place)["forks"][0]["session_id"]
        _asked(url, fork, records[turn]["request"]["messages"], seed=100 + number, max_tokens=token + 12)
        made = ask(url, f"/sessions/{fork}")["records"][turn]
        prompt = records[turn]["request"]["input_ids"]
        assert made["request"]["input_ids"] == prompt
        assert _ids(made)[:token] == ids[:token]
        found.num_inherited += len(prompt) + token
        found.num_uncached.append(len(prompt) - _meta(made)["cached_tokens"])
        found.apart += _apart(forward, made, token)
        open_ones.append(fork)
    say(
        f"\nforks: {NUM_FORKS}, {found.num_inherited} tokens inherited, {len(found.apart)} sampled: apart by at most"
        f" {max(found.apart):.1e} nats; of a prompt at most {max(found.num_uncached)} tokens not cached\n"
    )
    assert max(found.apart) <= TOLERANCE_NATS


def _asked(url: str, session: str, messages: Sequence[dict[str, Any]], *, seed: int, max_tokens: int) -> dict[str, Any]:
    body = {"messages": messages, "seed": seed, "temperature": 1.0, "max_tokens": max_tokens}
    message: dict[str, Any] = ask(url, f"/sessions/{session}/v1/chat/completions", body)["choices"][0]["message"]
    return message


def _apart(forward: NumpyForward, record: Any, token: int) -> list[float]:
    """The distances of a record's log-probabilities from `token` on."""
    prompt, ids = record["request"]["input_ids"], _ids(record)
    told = [one[0] for one in _meta(record)["output_token_logprobs"]]
    again = line_logprobs(forward, [*prompt, *ids], len(prompt) + token)
    return [abs(one - other) for one, other in zip(told[token:], again, strict=True)]


def _meta(record: Any) -> Any:
    return record["response"]["choices"][0]["meta_info"]


def _ids(record: Any) -> list[int]:
    return [id_ for _, id_, *_ in _meta(record)["output_token_logprobs"]]
