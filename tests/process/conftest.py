"""A tiny model's folder, and a server of it, once for each file that asks for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.tiny.llama import write_tiny_folder

from .test_serve import running, stop


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[str]:
    with running("--model", str(tiny)) as (url, process):
        yield url
        assert stop(process) == 0
