"""The model's settings: which one it is, where fetched models are kept, and the names of the tokenizer libraries."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stenograph.core.settings import Section, computed, folder, setting, text

HUB_PREFIX = "hf:"
"""Before a repository's name, where it could be a folder's as well."""


class EncoderKind(enum.StrEnum):
    """A library for encoding, by the name of its package."""

    FASTOKENS = "fastokens"
    REFERENCE = "tokenizers"


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """The cache folder where none is set: `$XDG_CACHE_HOME/stenograph`, else `~/.cache/stenograph`."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is ignored.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "stenograph"


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The served model, and the folder of its files."""

    model: str = setting(
        "smollm2-135m",
        text(),
        "The model: `smollm2-135m`, a .gguf file, a folder, or ORG/NAME of the Hugging Face hub.",
        section=Section.MODEL,
    )
    cache_dir: Path = computed(
        lambda: default_cache_dir(os.environ),
        folder(),
        "Folder for fetched models.",
        shown="$XDG_CACHE_HOME/stenograph, else ~/.cache/stenograph",
        env="STENOGRAPH_CACHE",
        section=Section.FILES,
    )
