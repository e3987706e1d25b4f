"""The embedded engine's settings: the library, the device, and how much at once."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

import enum
from dataclasses import dataclass

from stenograph.core.settings import Section, Switch, choice, matching, setting, whole_number


class ForwardKind(enum.StrEnum):
    """Libraries for the embedded engine's forward pass."""

    NUMPY = "numpy"
    TORCH = "torch"


class TorchDtype(enum.StrEnum):
    """Data types of torch's weights, keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


TORCH_DEVICE = matching(r"auto|cpu|cuda(:[0-9]{1,3})?", "one of auto, cpu, cuda, cuda:0, cuda:1 and so on")


@dataclass(frozen=True, kw_only=True)
class EmbeddedSettings:
    """Settings of the embedded engine."""

    engine_threads: int = setting(
        1, whole_number(1, 1024), "BLAS threads of the embedded engine.", unit="threads", section=Section.EMBEDDED
    )
    max_batch: int = setting(
        16, whole_number(1, 4096), "Sequences that the embedded engine steps at once.", unit="sequences"
    )
    kv_tokens: int = setting(65536, whole_number(16), "Capacity of the embedded engine's KV cache.", unit="tokens")
    step_tokens: int = setting(
        256,
        whole_number(2, 1_048_576),
        "Most tokens that the embedded engine computes in a step, more than `--max-batch`. Limits a prompt's chunk, "
        "and the wait of sequences that decode.",
        unit="tokens",
    )
    prefix_reuse: Switch = setting(Switch.ON, choice(Switch), "Reuse the KV of earlier turns in the embedded engine.")
    forward: ForwardKind = setting(
        ForwardKind.NUMPY,
        choice(ForwardKind),
        "Library for the embedded engine's forward pass; torch needs `pip install torch`.",
    )
    torch_device: str = setting(
        "auto", TORCH_DEVICE, "Device for `--forward torch`; auto is the first GPU, else the CPU."
    )
    torch_dtype: TorchDtype = setting(
        TorchDtype.FLOAT32, choice(TorchDtype), "Type of weights, keys and values with `--forward torch`."
    )
    tokenize_workers: int = setting(
        0,
        whole_number(0, 64),
        "Threads of the embedded engine's process that tokenize completions and chats without a session; 0: the "
        "server does.",
        unit="threads",
    )
