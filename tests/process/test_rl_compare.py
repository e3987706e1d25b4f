"""`scripts/rl compare`: several runs as a table and a picture, also those that are not over."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

COMPARE = Path(__file__).parents[2] / "examples" / "rl" / "compare.py"


def step(number: int, **figures: Any) -> str:
    """A line of steps.jsonl."""
    return json.dumps(
        {
            "step": number, "reward": 0.5, "success": 0.1 * number, "max_distance": 5e-5, "kl": 1e-11,
            "share_outside": 0.0, "num_tokens": 100, "drifted_samples": 0.0,
            "rollout_s": 10.0, "update_s": 15.0, "sync_s": 5.0, **figures,
        }
    )  # fmt: skip


def held(success: float) -> dict[str, float]:
    return {"success": success, "low": success - 0.05, "high": success + 0.05, "episodes": 96}


def folders(root: Path) -> list[Path]:
    """A clean run that is over, one with drift that goes on, and one of which nothing is known but its steps."""
    over, goes_on, bare = root / "none-0", root / "compact-0", root / "none-1"
    for folder in (over, goes_on, bare):
        folder.mkdir()
    (over / "steps.jsonl").write_text("".join(step(number, forbidden_drift=0) + "\n" for number in range(4)))
    summary = {"drift": "none", "seed": 0, "before": held(0.1), "after": held(0.9)}
    (over / "summary.json").write_text(json.dumps(summary))
    begun = {"drift": "compact-json", "seed": 0, "before": held(0.11)}
    (goes_on / "run.json").write_text(json.dumps(begun))
    drifted = [
        step(0, share_outside=0.1, share_outside_changed=None, drifted_samples=0.2),
        step(1, share_outside=0.3, share_outside_changed=0.75, num_tokens=300, max_distance=12.5, drifted_samples=0.4),
    ]
    (goes_on / "steps.jsonl").write_text("\n".join(drifted) + '\n{"step": 2, "rew')
    (bare / "steps.jsonl").write_text(step(0) + "\n")
    return [goes_on, bare, over]


def compared(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(COMPARE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_runs_of_one_kind_have_a_mean_with_the_interval_of_runs(tmp_path: Path) -> None:
    """Student's t over runs: of 0.8, 0.9 and 1.0 it is 4.303 · 0.1 / √3. One run alone has no interval."""
    folders = [tmp_path / f"run-{number}" for number in range(4)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "steps.jsonl").write_text(step(0, forbidden_drift=0) + "\n")
        known = {"stale": 2, "old": "recomputed", "truncate_ratios": 2.0} if number < 3 else {"stale": 2}
        summary = {"drift": "none", "seed": number, "before": held(0.1), "after": held(0.8 + number / 10), **known}
        (folder / "summary.json").write_text(json.dumps(summary))
    said = compared(*folders).stdout
    assert "| price: token-exact, old recomputed, truncate ratios 2.0, stale 2 | 3 | 1 | 0.90 ± 0.25 |" in said
    assert "| token-exact, stale 2, seed 3 | 1 |" in said
    assert "price: token-exact, stale 2 |" not in said


def test_the_interval_of_ten_runs_is_by_nine_degrees_of_freedom(tmp_path: Path) -> None:
    """0.1 times five and 0.5 times five: 2.262 · 0.2108 / √10, and by eight degrees it would be 0.154."""
    folders = [tmp_path / f"run-{number}" for number in range(10)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "steps.jsonl").write_text(step(0, forbidden_drift=0) + "\n")
        after = held(0.1 if number < 5 else 0.9)
        (folder / "summary.json").write_text(
            json.dumps({"drift": "none", "seed": number, "before": held(0.1), "after": after})
        )
    assert "| price: token-exact | 10 | 1 | 0.50 ± 0.30 |" in compared(*folders).stdout


def test_runs_are_a_table_and_a_picture_that_is_the_same_each_time(tmp_path: Path) -> None:
    runs = folders(tmp_path)
    done = compared(*runs, "--plot", tmp_path / "one.svg", "--table", tmp_path / "runs.md")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert (tmp_path / "runs.md").read_text() == done.stdout
    assert {len(row) for row in rows} == {10}
    over, bare, goes_on = rows[2:]
    assert over == [
        "token-exact, seed 0", "4", "0.10 (0.05 to 0.15)", "0.90 (0.85 to 0.95)", "none", "5.0e-05 nats", "1.0e-11",
        "none", "0", "2",
    ]  # fmt: skip
    assert bare[:4] == ["token-exact, none-1", "1, not over", "not yet", "not yet"]
    assert bare[8] == "not recorded"
    assert goes_on[:4] == ["compact-json, seed 0", "2, not over", "0.11 (0.06 to 0.16)", "not yet"]
    assert goes_on[4:8] == ["30%", "1.2e+01 nats", "1.0e-11", "25.0% (worst step 30.0%; of changed samples 75.0%)"]
    assert done.stderr == "not over: token-exact, none-1; compact-json, seed 0\n"
    picture = (tmp_path / "one.svg").read_text()
    assert re.search(r"token-exact \(2 seeds\)", picture)
    assert compared(*runs, "--plot", tmp_path / "two.svg").returncode == 0
    assert (tmp_path / "two.svg").read_text() == picture


def test_what_a_trainer_recomputes_is_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"drift": "re-render", "seed": 0}))
    (folder / "steps.jsonl").write_text(step(0, max_distance=0.0, drifted_samples=0.25) + "\n")
    assert compared(folder).stdout.count("nothing recorded") == 3


def test_a_page_has_its_table_between_marks(tmp_path: Path) -> None:
    runs, page = folders(tmp_path), tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- runs -->\nnothing yet\n<!-- /runs -->\n\nAfter.\n")
    shown = compared(*runs, "--table", page).stdout
    assert page.read_text() == f"Before.\n\n<!-- runs -->\n{shown}<!-- /runs -->\n\nAfter.\n"
    assert compared(*runs, "--table", page).returncode == 0
    assert page.read_text().count(shown) == 1
    page.write_text("Something else.\n")
    assert compared(*runs, "--table", page).returncode == 1
    assert page.read_text() == "Something else.\n"


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    done = compared(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} has no run" in done.stderr


def test_runs_unlike_in_steps_or_commit_or_of_changed_trees_have_no_mean(tmp_path: Path) -> None:
    """And other models or rates are another kind."""
    a, b = "a" * 40, "b" * 40
    runs = [
        ("old recomputed", 1, {"old": "recomputed"}, [a]), ("old recomputed", 2, {"old": "recomputed"}, [a]),
        ("stale 1", 1, {"stale": 1}, [a]), ("stale 1", 1, {"stale": 1}, [a, b]),
        ("updates 2", 1, {"updates": 2}, [f"{a}-dirty"]), ("updates 2", 1, {"updates": 2}, [f"{a}-dirty"]),
        ("model m, lr 0.001", 1, {"model": "m", "lr": 1e-3}, [a]), ("", 1, {}, [a]),
        ("cold steps 0", 1, {"cold_steps": 0}, [a]), ("stale 2", 1, {"stale": 2}, [a]),
        ("stale 2", 1, {"stale": 2, "cold_steps": 7}, [a]),
    ]  # fmt: skip
    folders = [tmp_path / f"run-{number}" for number in range(len(runs))]
    for seed, (folder, (_, num_steps, options, commits)) in enumerate(zip(folders, runs, strict=True)):
        folder.mkdir()
        (folder / "steps.jsonl").write_text("".join(step(number) + "\n" for number in range(num_steps)))
        (folder / "run.json").write_text(json.dumps({**options, "seed": seed, "commits": commits}))
        (folder / "summary.json").write_text(json.dumps({"after": held(0.5)}))
    said = compared(*folders).stdout
    means = said.partition("| runs of one kind")[2].splitlines()[2:]
    assert means == [
        "| price: token-exact, old recomputed | 2 | 1 or 2 | no mean: the steps differ |",
        f"| price: token-exact, stale 1 | 2 | 1 | no mean: the commits differ ({a[:12]}, {b[:12]}) |",
        f"| price: token-exact, updates 2 | 2 | 1 | no mean: uncommitted changes ({a[:12]}-dirty) |",
        "| price: token-exact, stale 2 | 2 | 1 | 0.50 ± 0.00 |",
    ]
    for seed, (kind, *_) in enumerate(runs):
        assert f"| {', '.join(filter(None, ('token-exact', kind)))}, seed {seed} |" in said
