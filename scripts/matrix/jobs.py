"""The environment of the matrix of rollouts, for `stenograph rollout`: six harnesses, each with three kinds of jobs.

`sum` is a question of reasoning-gym's `chain_sum`, scored by it; `errand` leads from file to file to a word; `repair`
is a program with a fault. A harness has a home and a folder of its own, and reaches this machine alone. Before the
session ends, the environment writes what its samples train, turn by turn, to the file that MATRIX_CHECKS names: run.py
compares it with what the engine sampled.
"""

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai

from scripts.matrix.policy import COMMANDS, JOB, SHELLS, digest
from stenograph.cli.agent_environment import agent_environment, write_agent_settings
from stenograph.cli.session_calls import OpenSession
from stenograph.client.samples import DecodedSample
from stenograph.client.session import RolloutSession

NUM_TASKS = {"claude-code": 4, "codex": 16, "gemini-cli": 4, "opencode": 4, "mini-swe-agent": 4, "openai-sdk": 64}
"""Tasks of each kind, by harness: a run of Node costs seconds of computing, one of the SDK none."""

NOWHERE = "http://127.0.0.1:9"
_sums: Any = importlib.import_module("reasoning_gym").create_dataset(
    "chain_sum", size=max(NUM_TASKS.values()), seed=7, max_terms=3
)
_shell = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_tools: Any = [{"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": _shell}}]


def tasks() -> list[dict[str, object]]:
    """Each kind of job for each harness, the cheap harnesses first."""
    return [
        {"id": f"{harness}-{kind}-{number}", "harness": harness, "kind": kind, "number": number}
        for number in reversed(range(max(NUM_TASKS.values())))
        for kind in COMMANDS
        for harness in SHELLS
        if number < NUM_TASKS[harness]
    ]


async def run(task: Mapping[str, Any], session: RolloutSession) -> float:
    """The job by its harness; its reward by what is in the folder then."""
    attempt = uuid4().hex[:12]
    with tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as home:
        work = Path(home) / "work"
        work.mkdir()
        asked = f"{JOB.format(harness=task['harness'], kind=task['kind'], attempt=attempt)}\n{_given(task, work)}"
        code, said = await _harness(task["harness"], asked, session, Path(home))
        reward = await _reward(task, work)
    num_turns = await _check(task, attempt, session)
    if not num_turns:
        raise RuntimeError(f"{task['harness']} made no turn; exit code {code}: {said[-300:]}")
    return reward


def _given(task: Mapping[str, Any], work: Path) -> str:
    """What is asked, with the files for it."""
    match task["kind"]:
        case "sum":
            return f"{_sums[task['number']]['question']}\nWrite the number to answer.txt, by the shell."
        case "errand":
            names = random.Random(task["number"]).sample(["oak", "elm", "ash", "fir", "yew"], 3)
            (work / "start.txt").write_text(f"Go on in {names[0]}.txt\n")
            (work / f"{names[0]}.txt").write_text(f"Go on in {names[1]}.txt\n")
            (work / f"{names[1]}.txt").write_text(f"The word is {names[2]}\n")
            return "start.txt says in which file to go on. Write the word at the end of the way to answer.txt."
        case _:
            fault = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"
            (work / "sums.py").write_text(fault)
            return "sums.py has a function that adds wrongly. Repair it."


async def _reward(task: Mapping[str, Any], work: Path) -> float:
    if task["kind"] == "repair":
        _, said = await _ran([sys.executable, "sums.py"], work, {"PATH": os.environ["PATH"]})
        return float(said == "5\n")
    answer = (work / "answer.txt").read_text().strip() if (work / "answer.txt").exists() else ""
    if task["kind"] == "sum":
        return float(_sums.score_answer(answer, _sums[task["number"]]) == 1.0)
    return float(answer == random.Random(task["number"]).sample(["oak", "elm", "ash", "fir", "yew"], 3)[2])


async def _harness(name: str, asked: str, session: RolloutSession, home: Path) -> tuple[int, str]:
    """A run of a harness: its exit code and what it says."""
    work = home / "work"
    if name == "openai-sdk":
        return await _sdk(asked, session, work)
    place = OpenSession(id=session.id, base_url=session.base_url, root_url=session.root_url, agent_key=session.api_key)
    write_agent_settings(home, place, model="any")
    plain = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
    }
    environment = agent_environment(plain, place, home, model="any")
    command, more = _command(name, asked, work)
    return await _ran(command, work, {**environment, **more})


def _command(name: str, asked: str, work: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """A harness' command and variables: those of docs/agents.md."""
    match name:
        case "claude-code":
            more = {"IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1"}
            return [
                _program("claude-code-2.1.330", "claude"),
                "-p",
                asked,
                "--permission-mode",
                "bypassPermissions",
            ], more
        case "codex":
            flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
            return [_program("codex-0.169.0", "codex"), "exec", *flags, asked], {}
        case "gemini-cli":
            return [_program("gemini-cli-0.61.0", "gemini"), "-p", asked, "--yolo"], {
                "GEMINI_CLI_TRUST_WORKSPACE": "true"
            }
        case "opencode":
            options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
            models = {"any": {"limit": {"context": 1 << 20, "output": 4096}}}
            steno = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
            config = {"permission": "allow", "share": "disabled", "autoupdate": False, "provider": {"steno": steno}}
            (work / "opencode.json").write_text(json.dumps(config))
            more = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
            return [_program("opencode-1.18.33", "opencode"), "run", "-m", "steno/any", asked], more
        case _:
            more = {
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            return ["mini", "-m", "openai/any", "-y", "--exit-immediately", "-t", asked], more


def _program(folder: str, name: str) -> str:
    return str(Path(os.environ["MATRIX_CACHE"]) / folder / "node_modules" / ".bin" / name)


async def _ran(command: Sequence[str], work: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """A command's exit code and output; cancelled, it is killed with its children."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode or 0, said.decode(errors="replace")


async def _sdk(asked: str, session: RolloutSession, work: Path) -> tuple[int, str]:
    """A loop of OpenAI's SDK, streamed, with a shell."""
    messages: list[Any] = [{"role": "system", "content": "Work by the shell."}, {"role": "user", "content": asked}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(12):
            async with client.chat.completions.stream(model="any", messages=messages, tools=_tools) as stream:
                said = (await stream.get_final_completion()).choices[0].message
            messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in said.tool_calls or ():
                command = json.loads(call.function.arguments)["command"]
                _, shown = await _ran(["sh", "-c", command], work, {"PATH": os.environ["PATH"]})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
            if not said.tool_calls:
                return 0, said.content or ""
    return 1, "it did not end"


async def _check(task: Mapping[str, Any], attempt: str, session: RolloutSession) -> int:
    """Write what the session's samples train; the number of its turns."""
    samples = await session.samples(include_side=True, include_failed=True)
    turns = [turn for sample in samples for turn in _trained(sample)]
    discarded: Any = samples.session_metadata.get("discarded") or {"turns": 0, "sampled_tokens": 0}
    row = {
        "session": session.id,
        "attempt": attempt,
        "harness": task["harness"],
        "kind": task["kind"],
        "samples": len(samples),
        "discarded": discarded["sampled_tokens"],
        "row_tokens": sum(len(sample.tokens) for sample in samples if sample.num_trained),
        "turns": turns,
    }
    await asyncio.to_thread(_write, row)
    return len(turns)


def _trained(sample: DecodedSample) -> list[dict[str, object]]:
    """The turns that a sample trains: digests of their prompt and of their ids, as the engine's log has them."""
    found = list[dict[str, object]]()
    for turn in sample.turns:
        start, end = int(str(turn["start"])), int(str(turn["end"]))
        mask = sample.loss_mask[start - sample.prompt_length : end - sample.prompt_length]
        if mask.any():
            kind = sample.metadata.get("kind")
            ids = sample.tokens[start:end]
            turn_row = {"prompt": digest(sample.tokens[:start]), "ids": digest(ids), "kind": kind, "end": end}
            found.append({**turn_row, "num": len(ids), "num_trained": int(mask.sum())})
    return found


def _write(row: Mapping[str, object]) -> None:
    with Path(os.environ["MATRIX_CHECKS"]).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")
