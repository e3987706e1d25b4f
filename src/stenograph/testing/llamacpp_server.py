"""Starts and ends a real llama.cpp server (llamacpp_child.py) for as long as a block runs."""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

END_GRACE_S = 10.0


@contextmanager
def llamacpp_server(model: Path, *, slot_tokens: int, slots: int) -> Generator[str]:
    """The address of a server of `model`, a GGUF file. Raises RuntimeError if it does not start."""
    command = [sys.executable, "-m", "stenograph.testing.llamacpp_child", str(model), str(slot_tokens), str(slots)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"llama.cpp did not start with {model}: exit code {process.wait()}")
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
