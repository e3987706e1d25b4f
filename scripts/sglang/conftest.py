"""A real SGLang in a process group of its own, which can be killed and started again at its address."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

START_S = 900.0
CONTEXT = 1024
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # with two, beside other work, each step takes ten times as long
    "MKL_NUM_THREADS": "1",
}
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.3", "--max-total-tokens", "16384"),
    *("--max-running-requests", "16", "--skip-server-warmup", "--enable-metrics", "--enable-cache-report"),
    *("--tool-call-parser", "hermes", "--incremental-streaming-output", "--context-length", str(CONTEXT)),
)


def ask(url: str, path: str, body: Any = None) -> Any:
    """GET, or POST of a body. What is no JSON comes as text."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"})) as got:
        text = got.read().decode()
    return json.loads(text) if text[:1] in ("{", "[") else text


class RealSGLang:
    """A server of `model`."""

    def __init__(self, model: Path, *, log: Path, flags: tuple[str, ...] = (), **environment: str) -> None:
        self.model = model
        self._log = log
        self._flags = flags
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def launch(self) -> None:
        """Begin to start it."""
        command = [os.environ["SGLANG_JOB_PYTHON"], "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(self._port)]
        shim = str(Path(__file__).with_name("shim"))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *FLAGS, *self._flags],
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": shim} | self._environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Block until it answers."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not self.answers():
            assert self._process.poll() is None, f"SGLang has ended; see {self._log}"
            assert time.monotonic() < deadline, f"SGLang does not start; see {self._log}"
            time.sleep(0.5)

    def start(self) -> None:
        """Start it. Blocks until it answers."""
        self.launch()
        self.wait()

    def kill(self) -> None:
        """End it and its workers without a word."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def answers(self) -> bool:
        """Whether its model is loaded."""
        try:
            return bool(ask(self.url, "/model_info"))
        except (OSError, urllib.error.HTTPError):
            return False


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model as `first`, and as `second` with other weights, as training would leave it."""
    folder, first = tmp_path_factory.mktemp("models"), Path(os.environ["SGLANG_JOB_MODEL"])
    (folder / "first").symlink_to(first)
    second = folder / "second"
    shutil.copytree(first, second)
    draw = np.random.default_rng(5)
    tensors = load_file(first / "model.safetensors")
    for name, tensor in tensors.items():
        if "down_proj" in name:
            noise = draw.standard_normal(tensor.shape, dtype=np.float32)
            tensors[name] = tensor + 0.02 * float(np.abs(tensor).mean()) * noise
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def sglang(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSGLang]:
    server = RealSGLang(models / "first", log=tmp_path_factory.mktemp("sglang") / "sglang.log")
    server.start()
    try:
        yield server
    finally:
        server.kill()
