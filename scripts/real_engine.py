"""A real engine's server for the jobs: in a process group of its own, killed and started again at its address."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.distribution import Figures, recompute
from stenograph.core.types import RepetitionOver
from stenograph.embedded.forward.base import Forward

START_S = 900.0


def ask(url: str, path: str, body: Any = None) -> Any:
    """GET, or POST of a body. What is no JSON comes as text. Raises HTTPError, with the answer as a note."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as got:
            text = got.read().decode()
    except urllib.error.HTTPError as error:
        error.add_note(error.read().decode())
        raise
    return json.loads(text) if text[:1] in ("{", "[") else text


def torch_logprobs(
    python: str,
    model: Path,
    lines: Sequence[tuple[Sequence[int], int]],
    *,
    lora: Path | None = None,
    dtype: str = "float32",
) -> list[list[float]]:
    """ln p of `ids[start:]` of each line, by torch in an engine's environment, with a LoRA merged."""
    here = Path(__file__).parent
    command = [python, str(here / "torch_logprobs.py"), str(model), "--dtype", dtype]
    command += [] if lora is None else ["--lora", str(lora)]
    environment = os.environ | {"PYTHONPATH": str(here / "shims")}
    done = subprocess.run(
        command, input=json.dumps(lines), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return told


def apart_by_rule(sample: Mapping[str, Any], model: Forward) -> dict[str, float]:
    """The largest distance in nats between recorded log-probabilities of sampling and recomputed ones, for each rule
    of what a repetition penalty counts."""
    worst: dict[str, float] = {}
    for over in RepetitionOver:
        figures = Figures()
        recompute({**sample, "turns": [{**row, "repetition_over": over} for row in sample["turns"]]}, model, figures)
        worst[over.value] = max(figures.apart)
    return worst


class RealEngine:
    """A server of `model`, started by `command` with an address; it answers GET `probe` once it can sample."""

    def __init__(
        self, model: Path, *, command: Sequence[str], environment: dict[str, str], probe: str, log: Path
    ) -> None:
        self.model = model
        self._command = command
        self._environment = environment
        self._probe = probe
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it. Blocks until it answers."""
        command = [*self._command, "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | self._environment, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, f"it has ended; see {self._log}"
            assert time.monotonic() < deadline, f"it does not start; see {self._log}"
            time.sleep(0.5)

    def kill(self) -> None:
        """End it and its workers without a word."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it had ended by itself, with all of them
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self._probe, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False
