"""A vLLM server in a process group of its own, with its generate route and without."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 900.0
MAX_MODEL_LEN = 1024
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
FLAGS = ("--dtype", "float32", "--max-num-seqs", "16", "--enforce-eager", "--enable-prompt-tokens-details")


class RealVLLM:
    """A server of `model`, which can be killed and started again at its address."""

    def __init__(self, model: Path, *, scale_out: bool, log: Path) -> None:
        self.model = model
        self.scale_out = scale_out
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it. Blocks until it is healthy."""
        command = [os.environ["VLLM_JOB_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", "smollm2", "--max-model-len", str(MAX_MODEL_LEN)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), *FLAGS]
        command += ["--enable-scale-out"] if self.scale_out else []
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            assert self._process.poll() is None, f"vLLM has ended; see {self._log}"
            assert time.monotonic() < deadline, f"vLLM does not start; see {self._log}"
            time.sleep(0.5)

    def kill(self) -> None:
        """End it and its workers without a word."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module", params=["generate", "completions"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    log = tmp_path_factory.mktemp("vllm") / f"{request.param}.log"
    server = RealVLLM(Path(os.environ["VLLM_JOB_MODEL"]), scale_out=request.param == "generate", log=log)
    server.start()
    try:
        yield server
    finally:
        server.kill()
