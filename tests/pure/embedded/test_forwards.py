"""Which forward a process computes with, and how it says that it cannot."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from standins.tiny.llama import LAYERS
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.choice import load_forward
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.parts import ForwardKind, TorchDtype

HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_numpy_computes_unless_torch_is_asked_for(folder: Path) -> None:
    forward = load_forward(folder, kind=ForwardKind.NUMPY, device="auto", dtype=TorchDtype.FLOAT32, num_kv_tokens=64)
    assert isinstance(forward, NumpyForward)
    assert (forward.config.num_layers, forward.num_kv_tokens) == (LAYERS, 64)


@pytest.mark.skipif(HAS_TORCH, reason="torch is there: scripts/test-torch")
def test_torch_that_is_not_there_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    """Before a model is read: it need not even exist."""
    with pytest.raises(StartupError) as caught:
        load_forward(
            tmp_path / "none", kind=ForwardKind.TORCH, device="auto", dtype=TorchDtype.FLOAT32, num_kv_tokens=64
        )
    assert str(caught.value) == "--forward is torch, but torch is not installed: pip install torch"


def test_too_little_memory_for_the_kv_store_is_one_line_that_names_the_model(folder: Path) -> None:
    with pytest.raises(StartupError, match=rf"^{folder}: {2**50} tokens of KV are .* more than the memory available$"):
        load_forward(folder, kind=ForwardKind.NUMPY, device="auto", dtype=TorchDtype.FLOAT32, num_kv_tokens=2**50)


def test_a_server_that_computes_with_numpy_does_not_import_torch() -> None:
    code = "import sys, stenograph.embedded.child, stenograph.http.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
