"""What every test may use."""

import os
import sys
from pathlib import Path

import pytest

from stenograph.core.settings import Settings
from stenograph.embedded.fetch import resolve_model
from stenograph.embedded.progress import StreamProgress


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real weights; fetched into the cache folder on first use."""
    cache = os.environ.get("STENOGRAPH_CACHE")
    folder = Path(cache) if cache else Settings().cache_dir
    return resolve_model("smollm2-135m", cache_dir=folder, progress=StreamProgress(sys.stderr))
