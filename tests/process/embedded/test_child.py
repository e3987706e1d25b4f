"""The engine's process, spoken to as the server does."""

import fcntl
import io
import os
import subprocess
import sys
import termios
from array import array
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from standins.tiny.llama import write_tiny_folder
from stenograph.core.types import FinishReason, Grammar, GrammarKind, RequestId, SamplingParams, token_ids
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.wire import (
    EVENTS,
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    Event,
    Generate,
    LoadFailed,
    Ready,
    Sampled,
    frame,
    read_frame,
)

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


def num_unread(pipe: IO[bytes]) -> int:
    """Bytes in a pipe that nobody has taken out."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def obeyed(child: "subprocess.Popen[bytes]", command: bytes) -> None:
    """Write a command and wait until it is obeyed: the child takes no second one before that."""
    assert child.stdin is not None
    for written in (command, UNKNOWN):
        child.stdin.write(written)
        child.stdin.flush()
        while num_unread(child.stdin):
            os.sched_yield()


def test_a_model_that_cannot_be_loaded_is_one_event_and_nothing_else(tmp_path: Path) -> None:
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


def test_an_internal_error_at_load_ends_the_process_with_a_traceback_and_no_dump(folder: Path) -> None:
    options = EmbeddedOptions(max_batch=300, step_tokens=300).to_json()
    command = [sys.executable, "-m", "stenograph.embedded.child", str(folder), options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read() == b""
        assert child.stderr.read().decode().splitlines()[-1].startswith("ValueError: step_tokens must be above")
        assert child.wait() == 1


LATE = {"tokenizers", "ahocorasick_rs", "llguidance"}


@pytest.mark.parametrize(
    ("options", "params", "loaded"),
    [
        (OPTIONS, {}, set[str]()),
        (OPTIONS, {"stop": ("zz",)}, LATE - {"llguidance"}),
        (OPTIONS, {"grammar": Grammar(kind=GrammarKind.REGEX, source="[a-z]+")}, LATE),
        (replace(OPTIONS, tokenize_workers=1), {}, LATE - {"llguidance"}),
    ],
)
def test_a_tokenizer_is_loaded_by_what_needs_it(
    folder: Path, tmp_path: Path, options: EmbeddedOptions, params: dict[str, Any], loaded: set[str]
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "stenograph.embedded.child", str(folder), options.to_json()]
    settings = SamplingParams(max_tokens=4, ignore_eos=True, **params)
    asked = Generate(request_id=RequestId("r"), ids=token_ids([1, 5, 9]).tobytes(), params=settings)
    with (tmp_path / "imports").open("wb") as imports:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=imports) as child:
            assert isinstance(event_of(child), Ready)
            assert child.stdin is not None
            child.stdin.write(frame(asked))
            child.stdin.flush()
            while not is_end_of("r", event_of(child)):
                pass
    names = {line.rpartition("|")[2].strip() for line in (tmp_path / "imports").read_text().splitlines()}
    assert "stenograph.embedded.engine_core" in names
    assert names & LATE == loaded


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path) -> None:
    vocab_size = load_weights(folder)[0].vocab_size
    command = [sys.executable, "-m", "stenograph.embedded.child", str(folder)]
    options = replace(OPTIONS, num_ids=vocab_size + 1)
    with subprocess.Popen([*command, options.to_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        event = event_of(child)
        assert isinstance(event, LoadFailed)
        assert f"the tokenizer has {vocab_size + 1} ids, the model {vocab_size}" in event.message


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (b"\5\0\0\0abcde", "Expected `object`"),
        (b"\0\0\0\0", "truncated"),
        ((MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "little"), "a frame of"),
        (GENERATE + GENERATE, "'r' already"),
    ],
)
def test_an_invalid_command_ends_the_process_at_once_with_a_reason(folder: Path, written: bytes, named: str) -> None:
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


def test_an_abort_of_an_unknown_request_is_ignored(folder: Path) -> None:
    with begun(folder) as child:
        assert child.stdin is not None
        child.stdin.write(UNKNOWN + GENERATE + UNKNOWN)
        child.stdin.flush()
        drawn = [event_of(child) for _ in range(250)]
        assert all(isinstance(event, Sampled) and event.request_id == "r" for event in drawn)
        child.communicate()


@pytest.mark.parametrize("names", [("r",), ("r", "other")])
def test_after_an_abort_at_most_the_step_under_way_samples_a_token(folder: Path, names: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=250, ignore_eos=True, num_top_logprobs=20)
    ids = token_ids([1, 5, 9]).tobytes()
    with begun(folder) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for name in names:
            child.stdin.write(frame(Generate(request_id=RequestId(name), ids=ids, params=params)))
        child.stdin.flush()
        while not num_unread(child.stdout):
            os.sched_yield()
        # All that they draw is more than a pipe holds: until it is read, they cannot have come to their ends.
        obeyed(child, frame(Abort(request_id=RequestId("r"))))
        written = io.BytesIO(child.stdout.read(num_unread(child.stdout)))
        before = [EVENTS.decode(payload) for payload in iter(lambda: read_frame(written), None)]
        after: list[Event] = []
        while not (told := [event for event in (*before, *after) if is_end_of("r", event)]):
            after.append(event_of(child))
        (end,) = told
        assert isinstance(end, Sampled)
        assert end.chunk.finish is not None
        assert (end.chunk.finish.reason, len(end.chunk.ids)) == (FinishReason.ABORT, 0)
        assert (
            sum(len(event.chunk.ids) for event in after if isinstance(event, Sampled) and event.request_id == "r") <= 1
        )
        child.stdin.close()
        left = io.BytesIO(child.stdout.read())
        later = [EVENTS.decode(payload) for payload in iter(lambda: read_frame(left), None)]
        assert not any(isinstance(event, Sampled) and event.request_id == "r" for event in later)


def is_end_of(name: str, event: Event) -> bool:
    return isinstance(event, Sampled) and event.request_id == name and event.chunk.finish is not None
