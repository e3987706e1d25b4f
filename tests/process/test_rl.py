"""`scripts/rl` on the tiny model: it runs, its log-probabilities are the recorded ones, its faults are seen, an
interrupted run goes on, and TRL's trainer takes the same steps."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from standins.tiny.llama import write_tiny_folder
from tests.process.test_exit_with import below, ending

if "TEST_TRAINERS" not in os.environ:  # scripts/test-trainers has it
    pytest.importorskip("torch", reason="torch is an extra; scripts/test-trainers runs this")

TRAIN = Path(__file__).parents[2] / "examples" / "rl" / "train.py"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model, with room for a conversation."""
    folder = write_tiny_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


def command(model: Path, out: Path, *options: object) -> list[str]:
    """A run of two steps of two items with two rollouts each."""
    small = ("--steps", 2, "--prompts", 2, "--group-size", 2, "--episodes", 4, "--cold-steps", 1, "--threads", 1)
    given = ("--model", model, "--family", "smollm2", "--out", out, *small, *options)
    return [sys.executable, str(TRAIN), *map(str, given)]


def trained(model: Path, out: Path, *options: object) -> tuple[str, list[dict[str, Any]]]:
    """What a run printed, and its steps."""
    done = subprocess.run(command(model, out, *options), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, steps_of(out)


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def check_exact(steps: list[dict[str, Any]]) -> None:
    """Each step is sampled by the weights of the one before, and its log-probabilities are recomputed."""
    assert [step["versions"] for step in steps] == [[str(number)] for number in range(len(steps))]
    assert sum(step["other_version_tokens"] + step["forbidden_drift"] for step in steps) == 0
    assert max(step["max_distance"] for step in steps) <= 1e-4
    assert max(step["kl"] for step in steps) <= 1e-8
    assert max(step["share_outside"] for step in steps) == 0.0


@pytest.mark.parametrize("task", ["price", "errand"])
def test_two_steps_on_the_tiny_model(tmp_path: Path, model: Path, task: str) -> None:
    told, steps = trained(model, tmp_path / "out", "--task", task)
    check_exact(steps)
    assert "held-out success after" in told
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["broken_promises"] == []
    again = subprocess.run(command(model, tmp_path / "out"), capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "has a run that is over" in again.stderr


@pytest.mark.parametrize("drift", ["shift", "re-render"])
def test_a_fault_is_seen(tmp_path: Path, model: Path, drift: str) -> None:
    _, steps = trained(model, tmp_path / "out", "--drift", drift)
    if drift == "shift":
        assert max(step["max_distance"] for step in steps) > 1e-2
    else:
        assert min(step["drifted_samples"] for step in steps) > 0
        assert [step["drifted_samples"] for step in steps] == [step["changed_renders"] for step in steps]


OTHERWISE = (
    *("--stale", 1, "--updates", 2, "--old", "recomputed", "--truncate-ratios", 2, "--dual-clip", 3),
    *("--max-grad-norm", 1, "--temperature", 1.3, "--engine-weights", "bfloat16"),
)


def test_a_run_says_what_is_otherwise_in_it_and_samples_with_the_weights_that_it_says(
    tmp_path: Path, model: Path
) -> None:
    """Also where it was interrupted: its checkpoint has the older weights beside it."""
    _, steps = trained(model, tmp_path / "whole", "--steps", 4, *OTHERWISE)
    assert [step["versions"] for step in steps] == [["0"], ["0"], ["1"], ["2"]]
    assert sum(step["other_version_tokens"] + step["forbidden_drift"] for step in steps) == 0
    assert max(step["max_distance"] for step in steps) > 1e-4  # of bfloat16, and of other weights
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["stale"] == 1
    asked = command(model, tmp_path / "out", "--steps", 4, "--checkpoint-every", 2, *OTHERWISE)
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step   3"))
        process.terminate()
    _, again = trained(model, tmp_path / "out", "--steps", 4, "--checkpoint-every", 2, *OTHERWISE)
    assert [step["tokens"] for step in again] == [step["tokens"] for step in steps]


@pytest.mark.parametrize("task", ["price", "errand"])
def test_an_exact_run_stays_exact_at_another_temperature_and_under_a_grammar(
    tmp_path: Path, model: Path, task: str
) -> None:
    _, steps = trained(model, tmp_path / "out", "--task", task, "--temperature", 1.3, "--forced-calls")
    check_exact(steps)


def test_the_seed_decides_what_is_sampled(tmp_path: Path, model: Path) -> None:
    """Batches are other ones each time, and so are the last bits of the log-probabilities; the tokens are not."""
    _, steps = trained(model, tmp_path / "a", "--seed", 3, "--threads", 2)
    _, again = trained(model, tmp_path / "b", "--seed", 3, "--threads", 2)
    _, other = trained(model, tmp_path / "c", "--seed", 4)
    assert [step["tokens"] for step in again] == [step["tokens"] for step in steps]
    assert {step["tokens"] for step in other}.isdisjoint(step["tokens"] for step in steps)
    held_out = [json.loads((tmp_path / name / "summary.json").read_text())["after"] for name in "ab"]
    assert held_out[0] == held_out[1]


def test_a_student_is_pulled_to_its_teacher_by_scores_alone(tmp_path: Path, model: Path) -> None:
    """No rollout of a random model is rewarded; the mean distance of its tokens to the teacher falls all the same."""
    teacher, out, sharp = tmp_path / "teacher", tmp_path / "out", ("--cold-steps", 4, "--cold-lr", "1e-3")
    trained(model, teacher, *sharp, "--lr", 0)
    asked = ("--teacher", teacher, "--cold-steps", 0, "--steps", 6, "--lr", "1e-3", "--checkpoint-every", 1)
    with subprocess.Popen(command(model, out, *asked), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step   2"))
        process.terminate()
    told, steps = trained(model, out, *asked)
    assert "goes on after" in told
    check_exact(steps)
    assert {step["reward"] for step in steps} == {0.0}
    assert steps[-1]["reverse_kl"] < steps[0]["reverse_kl"] / 2
    _, itself = trained(model, tmp_path / "same", "--teacher", teacher, *sharp, "--steps", 1)
    assert abs(itself[0]["reverse_kl"]) < 1e-5  # the same weights, scored and sampled


def test_a_teacher_is_a_run_that_is_over(tmp_path: Path, model: Path) -> None:
    for options, code, words in (
        (("--teacher", tmp_path), 1, "names the folder of a run that is over"),
        (("--teacher", tmp_path, "--drift", "mask"), 2, "without --drift"),
    ):
        done = subprocess.run(command(model, tmp_path / "b", *options), capture_output=True, text=True, check=False)
        assert (done.returncode, words in done.stderr) == (code, True)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no descriptors of processes")
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path, model: Path) -> None:
    asked = command(model, tmp_path / "out", "--steps", 40)
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step   1"))
        pids = below(process.pid)
        assert len(pids) >= 2  # the server, and its engine's process
        with ending(pids):
            process.kill()


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, model: Path) -> None:
    """By steps that are done, with the questions and the samples of the whole run."""
    _, whole = trained(model, tmp_path / "whole", "--steps", 3)
    out = tmp_path / "out"
    asked = command(model, out, "--steps", 3, "--checkpoint-every", 2)
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step   2"))  # the second step's checkpoint is there
        process.terminate()
    done = steps_of(out)
    other = subprocess.run([*asked, "--lr", "1e-3"], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "has a run with other options (lr 2e-05, now 0.001)" in other.stderr
    told, steps = trained(model, out, "--steps", 3, "--checkpoint-every", 2)
    assert "goes on after 2 steps that are done" in told
    assert steps[:2] == done[:2]
    check_exact(steps)
    assert [step["items"] for step in steps] == [step["items"] for step in whole]
    assert [step["tokens"] for step in steps] == [step["tokens"] for step in whole]
    assert not (out / "checkpoint.pt").exists()


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="scripts/test-trainers installs trl")
@pytest.mark.parametrize("drift", ["none", "re-render"])
def test_trl_s_trainer_takes_the_same_steps(tmp_path: Path, model: Path, drift: str) -> None:
    """On the same questions; each of its updates is swapped in, and the next step is sampled by it."""
    _, steps = trained(model, tmp_path / "out", "--trainer", "trl", "--drift", drift)
    _, own = trained(model, tmp_path / "own")
    assert [step["items"][::2] for step in steps] == [step["items"] for step in own]
    if drift == "none":
        check_exact(steps)
    else:
        assert min(step["drifted_samples"] for step in steps) > 0


def test_trl_is_not_asked_to_show_what_it_cannot(tmp_path: Path, model: Path) -> None:
    asked = command(model, tmp_path / "out", "--trainer", "trl", "--drift", "shift")
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "does not read recorded log-probabilities" in done.stderr
