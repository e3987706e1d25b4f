"""Ten thousand tokens of stored sessions, scored by a real engine through the server, held to torch.

The sessions are sampled once by the embedded engine and scored by it; with SCORED_SESSIONS=FOLDER they are kept there,
so that several engines score the same ones. torch computes each line in float32, and in float64 with exact angles.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.engine_table import serving
from scripts.real_engine import ask, torch_logprobs

NUM_SESSIONS, NUM_TURNS, TURN_TOKENS, NUM_TOP = 12, 3, 290, 2
MIN_TOKENS = 10_000
TOLERANCE_NATS = 1e-4
"""Of an engine from torch in float32, whose angles of rope it shares, and of the embedded one from torch in float64."""
DTYPES = ("float32", "float64")
QUESTIONS = ("Tell me about the river {}.", "And who lives there?", "Write a long story about them.")
Nats = NDArray[np.float64]


def check_stored_scores(python: str, model: Path, folder: Path, name: str, *flags: str) -> None:
    """Score the sessions by the engine of `flags` and compare each token. Prints how far apart all are."""
    kept = Path(os.environ.get("SCORED_SESSIONS") or folder / "scored")
    if not (kept / "torch.json").exists():
        _make(python, model, kept)
    with serving(model, "--data-dir", str(kept / "store"), *flags) as url:
        _score(url, name)
        samples = _samples(url, ["embedded", name])
    by = {one: _joined(sample["scores"][one] for sample in samples) for one in ("embedded", name)}
    by |= {f"torch {one}": _joined(lines) for one, lines in json.loads((kept / "torch.json").read_text()).items()}
    mask = _joined(sample["loss_mask"] for sample in samples) > 0
    masked = {one: nats[mask] if len(nats) == len(mask) else nats for one, nats in by.items()}
    assert {len(nats) for nats in masked.values()} == {int(mask.sum())}
    assert int(mask.sum()) >= MIN_TOKENS
    exact, far = masked["torch float64"], dict[str, float]()
    for first, second in (
        (name, "torch float32"),
        (name, "embedded"),
        *((one, "torch float64") for one in list(masked)[:3]),
    ):
        apart = np.abs(masked[first] - (exact if second == "torch float64" else masked[second]))
        far[f"{first} − {second}"] = float(apart.max())
        told = f"max {apart.max():.1e}, 99.99 % {np.quantile(apart, 0.9999):.1e}, mean {apart.mean():.1e}"
        sys.stdout.write(f"\n{len(apart)} tokens, {first} − {second}: {told} nats")
    assert far[f"{name} − torch float32"] < TOLERANCE_NATS
    assert far["embedded − torch float64"] < TOLERANCE_NATS


def _make(python: str, model: Path, folder: Path) -> None:
    """Sample the sessions and score them by the embedded engine; compute their sampled tokens by torch."""
    with serving(model, "--data-dir", str(folder / "store")) as url:
        with ThreadPoolExecutor(NUM_SESSIONS) as pool:
            list(pool.map(partial(_play, url), range(NUM_SESSIONS)))
        _score(url, "embedded")
        samples = _samples(url, ["embedded"])
    lines = [(sample["tokens"], len(sample["tokens"]) - sample["response_length"]) for sample in samples]
    told = dict[str, list[list[float]]]()
    for dtype in DTYPES:
        nats = torch_logprobs(python, model, lines, dtype=dtype)
        told[dtype] = [
            [one for one, is_sampled in zip(line, sample["loss_mask"], strict=True) if is_sampled]
            for line, sample in zip(nats, samples, strict=True)
        ]
    (folder / "torch.json").write_text(json.dumps(told))


def _play(url: str, number: int) -> None:
    session, messages = ask(url, "/sessions", {"group": "scored"}), list[dict[str, Any]]()
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": QUESTIONS[turn].format(number)})
        body = {"model": "m", "messages": messages, "max_tokens": TURN_TOKENS, "ignore_eos": True}
        body |= {"temperature": 1, "seed": NUM_TURNS * number + turn}
        (choice,) = ask(session["base_url"], "/chat/completions", body)["choices"]
        messages.append(choice["message"])


def _ids(url: str) -> list[str]:
    return sorted(session["session_id"] for session in ask(url, "/sessions?group=scored")["sessions"])


def _score(url: str, name: str) -> None:
    """Score each session, four at once. Raises AssertionError where a likeliest token is less likely than the
    sampled one."""
    asked = {"name": name, "top_k": NUM_TOP}
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(partial(ask, url), (f"/sessions/{id_}/scores" for id_ in _ids(url)), repeat(asked))
        for turn in (turn for answer in answers for turn in answer["turns"]):
            best = turn["top_log_probs"][::NUM_TOP]
            assert all(top >= one - 1e-6 for top, one in zip(best, turn["log_probs"], strict=True))


def _samples(url: str, scores: Sequence[str]) -> list[Mapping[str, Any]]:
    asked = {"format": "json", "scores": scores}
    return [sample for id_ in _ids(url) for sample in ask(url, f"/sessions/{id_}/samples", asked)["samples"]]


def _joined(rows: Any) -> Nats:
    return np.concatenate([np.array(row, np.float64) for row in rows])
