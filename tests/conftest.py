"""What every test may use."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from stenograph.model.fetch import resolve_model
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir

# No test is timed: a slow machine must not make a property fail.
# Each run draws the same examples, so that a landing does not hang on a draw; `explore` draws others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.register_profile("stenograph", settings.get_profile("explore"), derandomize=True, database=None)
# scripts/test --fast: a tenth of the examples of each property.
settings.register_profile("fast", settings.get_profile("stenograph"), max_examples=10)
settings.load_profile("stenograph")


def pytest_collection_finish() -> None:
    """Take what was collected, a million objects, out of the garbage collector's sight."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real weights; fetched into the cache folder on first use."""
    cache = os.environ.get("STENOGRAPH_CACHE")
    folder = Path(cache) if cache else default_cache_dir(os.environ)
    return resolve_model("smollm2-135m", cache_dir=folder, progress=StreamProgress(sys.stderr))
