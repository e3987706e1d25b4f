"""The part: makes the embedded engine of the settings."""

from pathlib import Path

from stenograph.core.settings import Switch
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import FIRST_VERSION, EmbeddedOptions
from stenograph.engine.settings import ReplayKind
from stenograph.http.settings import Settings
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer import Tokenizer
from stenograph.parts import EmbeddedSettings, settings_of


def make_embedded(settings: Settings, path: Path, tokenizer: Tokenizer | None, shared: Path | None) -> EmbeddedEngine:
    """The engine of the model at `path`; not yet started. Arguments are those of `make_engine`."""
    return EmbeddedEngine(path, embedded_options(settings, tokenizer), shared=shared)


def embedded_options(settings: Settings, tokenizer: Tokenizer | None) -> EmbeddedOptions:
    """The options of the embedded engine's process. `tokenizer` is the server's, where it is made."""
    own = settings_of(EmbeddedSettings, settings)
    return EmbeddedOptions(
        threads=own.engine_threads,
        max_batch=own.max_batch,
        kv_tokens=own.kv_tokens,
        step_tokens=own.step_tokens,
        reuses_prefixes=own.prefix_reuse is Switch.ON,
        forward=own.forward,
        torch_device=own.torch_device,
        torch_dtype=own.torch_dtype,
        tokenize_workers=own.tokenize_workers,
        encoder=tokenizer.encoder if tokenizer and own.tokenize_workers else EncoderKind.REFERENCE,
        num_ids=tokenizer.vocab_size if tokenizer else 0,
        reports_routes=settings.replay is ReplayKind.ROUTED_EXPERTS,
        weight_version=settings.weight_version or FIRST_VERSION,
    )
