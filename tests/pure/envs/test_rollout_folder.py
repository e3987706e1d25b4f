"""The folder of a run: it goes on after a cut at any byte, and takes no other run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.envs.base import WrongEnvironment, environment
from stenograph.envs.folder import EndedRollout, RolloutFolder, place_of

FACTS = {"environment": "mine.py", "options": {}, "seed": 0, "session": {}}
ENDED = EndedRollout(
    task="a",
    number=0,
    session="s",
    end="ok",
    reward=1.0,
    seconds=0.5,
    num_tries=1,
    num_trained=3,
    samples=place_of("a", 0),
    error=None,
)


def opened(path: Path) -> RolloutFolder:
    folder = RolloutFolder(path)
    folder.open(FACTS)
    return folder


@given(num_kept=st.integers(0, 4), cut=st.integers(0, 400))
def test_a_run_cut_anywhere_keeps_the_whole_lines_and_goes_on(num_kept: int, cut: int) -> None:
    with TemporaryDirectory() as name:
        path = Path(name)
        folder = opened(path)
        for number in range(num_kept):
            folder.add(replace(ENDED, number=number), b"payload")
        log = path / "rollouts.jsonl"
        size = log.stat().st_size if num_kept else 0
        if size:
            os.truncate(log, max(0, size - cut))
        num_whole = log.read_bytes().count(b"\n") if size else 0
        del folder
        again = opened(path)
        assert [one.number for one in again] == list(range(num_whole))
        again.add(replace(ENDED, number=9), b"payload")
        del again
        assert [one.number for one in opened(path)] == [*range(num_whole), 9]


def test_rollouts_lost_by_infrastructure_or_cut_off_are_to_be_run_again(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for number, end in enumerate(("ok", "agent_failed", "infra_failed", "aborted")):
        folder.add(replace(ENDED, number=number, end=end, samples=None), None)  # type: ignore[arg-type]
    assert [folder.is_done("a", number) for number in range(5)] == [True, True, False, False, False]


def test_a_folder_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = RolloutFolder(tmp_path)
    folder.open(FACTS)
    del folder
    with pytest.raises(WrongEnvironment, match="a run with seed 0, and this one has 1: name another folder"):
        RolloutFolder(tmp_path).open({**FACTS, "seed": 1})


def test_a_folder_that_another_run_holds_is_refused(tmp_path: Path) -> None:
    held = opened(tmp_path)
    with pytest.raises(WrongEnvironment, match="another run writes to"):
        opened(tmp_path)
    assert not list(held)


@pytest.mark.parametrize("line", ["[]", "{}", '{"task": 1', "\xff", json.dumps({"task": "a", "what": 1})])
def test_a_list_of_other_lines_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "rollouts.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(WrongEnvironment, match="is no list of rollouts"):
        opened(tmp_path)


@given(st.text(max_size=300), st.integers(0, 9))
def test_samples_lie_in_the_folder_whatever_a_task_is_called(task: str, number: int) -> None:
    place = Path(place_of(task, number))
    assert place.parent == Path("samples")
    assert len(place.name) < 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no environment: it needs def tasks"),
        ("def tasks(): return []\ndef run(task, session): return 1", "is no environment"),
        ("1/0", "cannot be run: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_is_no_environment_says_so(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(WrongEnvironment, match=said):
        environment(str(file), {})


def test_names_of_no_environment_are_refused_with_those_that_there_are(tmp_path: Path) -> None:
    for spec in ("nothing", "nothing:x", "reasoning_gym:legs"):
        with pytest.raises(WrongEnvironment, match="possible are bfcl:NAME, reasoning-gym:NAME"):
            environment(spec, {})
    with pytest.raises(WrongEnvironment, match="is no file"):
        environment(str(tmp_path / "gone.py"), {})
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(WrongEnvironment, match="takes no options"):
        environment(str(tmp_path / "mine.py"), {"a": 1})
