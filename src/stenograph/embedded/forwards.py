"""Which forward computes: NumPy's, or torch's where it was asked for. Knows no arithmetic."""

from pathlib import Path

from stenograph.core.errors import StartupError
from stenograph.core.settings import ForwardKind, TorchDtype
from stenograph.embedded.forward import Forward
from stenograph.embedded.numpy_forward import NumpyForward
from stenograph.embedded.torch_forward import TorchForward, import_torch
from stenograph.embedded.weights import load_weights


def load_forward(path: Path, *, kind: ForwardKind, device: str, dtype: TorchDtype, num_kv_tokens: int) -> Forward:
    """Read a model and make room for its keys and values. `device` and `dtype` are torch's alone.

    Raises StartupError, one line: no torch (before anything is read), what `load_weights` raises, no room.
    """
    if kind is ForwardKind.TORCH:
        import_torch()
    config, weights = load_weights(path)
    try:
        if kind is ForwardKind.TORCH:
            return TorchForward(config, weights, num_kv_tokens=num_kv_tokens, device=device, dtype=dtype)
        return NumpyForward(config, weights, num_kv_tokens=num_kv_tokens)
    except ValueError as error:
        raise StartupError(f"{path}: {error}") from error
