"""A vLLM server, with its generate route and without."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from scripts.real_engine import RealEngine

MAX_MODEL_LEN = 1024
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
FLAGS = ("--dtype", "float32", "--max-num-seqs", "16", "--enforce-eager", "--enable-prompt-tokens-details")


class RealVLLM(RealEngine):
    """A vLLM of `model`, with more `flags`. `packages` are folders of more Python packages, as in PYTHONPATH."""

    def __init__(
        self, model: Path, *, scale_out: bool, log: Path, flags: Sequence[str] = (), packages: str | None = None
    ) -> None:
        self.scale_out = scale_out
        command = [os.environ["VLLM_JOB_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "smollm2", "--max-model-len", str(MAX_MODEL_LEN)]
        command += [*FLAGS, *(["--enable-scale-out"] if scale_out else []), *flags]
        environment = ENVIRONMENT if packages is None else {**ENVIRONMENT, "PYTHONPATH": packages}
        super().__init__(model, command=command, environment=environment, probe="/health", log=log)


@pytest.fixture(scope="module", params=["generate", "completions"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    log = tmp_path_factory.mktemp("vllm") / f"{request.param}.log"
    server = RealVLLM(Path(os.environ["VLLM_JOB_MODEL"]), scale_out=request.param == "generate", log=log)
    try:
        server.start()
        yield server
    finally:
        server.kill()
