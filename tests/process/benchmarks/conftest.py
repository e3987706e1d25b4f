"""What every benchmark's test may use."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """The lines said by a benchmark that refuses its arguments in `tmp_path`.

    In this process: nearly all the work of a refusal is to start Python.
    """

    def run(*arguments: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code: object = main(arguments)
        except SystemExit as end:  # argparse's
            code = end.code
        finally:
            for number, handler in taken.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert "Traceback" not in said.err
        return said.err.splitlines()

    return run
