"""Runs the matrix of rollouts, and checks each of its tokens: `rollouts-matrix --out DIR [--group-size N]`.

A stand-in for SGLang samples by policy.py and logs the ids of each prompt and reply; `stenograph rollout` runs the jobs
of jobs.py through a server before it; afterwards the log is compared with what the samples train. The same command goes
on where it was interrupted, also with a larger group.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.matrix.policy import COMMANDS, SHELLS, digest, reply, spelled
from standins.planned_server import AskedRequest, ReplyScript
from standins.sglang_server import SGLangServer
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.text.renderer import Renderer

CONTEXT_TOKENS = 1 << 20
END = "<|im_end|>"


def main() -> int:
    """Run what is not there yet, unless `--check`, and print the table; 1 where a token is not accounted for."""
    parser = argparse.ArgumentParser(prog="rollouts-matrix", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="the model whose tokenizer samples")
    parser.add_argument("--group-size", type=int, default=1, metavar="N", help="rollouts of each of 288 tasks")
    parser.add_argument("--num-tasks", type=int, default=288, metavar="N")
    parser.add_argument("--concurrency", type=int, default=3, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="N", help="stop after these; the same command goes on")
    parser.add_argument("--check", action="store_true", help="run nothing: check what is there")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    code = 0 if asked.check else asyncio.run(rollouts(asked))
    return table(asked.out) or code


async def rollouts(asked: argparse.Namespace) -> int:
    """`stenograph rollout` before the stand-in; its exit code."""
    renderer = make_renderer(load_model_files(asked.model), "smollm2")
    command = [
        *(sys.executable, "-m", "stenograph.cli.main", "rollout", "scripts/matrix/jobs.py"),
        *("--out", asked.out / "rollouts", "--group-size", asked.group_size, "--concurrency", asked.concurrency),
        *("--num-tasks", asked.num_tasks, "--agent-timeout", 240, "--model", asked.model, "--family", "smollm2"),
        *("--engine", "sglang-generate", "--port", 0, "--log-level", "warning"),
    ]
    with (asked.out / "sampled.jsonl").open("a") as log:
        sampler = Sampler(renderer, log)
        async with SGLangServer(
            answers=sampler, stop_id=sampler.end, remembers=False, max_model_len=CONTEXT_TOKENS
        ) as engine:
            process = await asyncio.create_subprocess_exec(
                *map(str, command),
                *("--engine-url", engine.url),
                env={**os.environ, "MATRIX_CHECKS": str((asked.out / "checks.jsonl").resolve())},
            )
            try:
                async with asyncio.timeout(asked.seconds):
                    return await process.wait()
            except TimeoutError:
                process.terminate()
                return 0
            finally:
                await process.wait()  # Ctrl-C reaches it as well


class Sampler:
    """The policy as an engine; each of its replies is a line of the log."""

    def __init__(self, renderer: Renderer, log: Any) -> None:
        self._tokenizer = renderer.tokenizer
        self._log = log
        (self.end,) = self._tokenizer.encode(END)

    def __call__(self, asked: AskedRequest) -> ReplyScript:
        """The reply to a prompt: as many ids as the request takes."""
        prompt: list[int] = asked.json["input_ids"]
        attempt, text = reply(self._tokenizer.decode(prompt))
        ids = [*spelled(text, self._tokenizer.encode_plain, random.Random(digest(prompt))), self.end]
        most = asked.json["sampling_params"].get("max_new_tokens") or len(ids)
        made = tuple(ids[:most])
        row = {"attempt": attempt, "prompt": digest(prompt), "ids": digest(made), "num": len(made)}
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()
        is_cut = len(made) < len(ids)
        return ReplyScript(ids=made, finish="length" if is_cut else "stop", matched=None if is_cut else self.end)


Turn = tuple[str, str, int]
"""The digests of a prompt and its reply, and the reply's tokens."""


@dataclass(slots=True)
class Cell:
    """Figures of a harness with a kind of jobs. `num_lost`: sampled tokens in no sample and not counted; `num_breaks`:
    trained turns that the engine never sampled after such a prompt. `num_row_tokens`: what a trainer computes for the
    rows, prompts included; `num_request_tokens`: for a row of each request instead, its prompt and its reply."""

    num_sessions: int = 0
    num_turns: int = 0
    num_samples: int = 0
    num_sampled: int = 0
    num_trained: int = 0
    num_side: int = 0
    num_discarded: int = 0
    num_lost: int = 0
    num_breaks: int = 0
    num_row_tokens: int = 0
    num_request_tokens: int = 0
    rewards: list[float] = field(default_factory=list[float])

    def row(self, name: str) -> str:
        """A row of the table."""
        numbers = [getattr(self, name) for name in NUMBERS]
        reward = f"{fmean(self.rewards):.2f}" if self.rewards else ""
        return f"| {name} | " + " | ".join(f"{one:,}" for one in numbers) + f" | {reward} |"


NUMBERS = tuple(one.name for one in fields(Cell) if one.name != "rewards")


def table(out: Path) -> int:
    """Print the table of what is in the folder; 1 where a token of an ended rollout is not accounted for."""
    sampled = defaultdict[str | None, Counter[Turn]](Counter)
    for row in lines(out / "sampled.jsonl"):
        sampled[row["attempt"]][row["prompt"], row["ids"], row["num"]] += 1
    ended = {row["session"]: row for row in lines(out / "rollouts" / "rollouts.jsonl")}
    cells = defaultdict[tuple[str, str], Cell](Cell)
    for check in lines(out / "checks.jsonl"):
        if check["session"] in ended:
            cell = cells[check["harness"], check["kind"]]
            compare(cell, check, sampled.pop(check["attempt"], Counter()), ended[check["session"]])
    whole = Cell(rewards=[reward for cell in cells.values() for reward in cell.rewards])
    for name in NUMBERS:
        setattr(whole, name, sum(getattr(cell, name) for cell in cells.values()))
    ends = Counter(str(row["end"]) for row in ended.values())
    rest = sum(map(num_tokens, sampled.values()))
    head = " | ".join(name.removeprefix("num_") for name in NUMBERS)
    shown = [
        f"| harness, job | {head} | reward |",
        "|---" * (len(NUMBERS) + 2) + "|",
        *(cells[harness, kind].row(f"{harness}, {kind}") for harness in SHELLS for kind in COMMANDS),
        whole.row("all"),
        f"rollouts by their ends: {dict(ends)}",
        f"{rest:,} tokens were sampled for {len(sampled)} rollouts without samples: interrupted, or failed",
    ]
    sys.stdout.write("\n".join(shown) + "\n")
    return int(bool(whole.num_lost or whole.num_breaks))


def compare(cell: Cell, check: Mapping[str, Any], sampled: Counter[Turn], ended: Mapping[str, Any]) -> None:
    """Add a session to its cell."""
    trained = Counter[Turn]((turn["prompt"], turn["ids"], turn["num"]) for turn in check["turns"])
    cell.num_sessions += 1
    cell.num_turns += sum(sampled.values())
    cell.num_samples += check["samples"]
    cell.num_sampled += num_tokens(sampled)
    cell.num_trained += sum(turn["num_trained"] for turn in check["turns"])
    cell.num_side += sum(turn["num_trained"] for turn in check["turns"] if turn["kind"] != "main")
    cell.num_discarded += check["discarded"]
    cell.num_lost += num_tokens(sampled - trained) - check["discarded"]
    cell.num_breaks += sum((trained - sampled).values())
    cell.num_row_tokens += check["row_tokens"]
    cell.num_request_tokens += sum(turn["end"] for turn in check["turns"])
    if ended["reward"] is not None:
        cell.rewards.append(ended["reward"])


def num_tokens(turns: Counter[Turn]) -> int:
    """The tokens of turns."""
    return sum(num * count for (_, _, num), count in turns.items())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """A file's rows; one cut by a crash is left out."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
