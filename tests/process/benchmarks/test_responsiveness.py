"""`stenograph bench …` as a process: a tiny run of each benchmark, end to end. What it measures is not asserted."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stenograph
from benchmarks.responsiveness.scenarios import SCENARIOS
from standins.tiny.llama import write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model, tiny, with room for the longest load."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny-model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**20}))
    return folder


def bench(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "stenograph.cli.main", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def last_line(stdout: str) -> Any:
    return json.loads(stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def tiny_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All scenarios, a fiftieth of each; the artifact and what was printed."""
    folder = tmp_path_factory.mktemp("run")
    done = bench(
        *("responsiveness", "--scale", "0.02", "--repeats", "1", "--model", str(model), "--out", "run.json"), cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run.json", done.stdout


@pytest.mark.timeout(600)
def test_a_tiny_run_of_every_scenario_ends_without_an_error_in_a_table_and_one_json_line(
    tiny_run: tuple[Path, str],
) -> None:
    artifact = json.loads(tiny_run[0].read_text())
    assert [result["name"] for result in artifact["scenarios"]] == [scenario.name for scenario in SCENARIOS]
    for result, scenario in zip(artifact["scenarios"], SCENARIOS, strict=True):
        assert set(result["figures"]) == ({"server"} if scenario.guided_tokens else {"direct", "server"})
        (figures,) = result["figures"]["server"]
        assert ({"idle_health_p99_ms", "health_p99_over_idle"} <= set(figures)) == scenario.beside_idle
        assert ("cpu_over_alone" in figures) == bool(scenario.idle_sessions)
        for repeats in result["figures"].values():
            assert [figures["errors"] for figures in repeats] == [0]
            assert repeats[0]["chats_per_s"] > 0
    assert artifact["machine"]["cores"] >= 1
    assert artifact["versions"]["uvloop"]
    line = last_line(tiny_run[1])
    assert (line["bench"], line["scale"], line["repeats"]) == ("responsiveness", 0.02, 1)
    assert set(line["figures"]) == {scenario.name for scenario in SCENARIOS}
    assert "| A " in tiny_run[1]


@pytest.mark.timeout(600)
def test_a_server_with_other_flags_is_measured_in_turn_with_the_first_at_each_level(
    model: Path, tmp_path: Path
) -> None:
    done = bench(
        *("responsiveness", "--scenario", "B", "--scale", "0.05", "--repeats", "1", "--model", str(model)),
        *("--levels", "1,3", "--server-flags=--cpu-workers 1", "--before-flags=--cpu-workers 2"),
        *("--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    artifact = json.loads((tmp_path / "run.json").read_text())
    assert [result["sessions"] for result in artifact["scenarios"]] == [1, 3]
    for result in artifact["scenarios"]:
        assert {target: len(repeats) for target, repeats in result["figures"].items()} == {
            "direct": 1,
            "server": 1,
            "before": 1,
        }
    assert artifact["arguments"]["server_flags"] == "--cpu-workers 1"
    assert "against before" in done.stdout


@pytest.mark.timeout(600)
def test_the_server_of_another_checkout_is_measured_in_turn_with_ours_and_the_ratios_are_shown(
    model: Path, tmp_path: Path
) -> None:
    checkout, marker = tmp_path / "before", tmp_path / "it-ran"
    shutil.copytree(Path(stenograph.__file__).parent, checkout / "src/stenograph")
    main = checkout / "src/stenograph/cli/main.py"
    main.write_text(main.read_text().replace("import sys\n", f"import sys\nopen({str(marker)!r}, 'w').close()\n", 1))
    done = bench(
        *("responsiveness", "--scenario", "W", "--scale", "0.05", "--repeats", "1", "--model", str(model)),
        *("--before", "before", "--out", "run.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists(), "the server before is that of the other checkout"
    artifact = json.loads((tmp_path / "run.json").read_text())
    (result,) = artifact["scenarios"]
    for target in ("server", "before"):
        (figures,), (raw,) = result["figures"][target], result["raw"][target]
        assert figures["errors"] == 0
        assert {"cpu_over_alone", "chat_p50_over_alone", "health_p99_over_alone"} <= figures.keys()
        assert figures["cpu_over_alone"] == pytest.approx(figures["cpu_ms_per_chat"] / raw["alone"]["cpu_ms_per_chat"])
    assert artifact["arguments"]["before_commit"] is None
    assert "server / before" in done.stdout
    median, least, most = last_line(done.stdout)["over_before"]["W"]["cpu_ms_per_chat"]
    assert median == least == most > 0


def test_a_run_compared_with_itself_is_noise_and_exit_code_0(tiny_run: tuple[Path, str]) -> None:
    run, _ = tiny_run
    done = bench("compare", run.name, run.name, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    verdicts = last_line(done.stdout)["verdicts"]
    assert len(verdicts) == len(SCENARIOS)
    assert {verdict for figures in verdicts.values() for verdict in figures.values()} == {"cannot be told from noise"}


def test_runs_that_differ_are_told_apart_and_what_makes_them_hard_to_compare_is_said(
    tiny_run: tuple[Path, str],
) -> None:
    run, _ = tiny_run
    slower = json.loads(run.read_text())
    faster = json.loads(run.read_text())
    slower["scenarios"][0]["figures"]["server"] = [{"cpu_ms_per_chat": cpu, "chats_per_s": 9} for cpu in (8, 9, 10)]
    faster["scenarios"][0]["figures"]["server"] = [{"cpu_ms_per_chat": cpu, "chats_per_s": 9} for cpu in (2, 3, 4)]
    faster["machine"]["cpu"] = "another"
    run.with_name("slower.json").write_text(json.dumps(slower))
    run.with_name("faster.json").write_text(json.dumps(faster))
    done = bench("compare", "slower.json", "faster.json", cwd=run.parent)
    name = next(name for name in last_line(done.stdout)["verdicts"] if name.startswith("A "))
    assert last_line(done.stdout)["verdicts"][name] == {
        "cpu_ms_per_chat": "better",
        "chats_per_s": "cannot be told from noise",
    }
    assert "NOTE they ran on different machines (cpu)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("responsiveness", "--scenario", "Z"), "'Z'"),
        (("responsiveness", "--model", "/nowhere"), "/nowhere"),
        (("responsiveness", "--before", "/nowhere"), "is no checkout"),
        (("compare", "/nowhere.json", "/nowhere.json"), "/nowhere.json"),
        (("plot", "/nowhere.json"), "/nowhere.json"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], says: str, refused: Callable[..., list[str]]
) -> None:
    (line,) = refused(*arguments)
    assert says in line


def bench_without_matplotlib(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """The same process on a machine that has no matplotlib: an import of it fails."""
    program = "import sys; sys.modules['matplotlib'] = None; from benchmarks.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


@pytest.mark.parametrize("name", ["responsiveness", "serving"])
def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    done = bench_without_matplotlib(name, "--plot", "latency.png", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_plots_of_artifacts_without_matplotlib_say_what_to_install(tiny_run: tuple[Path, str]) -> None:
    done = bench_without_matplotlib("plot", "run.json", cwd=tiny_run[0].parent)
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr


def test_an_artifact_is_drawn_into_a_folder_by_its_name(tiny_run: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = tiny_run
    done = bench("plot", run.name, "--out", str(tmp_path / "plots"), cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert last_line(done.stdout)["plots"] == [str(tmp_path / "plots" / "run.png")]


@pytest.mark.timeout(600)
def test_a_server_that_does_not_start_ends_the_run_with_its_own_words(model: Path, tmp_path: Path) -> None:
    flags = ("responsiveness", "--scenario", "B", "--scale", "0.02", "--repeats", "1", "--model", str(model))
    done = bench(*flags, "--server-flags=--no-such-flag", cwd=tmp_path)
    assert done.returncode == 2
    assert "no-such-flag" in done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_behind(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stenograph.cli.main", "bench", "responsiveness", "--scenario", "D"]
    with subprocess.Popen(
        [*command, "--model", str(model)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        children: list[int] = []
        while len(children) < 2:  # it has begun: a stand-in and a load at least
            children = children_of(process.pid)
            assert process.poll() is None
        handles = [os.pidfd_open(child) for child in children]
        process.send_signal(number)
        assert process.wait() == 130
    for handle in handles:
        assert select.select([handle], [], [], 0)[0], "a child still runs"
        os.close(handle)


def children_of(pid: int) -> list[int]:
    found = re.findall(r"\d+", Path(f"/proc/{pid}/task/{pid}/children").read_text())
    return [int(child) for child in found]
