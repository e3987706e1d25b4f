"""`stenograph fetch`: fetches the model into the cache, and writes it as a folder for torch on request."""

from functools import partial
from pathlib import Path
from typing import Any

from stenograph.cli.logs import logged, progress_of
from stenograph.cli.settings_table import CommandSettings
from stenograph.embedded.forward.hf_folder import write_folder
from stenograph.model.fetch import resolve_model


def fetch(options: dict[str, Any]) -> int:
    """Fetch the model and print its path; returns the exit code. Raises StartupError."""
    folder = options.pop("folder")
    return logged(options, partial(_fetch, folder=folder))


def _fetch(settings: CommandSettings, *, folder: Path | None) -> int:
    # Of a repository of the hub with the weights, where the engine is to be the embedded one.
    has_weights, progress = settings.loads_weights, progress_of(settings)
    path = resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=has_weights)
    if folder is not None:
        write_folder(path, folder, progress=progress)
        path = folder
    print(path)
    return 0
