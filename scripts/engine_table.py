"""The same agent, greedy, with the same weights, through the embedded engine and llama.cpp: what is exact, and how far.

`python -m scripts.engine_table MODEL.gguf` writes the table of docs/engines.md. In an engine, what was recorded is
compared with a teacher-forced pass of that engine; between them, llama.cpp scores the embedded engine's line. Blocks,
and starts real servers.
"""

import re
import subprocess
import sys
import urllib.request
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.agent_session import PlayedTurn, check_exact, play
from standins.llamacpp_server import LlamaCppServer
from standins.teacher_forcing import line_logprobs
from stenograph.core.types import Prompt, token_ids
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.engine.llamacpp.wire import decode_ranking, encode_ranking

NUM_RANKED = 64
SLOT_TOKENS = 2048

Score = Callable[[Sequence[int], int], Sequence[float]]
"""(ids, n) to ln p of `ids[n:]`, each after all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One engine's session: `apart_nats` is between a recorded logprob and the same teacher-forced."""

    name: str
    turns: Sequence[PlayedTurn]
    apart_nats: NDArray[np.float64]


class ModelScores:
    """The embedded engine's own forward pass over whole lines."""

    def __init__(self, model: Path) -> None:
        config, weights = load_weights(model)
        self._model = NumpyForward(config, weights, num_kv_tokens=config.max_context)

    def __repr__(self) -> str:
        return "<ModelScores>"

    def __call__(self, ids: Sequence[int], num_prompt: int) -> list[float]:
        return line_logprobs(self._model, ids, num_prompt)


class LlamaCppScores:
    """llama.cpp's word on each token after the ones before it, one request a token."""

    def __init__(self, url: str, vocab_size: int) -> None:
        self._url = url
        self._vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"<LlamaCppScores {self._url}>"

    def __call__(self, ids: Sequence[int], num_prompt: int) -> list[float]:
        return [self.rank(ids[:at], ids[at])[0] for at in range(num_prompt, len(ids))]

    def rank(self, ids: Sequence[int], wanted: int) -> tuple[float, int]:
        """The logprob of the token `wanted` after `ids`, and the likeliest token there."""
        for num_top in (NUM_RANKED, self._vocab_size):
            body = encode_ranking(Prompt(new_ids=token_ids(ids)), array("i"), num_top)
            request = urllib.request.Request(f"{self._url}/completion", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as response:
                top = decode_ranking(response.read(), vocab_size=self._vocab_size, num_prompt=len(ids))
            for one in top:
                if one.id == wanted:
                    return one.logprob, top[0].id
        raise LookupError(f"llama.cpp does not tell of token {wanted}")


@contextmanager
def serving(model: Path, *flags: str) -> Generator[str]:
    """The address of `stenograph serve` with the model."""
    command = [sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--model", str(model), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield _ready_url(process.stdout)
        finally:
            process.terminate()


def _ready_url(lines: Iterable[str]) -> str:
    """The address in a server's ready line. Raises RuntimeError, with all that it wrote, where there is none."""
    seen: list[str] = []
    for line in lines:
        seen.append(line)
        if found := re.search(r"stenograph ready at (http://\S+)", line):
            return found[1]
    raise RuntimeError("no ready line: " + "".join(seen))


def measured(name: str, turns: Sequence[PlayedTurn], score: Score) -> Measured:
    """Hold a session to its own engine. Raises AssertionError if its turns do not go on from each other's ids."""
    check_exact(turns)
    apart = [
        abs(forced - recorded)
        for turn in turns
        for forced, recorded in zip(
            score([*turn.prompt_ids, *turn.ids], len(turn.prompt_ids)), turn.logprobs, strict=True
        )
    ]
    return Measured(name=name, turns=turns, apart_nats=np.array(apart))


def measure_embedded(model: Path, score: Score) -> Measured:
    """The session through the embedded engine."""
    with serving(model) as url:
        return measured("embedded", play(url), score)


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """llama.cpp on the embedded engine's line: `apart_nats` is between its logprobs and the recorded ones.

    `first` is the number of the first turn that goes another way, the token's place in it, and what either engine
    says that its own token is likelier than the other's by, in nats; None where the sessions are the same.
    """

    apart_nats: NDArray[np.float64]
    num_other: int
    first: tuple[int, int, float, float] | None


def measure_llamacpp(
    name: str, model: Path, embedded: Measured, score: Score, *, vocab_size: int, is_exact: bool
) -> tuple[Measured, Against]:
    """The session through llama.cpp, and llama.cpp on the embedded engine's line."""
    with LlamaCppServer(model, slot_tokens=SLOT_TOKENS, slots=1, is_exact=is_exact) as server:
        theirs = LlamaCppScores(server.url, vocab_size)
        with serving(model, "--engine", "llamacpp", "--engine-url", server.url) as url:
            own = measured(name, play(url), theirs)
        apart, num_other = _scored(embedded.turns, theirs)
        first = _first_apart(embedded.turns, own.turns, score, theirs)
    return own, Against(apart_nats=apart, num_other=num_other, first=first)


def _scored(turns: Sequence[PlayedTurn], theirs: LlamaCppScores) -> tuple[NDArray[np.float64], int]:
    apart: list[float] = []
    num_other = 0
    for turn in turns:
        line = [*turn.prompt_ids, *turn.ids]
        for at, recorded in enumerate(turn.logprobs, start=len(turn.prompt_ids)):
            logprob, likeliest = theirs.rank(line[:at], line[at])
            apart.append(abs(logprob - recorded))
            num_other += likeliest != line[at]
    return np.array(apart), num_other


def _first_apart(
    ours: Sequence[PlayedTurn], others: Sequence[PlayedTurn], score: Score, theirs: LlamaCppScores
) -> tuple[int, int, float, float] | None:
    for number, (mine, other) in enumerate(zip(ours, others, strict=False), start=1):
        for place, (id_, other_id) in enumerate(zip(mine.ids, other.ids, strict=False)):
            if id_ != other_id:
                before = [*mine.prompt_ids, *mine.ids[:place]]
                margins = [
                    scored([*before, one], len(before))[0] - scored([*before, two], len(before))[0]
                    for scored, one, two in ((score, id_, other_id), (theirs, other_id, id_))
                ]
                return number, place, margins[0], margins[1]
    return None


def table(model: Path) -> str:
    """Markdown: a row for each engine, and what the two make of the same line."""
    score = ModelScores(model)
    embedded = measure_embedded(model, score)
    vocab_size = _vocab_size(model)
    compared = [
        measure_llamacpp(name, model, embedded, score, vocab_size=vocab_size, is_exact=is_exact)
        for name, is_exact in (("llama.cpp, exact flags", True), ("llama.cpp, its defaults", False))
    ]
    lines = [
        "| engine | turns | tokens drawn | turns go on from the ids | teacher-forced apart: max | mean |",
        "|---|---|---|---|---|---|",
        *(_own_row(one) for one in (embedded, *(own for own, _ in compared))),
        "",
        "| on the embedded engine's line | logprobs apart: max | median | likelier tokens | first turn that parts |",
        "|---|---|---|---|---|",
        *(_against_row(own.name, against) for own, against in compared),
    ]
    return "\n".join(lines) + "\n"


def _vocab_size(model: Path) -> int:
    config, _ = load_weights(model)
    return config.vocab_size


def _own_row(one: Measured) -> str:
    num_drawn = sum(len(turn.ids) for turn in one.turns)
    apart = one.apart_nats
    return f"| {one.name} | {len(one.turns)} | {num_drawn} | yes | {apart.max():.1e} | {apart.mean():.1e} |"


def _against_row(name: str, against: Against) -> str:
    apart, num = against.apart_nats, len(against.apart_nats)
    first = "none"
    if against.first is not None:
        number, place, ours, theirs = against.first
        first = f"{number}, at token {place}: by {ours:.2f} nats here, {theirs:.2f} there"
    return f"| {name} | {apart.max():.2f} | {np.median(apart):.3f} | {against.num_other} of {num} | {first} |"


if __name__ == "__main__":
    sys.stdout.write(table(Path(sys.argv[1])))
