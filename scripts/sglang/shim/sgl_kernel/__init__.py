"""In the place of SGLang's compiled kernels, which its registry has for CUDA alone: what a CPU calls of them.

One function is here, in plain torch. Every other name can be imported, and says so when it is called. So are the
operators declared that models with images look up at import, for layers that Qwen2.5-VL has none of.
Memory is not pinned where there is no accelerator: LoRAs ask for it without a look at the device.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_OPERATORS = torch.library.Library("sgl_kernel", "DEF")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of tensors that leaves `pin_memory` out."""

    @wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


if not torch.accelerator.is_available():
    for _name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write the next places of the cache into the rows of their requests: `[start, end)` of each."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel for CUDA, and this is a CPU")

    return absent
