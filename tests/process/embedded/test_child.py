"""The engine's process, spoken to as the server does."""

import subprocess
import sys
from pathlib import Path

import pytest

from stenograph.core.types import RequestId, SamplingParams, token_ids
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import (
    EVENTS,
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    Drew,
    Event,
    Generate,
    LoadFailed,
    Ready,
    frame,
    read_frame,
)
from stenograph.testing.tiny_llama import write_tiny_folder

OPTIONS = EmbeddedOptions(max_batch=4, kv_tokens=512)
UNKNOWN = frame(Abort(request_id=RequestId("unknown")))
GENERATE = frame(
    Generate(
        request_id=RequestId("r"),
        ids=token_ids([1, 5, 9]).tobytes(),
        params=SamplingParams(max_tokens=250, ignore_eos=True),
    )
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def begun(folder: Path) -> "subprocess.Popen[bytes]":
    """A child that has loaded its model."""
    command = [sys.executable, "-m", "stenograph.embedded.child", str(folder), OPTIONS.to_json()]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert isinstance(event_of(child), Ready)
    return child


def event_of(child: "subprocess.Popen[bytes]") -> Event:
    assert child.stdout is not None
    payload = read_frame(child.stdout)
    assert payload is not None
    return EVENTS.decode(payload)


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


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (b"\5\0\0\0abcde", "Expected `object`"),
        (b"\0\0\0\0", "truncated"),
        ((MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "little"), "a frame of"),
        (GENERATE + GENERATE, "'r' already"),
    ],
)
def test_what_is_no_command_ends_it_at_once_and_says_why(folder: Path, written: bytes, named: str) -> None:
    with begun(folder) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(written)
        child.stdin.flush()  # and stays open: it waits for no more
        assert child.wait() == 1
        assert named in child.stderr.read().decode()


@pytest.mark.parametrize("written", [b"\5\0", GENERATE[:-3], UNKNOWN, UNKNOWN[:-1]])
def test_wherever_its_input_ends_it_ends_in_peace(folder: Path, written: bytes) -> None:
    with begun(folder) as child:
        _, told = child.communicate(written)
        assert (child.returncode, told) == (0, b"")


def test_an_abort_of_what_it_does_not_know_is_passed_over(folder: Path) -> None:
    with begun(folder) as child:
        assert child.stdin is not None
        child.stdin.write(UNKNOWN + GENERATE + UNKNOWN)
        child.stdin.flush()
        drawn = [event_of(child) for _ in range(250)]
        assert all(isinstance(event, Drew) and event.request_id == "r" for event in drawn)
        child.communicate()
