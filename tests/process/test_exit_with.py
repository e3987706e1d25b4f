"""`--exit-with`: a server and all of its processes end with the process that it was started for, however that ends."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from standins.tiny.llama import write_tiny_folder
from tests.process.test_serve import command, running, stop

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no descriptors of processes"),
]

END_S = 60.0
"""Longest time that the processes may take to end; a busy machine takes its time."""


def below(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    children = [
        int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
    ]
    return [other for child in children for other in (child, *below(child))]


@contextmanager
def ending(pids: list[int]) -> Iterator[None]:
    """Fails if one of the processes is there `END_S` after the block."""
    with ExitStack() as stack:
        descriptors = [os.pidfd_open(pid) for pid in pids]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        yield
        for pid, descriptor in zip(pids, descriptors, strict=True):
            ended, _, _ = select.select([descriptor], [], [], END_S)
            assert ended, f"process {pid} goes on: {Path(f'/proc/{pid}/cmdline').read_text()}"


@pytest.mark.parametrize("flags", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_a_server_ends_when_the_process_that_it_is_for_is_killed(tmp_path: Path, flags: tuple[str, ...]) -> None:
    model = write_tiny_folder(tmp_path / "model")
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as trainer,
        running("--model", str(model), "--exit-with", str(trainer.pid), *flags) as (_, server),
    ):
        pids = [server.pid, *below(server.pid)]
        assert len(pids) >= 2  # the engine's process, too
        with ending(pids):
            trainer.kill()
        server.communicate()
        assert server.returncode == 0  # as SIGTERM does


def test_the_server_of_run_ends_when_run_is_killed(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model")
    agent = [sys.executable, "-c", "print('agent runs', flush=True); input()"]
    with subprocess.Popen(
        command("run", "--model", str(model), "--", *agent), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert any("agent runs" in line for line in run.stdout)
        servers = [pid for pid in below(run.pid) if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        (server,) = servers
        with ending([server, *below(server)]):
            run.kill()


def test_a_server_for_a_process_that_has_ended_does_not_start(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    model = write_tiny_folder(tmp_path / "model")
    asked = command("serve", "--port", "0", "--model", str(model), "--exit-with", str(gone.pid))
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--exit-with names process {gone.pid}, and there is none" in done.stderr


def test_a_server_goes_on_while_its_process_does_and_stops_as_ever(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "model")
    with running("--model", str(model), "--exit-with", str(os.getpid())) as (_, server):
        assert stop(server) == 0
