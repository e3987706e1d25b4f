"""`stenograph fork` as a process: an agent begins anew, and samples from the place of the fork on."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .test_run import python
from .test_run_kept import without_pyarrow
from .test_serve import command, get, post, running, stop

pytestmark = pytest.mark.timeout(600)

SAYS = """
import openai

with openai.OpenAI(max_retries=0) as client:
    messages, said = [{"role": "user", "content": "hi"}], []
    for text in ("more", "bye"):
        reply = client.chat.completions.create(model="any", messages=messages, max_tokens=8, temperature=1.5)
        said.append(reply.id)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": text}]
print(*said)
"""
"""An agent of two turns, that prints the ids of its replies."""


def ran(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env={**os.environ})


def recorded(*flags: str) -> tuple[str, list[str]]:
    """A session that stays, and the ids of its replies."""
    done = ran("run", *flags, "--keep", *python(SAYS))
    assert done.returncode == 0, done.stderr
    (session,) = re.findall(r"session ([0-9a-f]{32}) stays", done.stderr)
    return session, done.stdout.split()


def samples_of(file: Path) -> dict[str, Any]:
    (sample,) = json.loads(file.read_text())["samples"]
    return dict(sample)


def test_an_agent_begins_anew_on_each_fork_of_a_kept_session(tiny: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny), "--data-dir", str(tmp_path / "data"))
    session, before = recorded(*flags)
    out = tmp_path / "out.json"
    done = ran("fork", session, "--turn", "1", "--token", "3", "-n", "2", "--samples", str(out), *flags, *python(SAYS))
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert [first for first, _ in said] == [before[0]] * 2, "the first reply is the recorded one"
    assert len({second for _, second in said} | {before[1]}) == 3
    assert ("fork 1 of 2" in done.stderr, "fork 2 of 2" in done.stderr) == (True, True)
    made = [samples_of(out.with_stem(f"out-{number}")) for number in (1, 2)]
    for sample in made:
        assert sample["metadata"]["forked_from"] == {"session": session, "turn": 1, "token": 3}
        assert [row["inherited"] for row in sample["turns"]] == [8, 3]
        assert sum(sample["loss_mask"]) == 5
    assert len({sample["metadata"]["custody"]["session_id"] for sample in made} | {session}) == 3, "forks are sessions"
    left = ran("inspect", str(tmp_path / "data"))
    assert re.findall(r"[0-9a-f]{32}", left.stdout) == [session], "the forks were deleted"


def test_a_fork_of_a_running_server_stays_if_it_is_to(tiny: Path) -> None:
    with running("--model", str(tiny)) as (url, process):
        session, before = recorded("--url", url)
        done = ran("fork", session, "--turn", "0", "--group", "branch", "--url", url, "--keep", *python(SAYS))
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[0] == before[0]
        (fork,) = re.findall(r"session ([0-9a-f]{32}) stays", done.stderr)
        metadata = get(f"{url}/sessions/{fork}")["metadata"]
        assert (metadata["group"], metadata["forked_from"]["session"]) == ("branch", session)
        other = ran("fork", session, "--turn", "1", "--url", url, *python(SAYS.replace('"hi"', '"ho"')))
        assert len(other.stdout.split()) == 2, "without tools, a request that parts at once is of other work"
        parts = ran("fork", session, "--turn", "1", "--url", url, *python(SAYS.replace('"more"', '"less"')))
        assert parts.returncode != 0
        assert "turn 1, message 2 (user), content, character 0: recorded 'more', sent 'less'" in parts.stderr
        assert post(f"{url}/sessions/{session}/samples", {"format": "json"})["samples"]
        assert stop(process) == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "--turn"),
        (("--turn", "1"), "give --url, or the --data-dir or --store"),
        (("--turn", "1", "-n", "0"), "a number from 1 on"),
        (("--turn", "1", "--session", "{}"), "--session"),
    ],
)
def test_a_fork_of_nothing_ends_with_a_line(flags: tuple[str, ...], told: str) -> None:
    done = ran("fork", "0" * 32, *flags, *python("pass"))
    assert (done.returncode, told in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_a_page_of_a_later_fork_that_is_there_stops_the_first(tmp_path: Path) -> None:
    (tmp_path / "out-2.html").write_text("mine")
    flags = ("--turn", "1", "-n", "2", "--html", str(tmp_path / "out.html"), "--data-dir", str(tmp_path / "data"))
    done = ran("fork", "0" * 32, *flags, *python("pass"))
    assert (done.returncode, "out-2.html' is there already" in done.stderr) == (2, True), done.stderr
    assert "starting a server" not in done.stderr


def test_a_server_that_does_not_answer_is_no_wrong_place(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    done = ran("fork", "0" * 32, "--turn", "1", "--url", url, *python("pass"))
    assert (done.returncode, f"no fork at {url}: the server does not answer" in done.stderr) == (2, True), done.stderr
    assert "--turn" not in done.stderr


def test_a_session_and_a_place_that_are_not_there_are_told(tiny: Path) -> None:
    with running("--model", str(tiny)) as (url, process):
        done = ran("fork", "0" * 32, "--turn", "1", "--url", url, *python("pass"))
        assert (done.returncode, "session ID: " in done.stderr) == (2, True), done.stderr
        session = post(f"{url}/sessions")["session_id"]
        done = ran("fork", session, "--turn", "7", "--url", url, *python("pass"))
        assert (done.returncode, "no turn 7" in done.stderr) == (2, True), done.stderr
        assert stop(process) == 0


def test_a_format_that_a_running_server_cannot_write_stops_the_first(tiny: Path, tmp_path: Path) -> None:
    environ = without_pyarrow(tmp_path / "none")
    with running("--model", str(tiny), environ=environ) as (url, process):
        session, _ = recorded("--url", url)
        place = ("--turn", "1", "-n", "2", "--samples", str(tmp_path / "x.arrow"), "--url", url)
        done = ran("fork", session, *place, *python("print('ran')"))
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert ("--samples: the server at http://" in done.stderr, "pyarrow" in done.stderr) == (True, True)
        assert [one["session_id"] for one in get(f"{url}/sessions")["sessions"]] == [session]
        assert stop(process) == 0
