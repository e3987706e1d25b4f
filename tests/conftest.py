"""What every test may use."""

import gc
import os
import sys
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from stenograph.model.fetch import resolve_model
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir

from .quiet import watch_quiet

# No test is timed: a slow machine must not make a property fail.
# Each run draws the same examples, so that a landing does not hang on a draw; `explore` draws others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.register_profile("stenograph", settings.get_profile("explore"), derandomize=True, database=None)
# scripts/test --fast: a tenth of the examples of each property.
settings.register_profile("fast", settings.get_profile("stenograph"), max_examples=10)
settings.load_profile("stenograph")


def pytest_collection() -> None:
    """Collect tests without the garbage collector: all that is made then stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take what was collected, a million objects, out of the garbage collector's sight."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_timeout_set_timer(item: pytest.Item, settings: "pytest_timeout.Settings") -> bool | None:
    """In the place of pytest-timeout's own clock, which runs on while the machine is somebody else's."""
    end = watch_quiet(settings.timeout, lambda: pytest_timeout.timeout_sigalrm(item, settings))
    if end is None:
        return None
    item.cancel_timeout = end  # type: ignore[attr-defined]  # where pytest-timeout looks for it
    return True


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real weights; fetched into the cache folder on first use."""
    cache = os.environ.get("STENOGRAPH_CACHE")
    folder = Path(cache) if cache else default_cache_dir(os.environ)
    return resolve_model("smollm2-135m", cache_dir=folder, progress=StreamProgress(sys.stderr))
