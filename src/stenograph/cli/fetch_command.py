"""`stenograph fetch`: fetches the model into the cache."""

from typing import Any

from stenograph.cli.logs import logged, progress_of
from stenograph.cli.settings_table import CommandSettings
from stenograph.engine.settings import EngineKind
from stenograph.model.fetch import resolve_model


def fetch(options: dict[str, Any]) -> int:
    """Fetch the model and print its path; returns the exit code. Raises StartupError."""
    return logged(options, _fetch)


def _fetch(settings: CommandSettings) -> int:
    # Of a repository of the hub with the weights, where the engine is to be the embedded one.
    has_weights = settings.engine is EngineKind.EMBEDDED
    print(
        resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress_of(settings), weights=has_weights)
    )
    return 0
