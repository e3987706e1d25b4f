"""The policy of the matrix of rollouts, in the place of a model: it solves a job by the tools of its harness, or fails.

It reads the prompt's text, and nothing else: its harness and job by the job's line, its place by the turns after that,
what to do next by the last observation. Its replies are spelled as only a model spells: reasoning or none, white space
within the JSON of calls, parallel calls, calls that are none, and ids other than the tokenizer's for the same text.
Pure.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

JOB = "Job {harness}/{kind}/{attempt}"
"""The line in a job's first message. `attempt` is of one rollout alone."""

_JOB = re.compile(r"Job ([a-z-]+)/([a-z]+)/([0-9a-f]{12})")
_TURN = "<|im_start|>assistant\n"
_SIDE = {
    "Generate a concise, sentence-case title": '{"title": "A job"}',
    "You are a title generator": "A job",
    "Task Routing AI": '{"complexity_reasoning": "easy", "complexity_score": 1}',
}
"""Replies to requests beside the job, by a mark in the prompt."""

SHELLS: Mapping[str, tuple[str, str]] = {
    "claude-code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "gemini-cli": ("run_shell_command", "command"),
    "opencode": ("bash", "command"),
    "mini-swe-agent": ("bash", "command"),
    "openai-sdk": ("shell", "command"),
}
"""By harness, the name of its tool for commands, and of the argument."""

COMMANDS: Mapping[str, Sequence[str]] = {
    "sum": ("expr {problem}", "echo {word} > answer.txt"),
    "errand": ("cat start.txt", "cat {word}", "cat {word}", "echo {word} > answer.txt"),
    "repair": ("cat sums.py", "sed -i 's/a - b/{right}/' sums.py", "python3 sums.py"),
}
"""The commands of each kind of job; `word` is the last one of the last observation."""

_DESCRIBED = ("Bash", "run_shell_command", "bash")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command that ends a run of mini-SWE-agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt as the policy reads it. `place` counts its turns since the job; `seen` is the last observation."""

    harness: str
    kind: str
    attempt: str
    text: str
    place: int
    seen: str


def read(prompt: str) -> Asked | None:
    """The prompt's job, None without one."""
    found = list(_JOB.finditer(prompt))
    if not found:
        return None
    last = found[-1]
    after = prompt[last.end() :]
    seen = after.rpartition("<tool_response>")[2].partition("</tool_response>")[0] if "<tool_response>" in after else ""
    harness, kind, attempt = last.groups()
    return Asked(
        harness=harness, kind=kind, attempt=attempt, text=after, place=after.count(_TURN) - 1, seen=seen.strip()
    )


def reply(prompt: str) -> tuple[str | None, str]:
    """The attempt of a prompt and the text of the reply to it."""
    asked = read(prompt)
    for mark, said in _SIDE.items():
        if mark in prompt:
            return None if asked is None else asked.attempt, said
    if asked is None:
        return None, "There is no job."
    rng = random.Random(f"{asked.attempt}/{asked.place}")
    return asked.attempt, _thought(rng) + _said(asked, rng)


def spelled(text: str, encode: Callable[[str], Sequence[int]], rng: random.Random) -> list[int]:
    """Ids of a text, in pieces that a tokenizer would join: a model samples such, too."""
    ids: list[int] = []
    at = 0
    while at < len(text):
        size = rng.choice((1, 3, 9, 27, 81))
        ids += encode(text[at : at + size])
        at += size
    return ids


def digest(ids: ArrayLike) -> str:
    """A name of ids, equal where they are."""
    return blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=12).hexdigest()


def _said(asked: Asked, rng: random.Random) -> str:
    command = _command(asked, rng)
    if command is None and asked.harness == "mini-swe-agent":
        command = SUBMIT
    if command is None:
        return rng.choice(("Done.", "It is done.", "The job is done. \U0001f680"))
    if rng.random() < 0.03:
        return '<tool_call>\n{"name": "' + SHELLS[asked.harness][0] + '", "arguments": {"comm'  # a call that is none
    calls = [_call(asked.harness, command, rng)]
    if rng.random() < 0.3 and command != SUBMIT:
        calls.insert(0, _call(asked.harness, "pwd", rng))
    return rng.choice(("", "I look.\n", "Next:\n\n")) + "\n".join(calls)


def _call(harness: str, command: str, rng: random.Random) -> str:
    name, argument = SHELLS[harness]
    arguments: dict[str, Any] = {argument: command}
    if name in _DESCRIBED and harness != "mini-swe-agent":
        arguments["description"] = "a step"
    comma, colon = rng.choice(((", ", ": "), (",", ":"), (",  ", ":  "), (", ", ":\n")))
    made = json.dumps({"name": name, "arguments": arguments}, separators=(comma, colon))
    return f"<tool_call>\n{made}\n</tool_call>"


def _thought(rng: random.Random) -> str:
    return rng.choice(("", "", "<think>\nA step more.\n</think>\n\n", "<think>\nWhat now?  Go on.\n\n</think>\n\n"))


def _command(asked: Asked, rng: random.Random) -> str | None:
    """The job's next command, a wrong one now and then; None at its end."""
    steps, errs = COMMANDS[asked.kind], rng.random() < 0.1
    if asked.place >= len(steps):
        return None
    problem = re.search(r"problem: ([0-9+\- ]+) =", asked.text)
    return steps[asked.place].format(
        problem=problem[1] if problem else 0,
        word="0" if errs else _word(asked.seen),
        right="a * b" if errs else "a + b",
    )


def _word(seen: str) -> str:
    """The last word of an observation, of those that a shell takes as they are."""
    seen = seen.replace("\\n", "\n")  # a harness may show it as JSON
    output = re.search(r"Output:\s*(.+)", seen)
    words: list[str] = re.findall(r"[A-Za-z0-9.-]+", output[1] if output else seen)
    plain = [one for one in words if one not in ("output", "returncode")]
    return plain[-1] if plain else "nothing"
