"""The engine's process, spoken to as the server does."""

import subprocess
import sys
from pathlib import Path

from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import EVENTS, LENGTH_BYTES, LoadFailed


def test_a_model_that_cannot_be_loaded_is_told_in_one_event_and_nothing_else(tmp_path: Path) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(b"x")
    command = [sys.executable, "-m", "stenograph.embedded.child", str(model), EmbeddedOptions().to_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        told = child.stdout.read()
        # Standard input is still open: the server closes it when it has heard.
        assert (child.wait(), child.stderr.read()) == (0, b"")
    event = EVENTS.decode(told[LENGTH_BYTES:])
    assert isinstance(event, LoadFailed)
    assert str(model) in event.message
