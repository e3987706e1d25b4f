"""The matrix of rollouts: its policy solves an errand, and its table misses no token that is lost or made up."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.matrix.policy import JOB, SHELLS, reply, spelled
from scripts.matrix.run import table

FILES = {"start.txt": "Go on in elm.txt", "elm.txt": "Go on in fir.txt", "fir.txt": "The word is oak"}


def walked(harness: str, attempt: str) -> str:
    """The last command of an errand that ends; files answer it."""
    prompt = f"<|im_start|>user\n{JOB.format(harness=harness, kind='errand', attempt=attempt)}\nWrite the word."
    last = ""
    for _ in range(6):
        prompt += "<|im_end|>\n<|im_start|>assistant\n"
        found, said = reply(prompt)
        assert found == attempt
        calls = [json.loads(one.partition("</tool_call>")[0]) for one in said.split("<tool_call>")[1:] if "</" in one]
        if not calls:
            return last
        name, argument = SHELLS[harness]
        assert calls[-1]["name"] == name
        last = calls[-1]["arguments"][argument]
        shown = json.dumps({"output": f"Output: {FILES.get(last.removeprefix('cat '), '')}\nExit code 0"})
        prompt += f"{said}<|im_end|>\n<|im_start|>user\n<tool_response>\n{shown}\n</tool_response>"
    return last


@pytest.mark.parametrize("harness", sorted(set(SHELLS) - {"mini-swe-agent"}))
def test_the_policy_solves_an_errand_by_what_it_sees_and_errs_now_and_then(harness: str) -> None:
    ends = [walked(harness, f"{number:012x}") for number in range(60)]
    assert 20 < ends.count("echo oak > answer.txt") < 60


def test_it_spells_a_text_in_pieces_of_the_same_bytes() -> None:
    text = 'Done \U0001f680 <tool_call>\n{"name":  "bash"}' * 4
    pieces = list[str]()

    def encode(piece: str) -> list[int]:
        pieces.append(piece)
        return list(piece.encode())

    assert bytes(spelled(text, encode, random.Random(1))).decode() == text
    assert len(pieces) > 4


SAMPLED = [{"attempt": "a", "prompt": prompt, "ids": prompt, "num": 5} for prompt in ("p", "q")]
TURNS = [{**turn, "num_trained": 5, "kind": "main", "end": 40} for turn in SAMPLED]
CHECK = {
    "attempt": "a", "session": "s", "harness": "codex", "kind": "sum", "samples": 1, "discarded": 0, "row_tokens": 45
}  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "discarded", "code"),
    [
        (TURNS, 0, 0),
        (TURNS[:1], 5, 0),
        (TURNS[:1], 0, 1),  # a turn is lost
        ([TURNS[0], TURNS[0]], 0, 1),  # one is trained twice
        ([TURNS[0], {**TURNS[1], "prompt": "other"}], 0, 1),  # the engine saw another prompt
        ([*TURNS, {**TURNS[0], "ids": "made up"}], 0, 1),
    ],
)
def test_the_table_accounts_for_each_sampled_token(
    tmp_path: Path, turns: list[dict[str, Any]], discarded: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").mkdir()
    late = {"attempt": "b", "prompt": "p", "ids": "r", "num": 7}  # of a rollout that never ended
    rows = {
        "sampled.jsonl": [*SAMPLED, late],
        "checks.jsonl": [{**CHECK, "turns": turns, "discarded": discarded}],
        "rollouts/rollouts.jsonl": [{"session": "s", "end": "ok", "reward": 1.0}],
    }
    for name, lines in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert table(tmp_path) == code
    said = capsys.readouterr().out
    assert "| codex, sum | 1 | 2 | 1 | 10 |" in said
    assert f"| 45 | {40 * len(turns)} | 1.00 |" in said  # a row of the line's tokens, or one of each request's
    assert "7 tokens were sampled for 1 rollouts without samples" in said
