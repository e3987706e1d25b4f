"""The folder of a run: it goes on after a cut at any byte, and takes no other run."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.envs.base import WrongEnvironment, chat_fields, environment
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


@contextmanager
def opened(path: Path) -> Iterator[RolloutFolder]:
    folder = RolloutFolder(path)
    with folder.held(FACTS):
        yield folder


@given(num_kept=st.integers(0, 4), cut=st.integers(0, 400))
def test_a_run_cut_anywhere_keeps_the_whole_lines_and_goes_on(num_kept: int, cut: int) -> None:
    with TemporaryDirectory() as name:
        path = Path(name)
        with opened(path) as folder:
            for number in range(num_kept):
                folder.add(replace(ENDED, number=number), b"payload")
        log = path / "rollouts.jsonl"
        size = log.stat().st_size if num_kept else 0
        if size:
            os.truncate(log, max(0, size - cut))
        num_whole = log.read_bytes().count(b"\n") if size else 0
        with opened(path) as again:
            assert [one.number for one in again] == list(range(num_whole))
            again.add(replace(ENDED, number=9), b"payload")
        with opened(path) as last:
            assert [one.number for one in last] == [*range(num_whole), 9]


def test_a_line_that_a_full_disk_cuts_is_taken_back_and_the_next_one_is_whole(tmp_path: Path) -> None:
    log, before = tmp_path / "rollouts.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as folder:
        folder.add(ENDED, b"payload")
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 20, before[1]))
        try:
            with pytest.raises(OSError, match=r"too large|cut"):
                folder.add(replace(ENDED, number=1, samples=None), None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        folder.add(replace(ENDED, number=2), b"payload")
    with opened(tmp_path) as again:
        assert [one.number for one in again] == [0, 2]


def test_rollouts_lost_by_infrastructure_or_cut_off_are_to_be_run_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        for number, end in enumerate(("ok", "agent_failed", "infra_failed", "aborted")):
            folder.add(replace(ENDED, number=number, end=end, samples=None), None)  # type: ignore[arg-type]
    assert [folder.is_done("a", number) for number in range(5)] == [True, True, False, False, False]


def test_a_folder_of_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    other = RolloutFolder(tmp_path).held({**FACTS, "seed": 1})
    with pytest.raises(WrongEnvironment, match="a run with seed 0, and this one has 1: name another folder"), other:
        pass


def test_a_folder_that_another_run_holds_is_refused(tmp_path: Path) -> None:
    said = pytest.raises(WrongEnvironment, match="another run writes to")
    with opened(tmp_path) as held, said, opened(tmp_path):
        pass
    assert not list(held)


@pytest.mark.parametrize("line", ["[]", "{}", '{"task": 1', "\xff", json.dumps({"task": "a", "what": 1})])
def test_a_list_of_other_lines_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "rollouts.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(WrongEnvironment, match="is no list of rollouts"), opened(tmp_path):
        pass


@given(st.text(max_size=300), st.integers(0, 9))
def test_samples_lie_in_the_folder_whatever_a_task_is_called(task: str, number: int) -> None:
    place = Path(place_of(task, number))
    assert place.parent == Path("samples")
    assert len(place.name) < 200


@pytest.mark.parametrize(("one", "other"), [("a/b", "a_b"), ("a/b", "a b"), ("数学", "代码"), ("x" * 130, "x" * 120)])
def test_no_two_tasks_have_one_place_for_their_samples(one: str, other: str) -> None:
    assert place_of(one, 0) != place_of(other, 0)


def test_a_file_may_have_dataclasses_with_annotations_as_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Mine:\n    name: str\n"
        "def tasks(): return [Mine('a')]\n"
        "async def run(task, session): return 1.0\n"
    )
    assert [task.id for task in environment(str(file), {}).tasks(limit=None, seed=None)] == ["0"]


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
        with pytest.raises(WrongEnvironment, match="possible are bfcl:NAME, inspect:NAME, reasoning-gym:NAME"):
            environment(spec, {})
    with pytest.raises(WrongEnvironment, match="is no file"):
        environment(str(tmp_path / "gone.py"), {})
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(WrongEnvironment, match="takes no options"):
        environment(str(tmp_path / "mine.py"), {"a": 1})


def test_what_an_environment_has_no_use_for_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def tasks(): return [1]\nasync def run(task, session): return 1")
    with pytest.raises(WrongEnvironment, match="takes no seed"):
        environment(str(file), {}).tasks(limit=None, seed=3)
    with pytest.raises(WrongEnvironment, match="chat is an object of request fields"):
        chat_fields({"chat": 3})


def test_a_run_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(WrongEnvironment, match="is no object"), opened(tmp_path):
        pass
