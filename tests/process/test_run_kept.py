"""A rollout of `stenograph run` is not lost: full disks, formats that cannot be written, what is kept on purpose."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from .test_run import python, run
from .test_serve import command, get

pytestmark = pytest.mark.timeout(600)

TURNS = """
import os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 1}'
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).read()
sys.exit(int(os.environ.get("CODE", "0")))
"""
"""An agent that makes one turn."""

SMALL_BYTES = 4096
"""Of a disk, or of a file: the samples of that turn have more."""


def session_of(log: str) -> str:
    return re.findall(r"session ([0-9a-f]{32})", log)[0]


def is_there(url: str, session_id: str) -> bool:
    try:
        get(f"{url}/sessions/{session_id}")
    except urllib.error.HTTPError as error:
        return error.code != 404
    return True


def without_pyarrow(folder: Path) -> dict[str, str]:
    """The environment of a Python that has none."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, importlib.machinery\n"
        "class Finder(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.split('.')[0] == 'pyarrow' else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_a_format_that_cannot_be_written_stops_the_start(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.arrow"
    environ = without_pyarrow(tmp_path / "none")
    done = run("--model", str(tiny), "--samples", str(file), *python("print('ran')"), environ=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"stenograph: --samples: {str(file)!r} needs pyarrow, which is not installed: pip install pyarrow, or name a"
        " .safetensors or .json file\n"
    )


def test_a_format_that_a_running_server_cannot_write_stops_the_start(tiny: Path, tmp_path: Path) -> None:
    environ = without_pyarrow(tmp_path / "none")
    serving = [sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--model", str(tiny)]
    environ = {**os.environ, **environ}
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        url = re.findall(r"http://\S+", process.stdout.readline())[0]
        done = run("--url", url, "--samples", str(tmp_path / "x.arrow"), *python("print('ran')"))
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "--samples: the server at http://" in done.stderr
        assert "pyarrow" in done.stderr
        assert get(f"{url}/sessions")["sessions"] == []
        process.send_signal(signal.SIGTERM)


def test_a_full_disk_sends_the_samples_elsewhere_and_keeps_the_session(server: str, tmp_path: Path) -> None:
    disk, other = tmp_path / "disk", tmp_path / "other"
    disk.mkdir()
    other.mkdir()
    mount = f"mount -t tmpfs -o size={SMALL_BYTES} tmpfs {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system of its own (unshare -rm)")
    line = [*command("run", "--url", server, "--samples", str(disk / "out.safetensors")), *python(TURNS)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *line],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(other)},
    )
    assert done.returncode == 1, done.stderr
    session_id = session_of(done.stderr)
    place = other / f"stenograph-{session_id}.safetensors"
    assert (
        f"cannot write {disk / 'out.safetensors'}: No space left on device. Written elsewhere: samples in {place}"
        in done.stderr
    )
    assert place.stat().st_size > SMALL_BYTES
    assert f"session {session_id} stays: {server}/console#/session/{session_id}" in done.stderr
    assert is_there(server, session_id)


def limited(*arguments: str, size: int) -> "subprocess.Popen[str]":
    """A run that may write no file above a size: for it, every disk is full."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    return subprocess.Popen(
        command("run", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,  # noqa: PLW1509 - no other thread runs here
    )


def test_where_nothing_can_be_written_a_session_of_a_running_server_stays(server: str, tmp_path: Path) -> None:
    with limited("--url", server, "--samples", str(tmp_path / "x.json"), *python(TURNS), size=SMALL_BYTES) as process:
        _, log = process.communicate()
    assert process.returncode == 1, log
    assert "NO SAMPLES: cannot write" in log
    assert "File too large" in log
    assert is_there(server, session_of(log))
    assert not list(tmp_path.iterdir())


def test_a_server_of_its_own_waits_until_its_samples_have_a_place(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with limited("--model", str(tiny), "--samples", str(file), *python(TURNS), size=SMALL_BYTES) as process:
        assert process.stderr is not None
        log = ""
        for line in process.stderr:
            log += line
            if "Ctrl-C gives them up" in line:
                hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert process.wait(60) == 0, log
    assert "NO SAMPLES YET: cannot write" in log
    assert len(json.loads(file.read_text())["samples"]) == 1


def test_a_session_in_a_folder_stays_there_where_its_samples_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    data, files = tmp_path / "data", tmp_path / "files"
    files.mkdir()
    flags = ("--model", str(tiny), "--data-dir", str(data), "--keep")
    done = run(*flags, "--session", '{"metadata": {"task": 7}}', *python(TURNS), environ={"CODE": "5"})
    assert done.returncode == 5, done.stderr
    session_id = session_of(done.stderr)
    assert f"session {session_id} stays in {data}: `stenograph export` writes its samples from there" in done.stderr
    exported = subprocess.run(
        command("export", str(data), "--model", str(tiny), "--out", str(files / "all.json"), "--format", "json"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert exported.returncode == 0, exported.stderr
    assert len(json.loads((files / "all.json").read_text())["samples"]) == 1


def test_keep_without_a_place_for_it_is_refused(tiny: Path) -> None:
    done = run("--model", str(tiny), "--keep", *python("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--keep: the server that is started here ends with the command" in done.stderr


def test_options_of_the_session_and_its_page(server: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = '{"history": "linear", "max_turns": 3, "metadata": {"task": 7}}'
    done = run("--url", server, "--keep", "--html", str(page), "--session", options, *python(TURNS))
    assert done.returncode == 0, done.stderr
    session_id = session_of(done.stderr)
    assert session_id in page.read_text()
    (listed,) = [
        one for one in get(f"{server}/sessions?metadata.task=7")["sessions"] if one["session_id"] == session_id
    ]
    assert listed["metadata"] == {"task": 7}
    assert f"watch it at {server}/console#/session/{session_id}" in done.stderr
    assert re.search(r"^stenograph:   note: ", done.stderr, re.MULTILINE), (
        "the findings, such as that there is no reward"
    )
    assert done.stderr.splitlines()[-1].startswith(f"stenograph: session {session_id} stays: ")
    again = run("--url", server, "--html", str(page), *python("print('ran')"))
    assert (again.returncode, again.stdout) == (2, "")
    assert "is there already" in again.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "--session: this is no JSON: "),
        ("[]", '--session: a JSON object is expected, such as {"max_turns": 50}'),
        ('{"max_turn": 3}', "--session: "),
        ('{"history": "round"}', "--session: "),
    ],
)
def test_a_bad_option_of_the_session_stops_the_start(server: str, text: str, says: str) -> None:
    done = run("--url", server, "--session", text, *python("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"stenograph: {says}")
    assert done.stderr.count("\n") == 1


def test_a_session_whose_samples_are_written_is_gone(server: str, tmp_path: Path) -> None:
    done = run("--url", server, "--samples", str(tmp_path / "x.safetensors"), *python(TURNS))
    assert done.returncode == 0, done.stderr
    assert not is_there(server, session_of(done.stderr))


def test_samples_are_written_where_nobody_reads_what_is_said(tiny: Path, tmp_path: Path) -> None:
    """As after `2>&1 | head`: stderr is a pipe whose reader has gone, from the first line on."""
    file, page = tmp_path / "x.json", tmp_path / "x.html"
    reader, writer = os.pipe()
    os.close(reader)
    line = command("run", "--model", str(tiny), "--samples", str(file), "--html", str(page), *python(TURNS))
    code = subprocess.run(line, stderr=writer, check=False, env={**os.environ, "CODE": "5"}).returncode
    os.close(writer)
    assert len(json.loads(file.read_text())["samples"]) == 1
    assert page.is_file()
    assert code == 5


def test_samples_in_the_folder_for_temporary_files_are_their_owner_s_alone(server: str, tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    agent = f"import os\nos.rmdir({str(folder)!r})\n{TURNS}"
    line = command("run", "--url", server, "--samples", str(folder / "x.json"), *python(agent))
    environ = {**os.environ, "TMPDIR": str(other)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environ, umask=0o022)
    place = other / f"stenograph-{session_of(done.stderr)}.json"
    assert f"Written elsewhere: samples in {place}" in done.stderr
    assert place.stat().st_mode & 0o777 == 0o600
    asked = command("run", "--url", server, "--samples", str(tmp_path / "x.json"), *python(TURNS))
    subprocess.run(asked, capture_output=True, check=True, umask=0o022)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644, "a file that was asked for is as any other"
