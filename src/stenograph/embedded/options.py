"""The options of the embedded engine's process, passed by the server as one line of JSON."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stenograph.model.settings import EncoderKind
from stenograph.parts import ForwardKind, TorchDtype

FIRST_VERSION = "0"
"""Name of the engine's first weights, unless it is given another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """`threads` are BLAS threads; `torch_device` and `torch_dtype` count where `forward` is torch. `tokenize_workers`
    are threads for making ids of text, with the server's library `encoder`; the server's as well are its tokenizer's
    `num_ids` ids (0: not known). `reports_routes`: its server asks for the experts of tokens, so the model has to be a
    mixture of experts. `weight_version` names the weights; `weights` is where they are if not with the model. The rest
    bounds the engine: see `EngineLimits`."""

    threads: int = 1
    max_batch: int = 16
    kv_tokens: int = 65536
    step_tokens: int = 256
    max_waiting: int = 1024
    reuses_prefixes: bool = True
    forward: ForwardKind = ForwardKind.NUMPY
    torch_device: str = "auto"
    torch_dtype: TorchDtype = TorchDtype.FLOAT32
    tokenize_workers: int = 0
    encoder: EncoderKind = EncoderKind.REFERENCE
    num_ids: int = 0
    reports_routes: bool = False
    weight_version: str = FIRST_VERSION
    weights: str | None = None

    def command(self, model: Path) -> tuple[str, ...]:
        """The command line of the process for a model."""
        return (sys.executable, "-m", "stenograph.embedded.child", str(model), self.to_json())

    def environment(self) -> dict[str, str]:
        """The environment of the process: this one's, and its number of threads."""
        return {**os.environ, **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(self.threads))}

    def to_json(self) -> str:
        """One line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, line: str) -> "EmbeddedOptions":
        """Raises msgspec.ValidationError for what `to_json` does not write."""
        return msgspec.json.decode(line, type=cls)
