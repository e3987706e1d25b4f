"""A run on a server of its own waits for samples that the server does not give, as long as it has them."""

import http.server
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stenograph.cli import run_session
from stenograph.cli.run_session import RunSession
from stenograph.cli.session_calls import CallFailed, ServerCalls

from .test_run import python, run
from .test_run_kept import TURNS

pytestmark = pytest.mark.timeout(600)

KILL_SERVER = """
import os, signal
run = os.getppid()
for child in open(f"/proc/{run}/task/{run}/children").read().split():
    if int(child) != os.getpid():
        os.kill(int(child), signal.SIGKILL)
"""

HANG_UP = 0
"""In place of a status: the connection ends without an answer."""


@contextmanager
def faulty(url: str, faults: list[int]) -> Iterator[str]:
    """The address of a server before another one, which has these faults first, one a request, and then none."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if faults:
                if status := faults.pop(0):
                    self.send_error(status)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0))) or None
            asked = urllib.request.Request(
                url + self.path, body, {"content-type": "application/json"}, method=self.command
            )
            with urllib.request.urlopen(asked) as answer:
                self.send_response(answer.status)
                self.end_headers()
                self.wfile.write(answer.read())

        do_POST = do_DELETE = do_GET  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as hop:
        thread = threading.Thread(target=hop.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{hop.server_port}"
        hop.shutdown()
        thread.join()


def finished(url: str, session_id: str, file: Path, *, kept_in: str | None) -> int:
    """The exit code of a run whose command was a success."""
    with RunSession(
        ServerCalls(url, None),
        session_id,
        samples=file,
        html=None,
        keep=False,
        kept_in=kept_in,
        has_ended=lambda: False,
    ) as session:
        session.is_begun = True
        return session.finished(0)


@pytest.mark.parametrize("faults", [[HANG_UP], [HANG_UP, HANG_UP, 503, HANG_UP], [503] * 3, [400] * 3])
def test_samples_that_are_not_given_are_asked_for_again(
    faults: list[int],
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_session, "RETRY_S", 0.01)
    session_id = ServerCalls(server, None).open_session({}).id
    with faulty(server, faults) as url:
        assert finished(url, session_id, tmp_path / "x.json", kept_in=None) == 0
    log = capsys.readouterr().err
    assert log.count("NO SAMPLES YET: cannot get the session's samples as json: ") == 1
    assert "it is asked again every 5 s; Ctrl-C gives them up" in log
    assert json.loads((tmp_path / "x.json").read_text())["samples"] == []
    with pytest.raises(CallFailed):
        ServerCalls(server, None).view(session_id)


def test_a_session_that_stays_elsewhere_is_not_waited_for(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session_id = ServerCalls(server, None).open_session({}).id
    with faulty(server, [HANG_UP]) as url:
        assert finished(url, session_id, tmp_path / "x.json", kept_in=url) == 1
        assert f"session {session_id} stays: {url}/console#/session/{session_id}" in capsys.readouterr().err
    ServerCalls(server, None).view(session_id)


def test_a_server_that_has_ended_is_not_waited_for(tiny: Path, tmp_path: Path) -> None:
    done = run(
        "--model", str(tiny), "--samples", str(tmp_path / "x.json"), *python(TURNS.split("sys.exit")[0] + KILL_SERVER)
    )
    assert done.returncode == 1, done.stderr
    assert "NO SAMPLES: cannot get the session's samples as json: the server does not answer" in done.stderr
    assert "ends with its server; not all that was asked for was written" in done.stderr
    assert not list(tmp_path.iterdir())


def test_samples_of_a_server_of_another_version_are_written_whatever_its_report_is(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def view(self: ServerCalls, session_id: str) -> dict[str, object]:
        return {"metadata": "of another version"}

    monkeypatch.setattr(ServerCalls, "view", view)
    session_id = ServerCalls(server, None).open_session({}).id
    assert finished(server, session_id, tmp_path / "x.json", kept_in=server) == 0
    assert "cannot report on the session: the server answers in another form" in capsys.readouterr().err
    assert (tmp_path / "x.json").is_file()
