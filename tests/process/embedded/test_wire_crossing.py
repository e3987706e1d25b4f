"""What server and engine process say to each other is the same on the other side: any value, over real pipes."""

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.replay import PackedInts, Replay
from stenograph.core.telemetry import GrammarStep
from stenograph.core.types import (
    Chunk,
    EngineReply,
    EngineTimes,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    TopLogprob,
    WeightSpan,
    token_ids,
)
from stenograph.embedded import wire
from stenograph.embedded.wire import COMMANDS, EVENTS, Command, Event, frame, read_frame

AGAIN = """
import sys
from stenograph.embedded.wire import COMMANDS, EVENTS, frame, read_frame
out = sys.stdout.buffer
while (payload := read_frame(sys.stdin.buffer)) is not None:
    decoder = EVENTS if payload[:1] == b"e" else COMMANDS
    out.write(frame(decoder.decode(payload[1:])))
    out.flush()
"""
"""Reads every value and writes what it has read: it crosses twice, decoded and encoded again in another process."""

PACKED = st.lists(st.integers(0, 2**17)).map(lambda values: PackedInts.of(np.array(values, np.int32)))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = TEXT.map(lambda text: text or "r")
FINITE = st.floats(allow_nan=False, width=64)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(token_ids)
ID = st.integers(0, 2**31 - 1)
GRAMMARS = st.builds(Grammar, kind=st.sampled_from(GrammarKind), source=TEXT)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop=st.lists(NAME, max_size=3).map(tuple),
    stop_token_ids=st.lists(ID, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.lists(st.tuples(ID, st.floats(-100, 100)), max_size=3).map(tuple),
    grammar=st.none() | GRAMMARS,
    num_top_logprobs=st.integers(0, 20),
)
BLAME = st.builds(
    Blame,
    st.sampled_from(RequestPart),
    st.none() | st.integers(0, 9),
    st.lists(TEXT | st.integers(0, 9), max_size=2).map(tuple),
)
CALLS = st.builds(ToolCall, id=NAME, name=NAME, arguments=TEXT)
MESSAGES = st.builds(
    Message, role=st.just(Role.ASSISTANT), content=st.none() | TEXT, tool_calls=st.lists(CALLS, max_size=2).map(tuple)
)
REPLIES = st.builds(
    EngineReply,
    id=NAME,
    body=st.binary(max_size=20),
    content_type=TEXT,
    headers=st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple),
    message=MESSAGES,
)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    num = draw(st.integers(0, 4))

    def row(values: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
        return st.lists(values, min_size=num, max_size=num)  # a sequence crosses as a list

    tops = st.lists(st.builds(TopLogprob, id=ID, logprob=FINITE), max_size=2).map(tuple)
    return Chunk(
        ids=draw(row(ID)),  # type: ignore[arg-type]
        logprobs=draw(row(FINITE)),  # type: ignore[arg-type]
        tempered_logprobs=draw(st.none() | row(FINITE)),  # type: ignore[arg-type]
        sampling_logprobs=draw(st.none() | row(FINITE)),  # type: ignore[arg-type]
        forced=draw(st.none() | row(st.booleans())),  # type: ignore[arg-type]
        top_logprobs=draw(st.none() | row(tops).map(tuple)),  # type: ignore[arg-type]
        finish=draw(st.none() | st.builds(Finish, reason=st.sampled_from(FinishReason), matched=st.none() | ID | TEXT)),
        num_cached_tokens=draw(st.integers(0, 2**40)),
        times=draw(
            st.none() | st.builds(EngineTimes, submitted=FINITE, admitted=FINITE, first_token=FINITE, finished=FINITE)
        ),
        weight_version=draw(st.none() | TEXT),
        weights=draw(
            st.none() | st.lists(st.builds(WeightSpan, version=TEXT, start=ID, end=ID), max_size=2).map(tuple)
        ),
        reply=draw(st.none() | REPLIES),
        replay=draw(st.none() | st.builds(Replay, routed_experts=st.none() | PACKED, indexer_topk=st.none() | PACKED)),
    )


DURATIONS = st.lists(FINITE, max_size=3).map(tuple)
PIECES = st.lists(st.builds(wire.Piece, text=TEXT, trusted=st.booleans()), max_size=4).map(tuple)
COMMAND_VALUES: dict[type, st.SearchStrategy[Command]] = {
    wire.Generate: st.builds(wire.Generate, request_id=NAME, ids=IDS.map(lambda ids: ids.tobytes()), params=PARAMS),
    wire.Abort: st.builds(wire.Abort, request_id=NAME),
    wire.TokenizeText: st.builds(wire.TokenizeText, request_id=NAME, pieces=PIECES),
    wire.Control: st.builds(
        wire.Control, request_id=NAME, kind=st.sampled_from(wire.ControlKind), path=TEXT, version=TEXT
    ),
}
EVENT_VALUES: dict[type, st.SearchStrategy[Event]] = {
    wire.Ready: st.builds(
        wire.Ready,
        model=TEXT,
        vocab_size=ID,
        max_context_tokens=ID,
        grammars=st.lists(st.sampled_from(GrammarKind), max_size=3).map(tuple),
    ),
    wire.LoadFailed: st.builds(wire.LoadFailed, message=TEXT),
    wire.Sampled: st.builds(wire.Sampled, request_id=NAME, chunk=chunks()),
    wire.Failed: st.builds(
        wire.Failed,
        request_id=NAME,
        kind=st.sampled_from(wire.FailureKind),
        message=TEXT,
        blame=st.none() | BLAME,
        retry_after_s=st.none() | FINITE,
    ),
    wire.TokenizedText: st.builds(wire.TokenizedText, request_id=NAME, ids=IDS.map(lambda ids: ids.tobytes())),
    wire.Controlled: st.builds(wire.Controlled, request_id=NAME, problem=TEXT, num_paused=ID),
    wire.GrammarTook: st.builds(wire.GrammarTook, durations_s=st.dictionaries(st.sampled_from(GrammarStep), DURATIONS)),
}


def test_every_command_and_every_event_is_among_the_values() -> None:
    assert set(COMMAND_VALUES) == set(Command.__args__)  # type: ignore[attr-defined]
    assert set(EVENT_VALUES) == set(Event.__args__)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def other_process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", AGAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=st.one_of(*COMMAND_VALUES.values(), *EVENT_VALUES.values()))
def test_a_message_that_crosses_the_pipe_twice_is_unchanged(
    other_process: "subprocess.Popen[bytes]", value: Command | Event
) -> None:
    assert other_process.stdin is not None
    assert other_process.stdout is not None
    is_event = type(value) in EVENT_VALUES
    payload = (b"e" if is_event else b"c") + frame(value)[wire.LENGTH_BYTES :]
    other_process.stdin.write(len(payload).to_bytes(wire.LENGTH_BYTES, "little") + payload)
    other_process.stdin.flush()
    back = read_frame(other_process.stdout)
    assert back is not None
    decoder: msgspec.msgpack.Decoder[Command | Event] = EVENTS if is_event else COMMANDS  # type: ignore[assignment]
    assert decoder.decode(back) == value
