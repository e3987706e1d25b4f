"""Makes the embedded engine of the settings."""

from pathlib import Path

from stenograph.core.settings import Switch
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import FIRST_VERSION, EmbeddedOptions
from stenograph.engine.settings import ReplayKind
from stenograph.http.settings import Settings
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer import Tokenizer


def make_embedded(settings: Settings, path: Path, tokenizer: Tokenizer | None, shared: Path | None) -> EmbeddedEngine:
    """The engine of the model at `path`; not yet started. Arguments are those of `make_engine`."""
    return EmbeddedEngine(path, embedded_options(settings, tokenizer), shared=shared)


def embedded_options(settings: Settings, tokenizer: Tokenizer | None) -> EmbeddedOptions:
    """The options of the embedded engine's process. `tokenizer` is the server's, where it is made."""
    return EmbeddedOptions(
        threads=settings.engine_threads,
        max_batch=settings.max_batch,
        kv_tokens=settings.kv_tokens,
        step_tokens=settings.step_tokens,
        reuses_prefixes=settings.prefix_reuse is Switch.ON,
        forward=settings.forward,
        torch_device=settings.torch_device,
        torch_dtype=settings.torch_dtype,
        tokenize_workers=settings.tokenize_workers,
        encoder=tokenizer.encoder if tokenizer and settings.tokenize_workers else EncoderKind.REFERENCE,
        num_ids=tokenizer.vocab_size if tokenizer else 0,
        reports_routes=settings.replay is ReplayKind.ROUTED_EXPERTS,
        weight_version=settings.weight_version or FIRST_VERSION,
    )
