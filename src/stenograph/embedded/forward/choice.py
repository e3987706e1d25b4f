"""Chooses the forward: NumPy's, or torch's if the options ask for it. Knows no arithmetic."""

from pathlib import Path

from stenograph.core.errors import StartupError
from stenograph.embedded.forward.base import Forward
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.torch_forward import TorchForward, import_torch
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights, load_weights
from stenograph.parts import ForwardKind, TorchDtype


def load_forward(path: Path, *, kind: ForwardKind, device: str, dtype: TorchDtype, num_kv_tokens: int) -> Forward:
    """Read a model and allocate its KV store. `device` and `dtype` are torch's alone.

    Raises StartupError, one line: no torch (before anything is read), the errors of `load_weights`, too little memory.
    """
    if kind is ForwardKind.TORCH:
        import_torch()
    config, weights = load_weights(path)
    try:
        return make_forward(config, weights, kind=kind, device=device, dtype=dtype, num_kv_tokens=num_kv_tokens)
    except ValueError as error:
        raise StartupError(f"{path}: {error}") from error


def make_forward(
    config: LlamaConfig,
    weights: LlamaWeights,
    *,
    kind: ForwardKind,
    device: str,
    dtype: TorchDtype,
    num_kv_tokens: int,
) -> TorchForward | NumpyForward:
    """A forward of loaded weights. Raises StartupError as TorchForward does, ValueError for no KV tokens."""
    if kind is ForwardKind.TORCH:
        return TorchForward(config, weights, num_kv_tokens=num_kv_tokens, device=device, dtype=dtype)
    return NumpyForward(config, weights, num_kv_tokens=num_kv_tokens)
