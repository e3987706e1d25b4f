"""`stenograph rollout` as a process: what it prints and leaves, Ctrl-C, and environments by others."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from standins.teacher_forcing import line_logprobs
from standins.tiny.llama import write_tiny_folder
from stenograph.client import tree_of
from stenograph.client.samples import decoded
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.envs.folder import RolloutFolder
from stenograph.trainers.trees import packed

from .test_serve import command

pytestmark = pytest.mark.timeout(600)

MINE = """
from stenograph.envs.chat import chat

def tasks():
    return [{"id": name, "name": name} for name in ("a", "b")]

async def run(task, session):
    async with chat(session, {"max_tokens": 4, "ignore_eos": True}) as talk:
        await talk.say([{"role": "user", "content": task["name"]}])
    return 0.5
"""


def rollout(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("rollout", *arguments), capture_output=True, text=True, check=False)


def kept(folder: Path) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_a_file_is_run_and_goes_on_with_a_larger_group(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(MINE)
    flags = (str(file), "--out", str(out), "--model", str(write_tiny_folder(tmp_path / "model")))
    first = rollout(*flags)
    assert first.returncode == 0, first.stderr
    assert "2 rollouts of 2 tasks: 2 ok" in first.stderr
    assert "8 trained tokens in" in first.stderr
    second = rollout(*flags, "--group-size", "2")
    assert second.returncode == 0, second.stderr
    rows = kept(out)
    assert sorted((row["task"], row["number"]) for row in rows) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    for row in rows:
        (sample,) = decoded((out / str(row["samples"])).read_bytes())
        assert sample.num_trained == row["num_trained"] == 4
        assert sample.reward == row["reward"] == 0.5
        assert sample.metadata["group"] == row["task"]


def test_what_cannot_be_begun_is_one_line_and_starts_no_server(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    out = str(tmp_path / "out")
    for arguments, said in (
        (("nothing:x",), "there is no environment 'nothing:x'"),
        ((str(file), "--env-options", "{"), "--env-options: this is no JSON"),
        ((str(file), "--group-size", "0"), "a number from 1 on is expected, got '0'"),
        ((str(file), "--url", "http://127.0.0.1:9/v1"), "more than the server's address"),
    ):
        ended = rollout(*arguments, "--out", out)
        assert ended.returncode == 2
        assert said in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(
        MINE.replace("return 0.5", "print('waits', flush=True); import asyncio; await asyncio.Event().wait()")
    )
    flags = ("rollout", str(file), "--out", str(out), "--model", str(write_tiny_folder(tmp_path / "model")))
    process = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert f"interrupted; the same command goes on with {out}" in said
    assert list(RolloutFolder(out)) == []


@pytest.mark.envs
def test_reasoning_gym_scores_what_a_real_model_samples(tmp_path: Path) -> None:
    for name in ("leg_counting", "basic_arithmetic", "chain_sum", "word_sorting", "simple_equations", "countdown"):
        out = tmp_path / name
        chat = {"chat": {"max_tokens": 48}}
        ended = rollout(
            f"reasoning-gym:{name}", "--out", str(out), "--num-tasks", "2", "--group-size", "2",
            "--env-options", json.dumps(chat),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        rows = kept(out)
        assert len(rows) == 4
        for row in rows:
            assert row["end"] == "ok", row
            assert 0 <= float(str(row["reward"])) <= 1
            (sample,) = decoded((out / str(row["samples"])).read_bytes())
            assert sample.num_trained == row["num_trained"]
            assert sample.num_trained > 0
            assert sample.reward == row["reward"]
    refused = rollout("reasoning-gym:leg_countin", "--out", str(tmp_path / "no"))
    assert refused.returncode == 2
    assert "has no dataset 'leg_countin'; of its 106 are leg_counting" in refused.stderr


def test_errand_branches_on_the_embedded_engine_and_each_branch_is_exact(tmp_path: Path) -> None:
    out, model = tmp_path / "out", write_tiny_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    env = Path(__file__).parents[2] / "examples" / "rl" / "errand_env.py"
    flags = ("--out", str(out), "--model", str(model), "--family", "smollm2", "--num-tasks", "1", "--group-size", "2")
    done = rollout(str(env), *flags, "--fork-at", "entropy:3")
    assert done.returncode == 0, done.stderr
    assert "6 branches" in done.stderr
    scorer = NumpyForward(*load_weights(model), num_kv_tokens=4096)
    for row in kept(out):
        branches = cast("list[dict[str, object]]", row["branches"])
        assert [one["end"] for one in branches] == ["ok"] * 3
        (base,), *forks = (decoded((out / str(place)).read_bytes()) for place in [row["samples"], *_places(branches)])
        tree = tree_of([base, *(sample for fork in forks for sample in fork)])
        pack = packed(tree)
        assert len(tree.tokens) < tree.num_flat / 2, "the history is there once"
        for number, sample in enumerate(tree.samples()):
            nats = np.array(line_logprobs(scorer, sample.tokens.tolist(), sample.prompt_length))
            of_sample = pack.log_probs[pack.samples == number]
            assert np.abs(nats[sample.loss_mask == 1] - of_sample).max(initial=0.0) <= 1e-4
    assert "entropy:N is expected" in rollout(str(env), *flags, "--fork-at", "4").stderr


def _places(branches: list[dict[str, object]]) -> list[str]:
    return [str(one["samples"]) for one in branches]
