"""Every value comes back from a row bit for bit, and one changed byte is always found."""

import contextlib
import dataclasses
import datetime
import math
import re
import struct
from array import array
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from stenograph.core.chat import Asked, ParsedReply, ParseFault, ParseProblem, Remaining, ToolChoice, ToolMode
from stenograph.core.day import Day
from stenograph.core.errors import SessionDamaged
from stenograph.core.kinds import AfterLength, Compat, HistoryKind, Label, SaltMode, StrandKind
from stenograph.core.messages import Expansion, MediaKind, MediaRef, Message, PlacedMedia, Role, Tool, ToolCall
from stenograph.core.outcome import Annotation, RolloutVerdict, SessionOutcome, TurnScores
from stenograph.core.replay import PackedInts, Replay
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.stages import Stage, StageTimes
from stenograph.core.stated_options import OverLimit, StatedOptions
from stenograph.core.types import (
    EngineTimes,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    LogprobsKind,
    MixedWeights,
    RepetitionOver,
    RequestId,
    SampledTurn,
    SamplingParams,
    SessionId,
    TopLogprob,
    WeightSpan,
    token_ids,
)
from stenograph.core.weights import CacheSalt
from stenograph.store.base import StoredRow, StoredSession, checked_payloads
from stenograph.store.codec.annotations import decode_annotation, encode_annotation
from stenograph.store.codec.commits import (
    decode_commit,
    decode_opened,
    decode_outcome,
    encode_commit,
    encode_opened,
    encode_outcome,
)
from stenograph.store.codec.rows import (
    COMMIT,
    HEAD_BYTES,
    OPENED,
    OUTCOME,
    RowDamaged,
    Totals,
    row_body,
    row_digest,
    row_payload,
)
from stenograph.trajectory.canonical import Canonical, DropRule, PinPlace, PinRule
from stenograph.trajectory.commits import (
    LedgerRow,
    ModelMark,
    PlacedTurn,
    RequestMark,
    SessionCommit,
    SessionOpened,
    SessionOptions,
    StrandOpened,
)
from stenograph.trajectory.forks import ForkPoint
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus

texts = st.text(st.characters(codec=None), max_size=20)
"""Lone surrogates among them, which JSON can write."""
counts = st.integers(0, 2**31 - 1)
limits = st.integers(1, 2**31 - 1)
packed = st.lists(st.integers(-9, 2**17)).map(lambda values: PackedInts.of(np.array(values, np.int32)))
finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
json_objects = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
calls = st.builds(ToolCall, id=texts, name=texts, arguments=texts)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def ids(size: int | None = None) -> st.SearchStrategy[Any]:
    least, most = (0, 20) if size is None else (size, size)
    return st.lists(st.integers(-(2**31), 2**31 - 1), min_size=least, max_size=most).map(token_ids)


def floats(size: int, *, any_bits: bool = False) -> st.SearchStrategy[Any]:
    values = st.floats() if any_bits else finite
    return st.lists(values, min_size=size, max_size=size).map(lambda found: array("d", found))


messages = st.one_of(
    st.builds(
        Message,
        role=st.just(Role.ASSISTANT),
        content=maybe(texts),
        reasoning=maybe(texts),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
        name=maybe(texts),
    ),
    st.builds(Message, role=st.just(Role.TOOL), content=maybe(texts), tool_call_id=maybe(texts), name=maybe(texts)),
    st.builds(Message, role=st.sampled_from([Role.SYSTEM, Role.DEVELOPER, Role.USER]), content=maybe(texts)),
)
refs = st.builds(
    MediaRef,
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    kind=st.sampled_from(MediaKind),
    media_type=texts,
    num_bytes=counts,
)


@st.composite
def messages_with_media(draw: Any) -> Message:
    role = draw(st.sampled_from([Role.USER, Role.TOOL]))
    content = draw(maybe(texts))
    places = sorted(draw(st.lists(st.integers(0, len(content or "")), max_size=3)))
    return Message(role=role, content=content, media=tuple(PlacedMedia(at=at, ref=draw(refs)) for at in places))


params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100) | st.just(1),
    top_p=st.floats(0.01, 1.0),
    top_k=counts,
    min_p=st.floats(0, 1),
    seed=maybe(st.integers(-(2**63), 2**64 - 1)),
    max_tokens=maybe(st.integers(100, 2**31 - 1)),
    min_tokens=st.integers(0, 100),
    stop=st.lists(texts.filter(bool), max_size=2).map(tuple),
    stop_token_ids=st.lists(counts, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2) | st.just(-0.0),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.lists(st.tuples(counts, st.floats(-100, 100)), max_size=3).map(tuple),
    grammar=maybe(st.builds(Grammar, kind=st.sampled_from(GrammarKind), source=texts)),
    num_top_logprobs=st.integers(0, 20),
    support=st.booleans(),
    repetition_over=st.sampled_from(RepetitionOver),
)
contexts = st.builds(
    PromptContext,
    tools=st.lists(st.builds(Tool, name=texts, json=texts, parameters_json=texts), max_size=2).map(tuple),
    template_kwargs=json_objects,
    day=maybe(st.dates(min_value=datetime.date(1000, 1, 1)).map(lambda date: Day(date=date))),
)
stages = st.builds(StageTimes, start=finite, **{stage.value: maybe(finite) for stage in Stage})
labels = st.builds(Label, kind=maybe(st.sampled_from(StrandKind)), client=maybe(texts), rule=maybe(texts))


@st.composite
def sampled_turns(draw: Any) -> SampledTurn:
    num = draw(st.integers(0, 6))
    top = st.builds(TopLogprob, id=st.integers(-(2**31), 2**31 - 1), logprob=st.floats())
    rows = st.lists(st.lists(top, max_size=3).map(tuple), min_size=num, max_size=num).map(tuple)
    spans: list[WeightSpan] = []
    if num >= 2:
        spans = [WeightSpan(version=draw(texts), start=0, end=1), WeightSpan(version="2", start=1, end=num)]
    mixed = draw(maybe(st.builds(MixedWeights, oldest=maybe(texts))))
    return SampledTurn(
        ids=draw(ids(num)),
        logprobs=draw(floats(num)),
        sampling_logprobs=draw(maybe(floats(num, any_bits=True))),
        top_logprobs=draw(maybe(rows)),
        finish=Finish(reason=draw(st.sampled_from(FinishReason)), matched=draw(maybe(counts | texts))),
        weights=tuple(spans) if mixed is None else (),
        num_cached_tokens=draw(counts),
        times=draw(
            maybe(st.builds(EngineTimes, submitted=finite, admitted=finite, first_token=finite, finished=finite))
        ),
        replay=draw(
            maybe(st.builds(Replay, routed_experts=maybe(packed), indexer_topk=maybe(packed), first_row=counts))
        ),
        logprobs_kind=draw(st.sampled_from(LogprobsKind)),
        tempered_logprobs=draw(maybe(floats(num, any_bits=True))),
        forced=draw(maybe(st.binary(min_size=num, max_size=num))),
        mixed=mixed,
        support=draw(maybe(st.binary(max_size=9))),
        cached_from=draw(maybe(texts)),
    )


turns = st.builds(
    CommittedTurn,
    request_id=st.uuids().map(lambda id_: RequestId(id_.hex)),
    new_prompt_ids=ids(),
    sampled=sampled_turns(),
    status=st.sampled_from(TurnStatus),
    messages=st.lists(messages | messages_with_media(), max_size=3).map(tuple),
    reply=st.builds(
        ParsedReply,
        message=messages,
        faults=st.lists(
            st.builds(ParseFault, problem=st.sampled_from(ParseProblem), seen=texts, start=counts, end=counts),
            max_size=2,
        ).map(tuple),
        num_reasoning_tokens=counts,
    ),
    context=contexts,
    asked=st.sampled_from(Asked),
    num_trimmed=counts,
    params=params,
    tool_choice=st.builds(ToolChoice, mode=st.sampled_from([ToolMode.AUTO, ToolMode.NONE, ToolMode.REQUIRED]))
    | st.builds(ToolChoice, mode=st.just(ToolMode.NAMED), name=texts),
    parallel_tool_calls=st.booleans(),
    reply_id=st.text(max_size=10),
    request_json=st.binary(max_size=10),
    rewrites=st.lists(
        st.builds(AppliedRewrite, rule=texts, where=texts, before=texts, after=texts, message=maybe(counts)), max_size=2
    ).map(tuple),
    policy=texts,
    requested_at=finite,
    committed_at=finite,
    stages=stages,
    trace_id=st.just("") | st.uuids().map(lambda one: one.hex),
    media=st.lists(st.builds(Expansion, position=counts, ref=refs, ids=ids()), max_size=2).map(tuple),
    num_inherited=counts,
)
ledger_rows = st.builds(
    LedgerRow,
    number=counts,
    received_s=finite,
    path=texts,
    dialect=texts,
    client=texts,
    label=labels,
    overlaps=st.lists(counts, max_size=3).map(tuple),
    ended_s=maybe(finite),
    status=maybe(counts),
    error=maybe(st.text(max_size=5)),
    strand=maybe(counts),
    turn=maybe(counts),
    num_prompt_tokens=counts,
    num_cached_tokens=counts,
    num_sampled_tokens=counts,
    rewrites=st.lists(texts, max_size=2).map(tuple),
)
marks = st.builds(
    RequestMark,
    route=texts,
    body_print=st.binary(min_size=16, max_size=16),
    num_body_bytes=counts,
    key=maybe(texts),
    order=counts,
    num_begun=counts,
    budget=st.builds(
        Remaining,
        context_tokens=maybe(st.integers(-(2**31), 2**31)),
        session_tokens=maybe(st.integers(-(2**31), 2**31)),
    ),
)
patterns = st.builds(re.compile, texts.map(re.escape), st.sampled_from([0, re.IGNORECASE, re.DOTALL | re.MULTILINE]))
options = st.builds(
    SessionOptions,
    history=st.sampled_from(HistoryKind),
    matcher=st.text(max_size=10),
    after_length=st.sampled_from(AfterLength),
    metadata=json_objects,
    ttl_s=maybe(finite),
    stated=st.builds(
        StatedOptions,
        max_turns=maybe(limits),
        max_requests=maybe(limits),
        max_total_tokens=maybe(limits),
        over_limit=maybe(st.sampled_from(OverLimit)),
        group=maybe(texts),
        policy=maybe(texts.filter(bool)),
    ),
    fork=maybe(
        st.builds(
            ForkPoint,
            session_id=texts,
            turn=counts,
            token=maybe(counts),
            num_turns=counts,
            cut=maybe(turns),
            replays=st.booleans(),
        )
    ),
    tenant=maybe(texts),
    max_nodes=maybe(counts),
    template_kwargs=json_objects,
    support=st.booleans(),
    compat=maybe(st.sampled_from(Compat)),
    cache_salt=st.builds(CacheSalt, mode=st.sampled_from(SaltMode), pinned=maybe(texts)),
    canonical=st.builds(
        Canonical,
        drops=st.lists(st.builds(DropRule, name=texts, block=patterns, num_blocks=counts), max_size=2).map(tuple),
        pins=st.lists(
            st.builds(
                PinRule,
                name=texts,
                place=st.sampled_from(PinPlace),
                begins=maybe(patterns),
                pattern=maybe(patterns),
            ),
            max_size=2,
        ).map(tuple),
    ),
    sampling=maybe(
        st.builds(
            SamplingRules,
            default=st.fixed_dictionaries({}, optional={"temperature": st.floats(0, 2) | st.just(1), "top_k": counts}),
            force=st.fixed_dictionaries(
                {},
                optional={
                    "stop": st.just(("a", "b")),
                    "logit_bias": st.just(((1, 2.5), (3, -1.0))),
                    "max_tokens": st.integers(1, 99),
                },
            ),
        )
    ),
)
openings = st.builds(
    SessionOpened,
    session_id=st.uuids().map(lambda id_: SessionId(id_.hex)),
    created_at=finite,
    model=st.builds(ModelMark, name=texts, digest=st.binary(max_size=32)),
    options=options,
    request=maybe(marks),
)


@st.composite
def commits(draw: Any) -> tuple[SessionCommit, dict[int, Node]]:
    """A commit, and the nodes that it may hang on; what a turn shares with its parent is the parent's own object."""
    nodes = {7: Node(id_=7, turn=draw(turns), parent=None)}
    placed: list[PlacedTurn] = []
    for _ in range(draw(st.integers(1, 2))):
        turn, parent = draw(turns), draw(st.sampled_from([None, nodes[7]]))
        if parent is not None:
            shared = draw(st.sets(st.sampled_from(["context", "params", "tool_choice", "request_json"])))
            turn = structs.replace(turn, **{name: getattr(parent.turn, name) for name in shared})
        opened = st.builds(
            StrandOpened,
            key=maybe(st.binary(min_size=16, max_size=16)),
            agent_id=texts,
            continues=maybe(st.integers(0, 99)),
            fork_of=maybe(st.integers(0, 99)),
        )
        strand = draw(maybe(st.integers(0, 99)))
        opens = draw(opened) if strand is None else StrandOpened()
        placed.append(PlacedTurn(turn=turn, parent=parent, strand=strand, opened=opens))
    commit = SessionCommit(
        turns=tuple(placed),
        label=draw(labels),
        reply_id=draw(maybe(st.text(max_size=5))),
        request=draw(maybe(marks)),
        ledger=tuple(draw(st.lists(ledger_rows, max_size=2))),
    )
    return commit, nodes


TURN = CommittedTurn(
    request_id=RequestId("a" * 32),
    new_prompt_ids=token_ids(range(100)),
    sampled=SampledTurn(
        ids=token_ids(range(100)),
        logprobs=array("d", [-0.5] * 100),
        sampling_logprobs=None,
        top_logprobs=None,
        finish=Finish(reason=FinishReason.STOP, matched=2),
        weights=(),
        num_cached_tokens=0,
        times=None,
    ),
    status=TurnStatus.COMPLETED,
    messages=(Message(role=Role.USER, content="x" * 400),),
    reply=ParsedReply(message=Message(role=Role.ASSISTANT, content="y" * 400)),
    context=PromptContext(tools=(Tool(name="t", json="j" * 50_000),)),
    request_json=b'{"model": "m"}',
)


def commit_of(turn: CommittedTurn, *, parent: Node | None = None) -> SessionCommit:
    return SessionCommit(turns=(PlacedTurn(turn=turn, parent=parent, strand=0),))


def bits(value: Any) -> Any:  # noqa: PLR0911
    """A value as what is compared: every float by its bits, every number with its type, every field of every part."""
    match value:
        case bool() | None:
            return value
        case float():
            return ("float", struct.pack("<d", value))
        case int():
            return ("int", int(value))
        case str() | bytes():
            return (type(value).__name__, value)
        case array():
            return (value.typecode, value.tobytes())
        case tuple() | list():
            return (type(value).__name__, [bits(one) for one in value])
        case dict() | Mapping():
            return ("dict", [(key, bits(one)) for key, one in value.items()])
        case re.Pattern():
            return ("pattern", value.pattern, value.flags)
        case Node():
            return ("node", value.id)
        case datetime.date():
            return value.isoformat()
        case _:
            return (type(value).__name__, [(name, bits(getattr(value, name))) for name in fields_of(value)])


def fields_of(value: Any) -> list[str]:
    """The names of the fields of a dataclass or struct, or of one's value."""
    names = getattr(value, "__struct_fields__", None)
    return [field.name for field in dataclasses.fields(value)] if names is None else list(names)


slow = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)


@slow
@given(commits())
def test_a_commit_comes_back_bit_for_bit(made: tuple[SessionCommit, dict[int, Node]]) -> None:
    commit, nodes = made
    back = decode_commit(memoryview(encode_commit(commit)), nodes.__getitem__)
    assert bits(back) == bits(commit)
    for before, after in zip(commit.turns, back.turns, strict=True):
        if before.parent is not None and before.turn.context is before.parent.turn.context:
            assert after.turn.context is before.parent.turn.context, "what is shared is one object again"


@slow
@given(openings)
@example(
    SessionOpened(
        session_id=SessionId("0" * 32),
        created_at=1.0,
        options=SessionOptions(metadata={"big": 10**30, "one": 1, "uno": 1.0}),
    )
)
def test_an_opening_comes_back_bit_for_bit(opened: SessionOpened) -> None:
    assert bits(decode_opened(memoryview(encode_opened(opened)))) == bits(opened)


def widened(written: Any) -> Any:
    """A payload as it was written before arrays were packed: ids as int32, log-probabilities as float64."""
    match written:
        case list():
            return [widened(one) for one in written]
        case msgspec.msgpack.Ext(code=4, data=data):
            return np.frombuffer(data, "<f4").astype("<f8").tobytes()
        case msgspec.msgpack.Ext(code=code, data=data):
            planes = np.frombuffer(data, np.uint8).reshape(code, -1).astype("<i4")
            return sum(plane << (8 * byte) for byte, plane in enumerate(planes)).tobytes()  # type: ignore[union-attr]
        case _:
            return written


FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=20) | st.lists(st.floats(), min_size=1, max_size=20)


@given(
    st.sampled_from([(0, 0), (0, 2**8), (0, 2**16), (0, 2**24), (-(2**31), 2**31 - 1)]).flatmap(
        lambda bounds: st.lists(st.integers(*bounds), min_size=1, max_size=20)
    ),
    FLOATS.filter(lambda found: all(map(math.isfinite, found))),
    FLOATS,
    st.integers(1023, 1025),
)
def test_many_ids_and_floats_come_back_bit_for_bit_as_packed_and_as_they_were_written_before(
    ids: list[int], finite: list[float], any_bits: list[float], num: int
) -> None:
    sampled = structs.replace(
        TURN.sampled,
        ids=token_ids(islice(cycle(ids), num)),
        logprobs=array("d", islice(cycle(finite), num)),
        sampling_logprobs=array("d", islice(cycle(any_bits), num)),
    )
    turn = structs.replace(TURN, sampled=sampled, new_prompt_ids=token_ids(islice(cycle(ids), num)))
    payload = encode_commit(commit_of(turn))
    before = msgspec.msgpack.encode(widened(msgspec.msgpack.decode(payload)))
    for one in (payload, before):
        assert bits(decode_commit(memoryview(one), {}.__getitem__)) == bits(commit_of(turn))


@pytest.mark.parametrize(
    ("last_id", "logprob", "item_bytes"),
    [
        (255, float(np.float32(-0.1)), (2, 4)),
        (65_535, -0.0, (2, 4)),
        (151_645, 3.4e38, (3, 8)),
        (2**24, 1e300, (4, 8)),
        (-1, -0.1, (4, 8)),
    ],
)
def test_many_ids_and_logprobs_take_the_bytes_that_they_need(
    last_id: int, logprob: float, item_bytes: tuple[int, int]
) -> None:
    ids, logprobs = token_ids([*range(200), *[300] * 823, last_id]), array("d", [-0.5] * 1023 + [logprob])
    turn = structs.replace(TURN, sampled=structs.replace(TURN.sampled, ids=ids, logprobs=logprobs))
    written = msgspec.msgpack.decode(encode_commit(commit_of(turn)))[0][0][6][:2]
    assert tuple(len(getattr(one, "data", one)) // 1024 for one in written) == item_bytes


@slow
@given(commits(), openings)
def test_rows_that_were_written_before_their_last_fields_are_read(
    made: tuple[SessionCommit, dict[int, Node]], opened: SessionOpened
) -> None:
    commit, nodes = made
    written = msgspec.msgpack.decode(encode_commit(commit))
    for turn, one in zip(written[0], commit.turns, strict=True):
        assert len(turn[6]) == 20
        del turn[6][15:], turn[26:]
        if (replay := one.turn.sampled.replay) is not None:  # int32 in base64, as engines sent it
            told = (replay.routed_experts, replay.indexer_topk)
            turn[6][9:11] = [None if numbers is None else numbers.base64.encode() for numbers in told]
    back = decode_commit(memoryview(msgspec.msgpack.encode(written)), nodes.__getitem__)
    without: list[PlacedTurn] = []
    for one in commit.turns:
        sampled = structs.replace(one.turn.sampled, support=None, mixed=None, cached_from=None)
        if sampled.replay is not None:
            sampled = structs.replace(sampled, replay=structs.replace(sampled.replay, first_row=0))
        messages = tuple(structs.replace(message, media=()) for message in one.turn.messages)
        turn = structs.replace(one.turn, sampled=sampled, messages=messages, media=(), num_inherited=0)
        without.append(structs.replace(one, turn=turn))
    assert bits(back) == bits(structs.replace(commit, turns=tuple(without)))
    row = msgspec.msgpack.decode(encode_opened(opened))
    old = decode_opened(memoryview(msgspec.msgpack.encode(row[:15])))
    group = StatedOptions(group=opened.options.stated.group)
    before = dataclasses.replace(
        opened.options, support=False, compat=None, stated=group, cache_salt=CacheSalt(), fork=None, tenant=None
    )
    assert bits(old) == bits(dataclasses.replace(opened, options=before))
    row[8][:2] = [7, 9]  # as limits, where the budgets stand now
    old = decode_opened(memoryview(msgspec.msgpack.encode(row[:16])))
    assert old.options.stated == structs.replace(group, max_turns=7, max_total_tokens=9)


outcomes = st.builds(
    SessionOutcome,
    verdict=st.sampled_from(RolloutVerdict),
    reward=maybe(finite | st.dictionaries(texts, finite, max_size=3)),
    detail=maybe(texts),
    turns=st.dictionaries(st.integers(0, 99), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
    tokens=st.dictionaries(
        st.integers(0, 99),
        st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(lambda row: array("d", row)),
        max_size=2,
    ),
)


@given(outcomes)
def test_an_outcome_comes_back_bit_for_bit(outcome: SessionOutcome) -> None:
    assert bits(decode_outcome(memoryview(encode_outcome(outcome)))) == bits(outcome)


def test_no_field_of_a_stored_value_is_forgotten_by_the_codec() -> None:
    """The strategies above name each: a field that is added has to be written, and comes here."""
    known = {
        PackedInts: 2,
        CommittedTurn: 22, SampledTurn: 15, SessionOpened: 5, SessionOptions: 15, SessionCommit: 5,
        PlacedTurn: 4, RequestMark: 7,
        LedgerRow: 16, SamplingParams: 18, Message: 7, MediaRef: 4, PlacedMedia: 2, Expansion: 3,
        Tool: 3, ToolCall: 3, Replay: 3, PromptContext: 4,
        ParsedReply: 3, AppliedRewrite: 5, SamplingRules: 2,
        DropRule: 3, PinRule: 4, Canonical: 2, StrandOpened: 4, Remaining: 2, Label: 3, StageTimes: 13,
        SessionOutcome: 5, ToolChoice: 2, ParseFault: 4, EngineTimes: 4, Finish: 2, WeightSpan: 3, TopLogprob: 2,
        ModelMark: 2, Grammar: 2, Day: 1, StatedOptions: 6, ForkPoint: 6, CacheSalt: 2,
    }  # fmt: skip
    assert {kind: len(fields_of(kind)) for kind in known} == known


def test_a_fork_of_an_older_server_has_no_recorded_replies_to_give() -> None:
    fork = ForkPoint(session_id=SessionId("a"), turn=3, token=None, num_turns=4, replays=True)
    opened = SessionOpened(session_id=SessionId("b"), created_at=0.0, options=SessionOptions(fork=fork))
    written = msgspec.msgpack.decode(encode_opened(opened))
    (index,) = [index for index, one in enumerate(written) if one == ["a", 3, None, 4, None, True]]
    written[index].pop()
    assert decode_opened(memoryview(msgspec.msgpack.encode(written))).options.fork == structs.replace(
        fork, replays=False
    )


@slow
@given(outcomes, st.data())
def test_an_outcome_with_changed_bytes_is_read_or_damaged(outcome: SessionOutcome, data: st.DataObject) -> None:
    payload = bytearray(encode_outcome(outcome))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RowDamaged):
        decode_outcome(memoryview(bytes(payload)))


def stored(num_rows: int) -> StoredSession:
    id_ = SessionId("00" * 16)
    rows: list[StoredRow] = []
    digest = b""
    for seq in range(num_rows):
        body = row_body(OPENED if seq == 0 else COMMIT, Totals(num_turns=seq), b"what row %d says " % seq * 200)
        digest = row_digest(digest, id_, seq, body)
        rows.append(StoredRow(seq=seq, body=body, digest=digest))
    return StoredSession(session_id=id_, number=1, at=1.0, rows=rows)


@given(st.integers(0, 3), st.sampled_from(["body", "digest"]), st.integers(0, 10**6), st.integers(1, 255))
def test_one_changed_byte_is_found_wherever_it_is(row: int, part: str, at: int, flip: int) -> None:
    session = stored(4)
    checked_payloads(session)
    rows = list(session.rows)
    changed = bytearray(getattr(rows[row], part))
    changed[at % len(changed)] ^= flip
    rows[row] = dataclasses.replace(rows[row], **{part: bytes(changed)})
    with pytest.raises(SessionDamaged, match="opening" if row == 0 else f"row {row}"):
        checked_payloads(dataclasses.replace(session, rows=rows))


@given(st.binary(max_size=300))
def test_whatever_a_row_holds_it_is_read_or_damaged(payload: bytes) -> None:
    for read in (
        lambda: decode_opened(memoryview(payload)),
        lambda: decode_commit(memoryview(payload), {}.__getitem__),
        lambda: decode_outcome(memoryview(payload)),
        lambda: row_payload(payload, COMMIT),
    ):
        try:
            read()
        except RowDamaged:
            continue


@slow
@given(commits(), st.data())
def test_a_commit_with_changed_bytes_is_read_or_damaged(
    made: tuple[SessionCommit, dict[int, Node]], data: st.DataObject
) -> None:
    commit, nodes = made
    payload = bytearray(encode_commit(commit))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RowDamaged):
        decode_commit(memoryview(bytes(payload)), nodes.__getitem__)


def test_a_row_of_another_kind_or_a_later_format_is_damage() -> None:
    body = row_body(OPENED, Totals(num_tokens=5), b"payload")
    assert (bytes(row_payload(body, OPENED)), Totals.of(body[:HEAD_BYTES])) == (b"payload", Totals(num_tokens=5))
    with pytest.raises(RowDamaged, match="kind 0, not 1 or 2"):
        row_payload(body, COMMIT, OUTCOME)
    with pytest.raises(RowDamaged, match="format 3, and this server knows 2"):
        row_payload(b"\x03" + body[1:], OPENED)
    assert row_payload(b"\x01" + body[1:], OPENED) == b"payload"
    with pytest.raises(RowDamaged, match="has 3 bytes"):
        row_payload(body[:3], OPENED)


def test_a_turn_s_row_is_as_long_as_what_the_turn_added_however_long_its_line_is() -> None:
    parent, sizes = None, list[int]()
    for number in range(50):
        sizes.append(len(encode_commit(commit_of(TURN, parent=parent))))
        parent = Node(id_=number, turn=TURN, parent=parent)
    assert sizes[0] > 50_000
    assert sizes[1] == sizes[40] < 2_700


SCORED_TURNS = st.builds(
    lambda logprobs, k: TurnScores(
        logprobs=array("d", logprobs),
        top_ids=array("i", range(k * len(logprobs))),
        top_logprobs=array("d", [-0.5] * (k * len(logprobs))),
    ),
    st.lists(st.floats(max_value=0.0, allow_nan=False), min_size=1, max_size=5),
    st.integers(0, 3),
)
ANNOTATIONS = st.builds(
    Annotation,
    name=st.text(max_size=5),
    digest=st.just("ab" * 32),
    engine=st.text(max_size=5),
    policy=st.none() | st.text(max_size=5),
    version=st.none() | st.text(max_size=5),
    at=st.floats(0, 2e9),
    turns=st.dictionaries(st.integers(0, 99), SCORED_TURNS, max_size=3),
    tokens=st.dictionaries(st.text(max_size=5), st.floats(max_value=0.0, allow_nan=False), max_size=3),
)


@given(annotation=ANNOTATIONS, idle_since=st.none() | st.floats(0, 2e9))
def test_an_annotation_comes_back_bit_for_bit(annotation: Annotation, idle_since: float | None) -> None:
    payload = encode_annotation(annotation, idle_since=idle_since)
    assert decode_annotation(memoryview(payload)) == (annotation, idle_since)


@given(annotation=ANNOTATIONS, num_left_out=st.integers(1, 40))
def test_a_cut_annotation_is_damage(annotation: Annotation, num_left_out: int) -> None:
    payload = encode_annotation(annotation)
    with pytest.raises(RowDamaged):
        decode_annotation(memoryview(payload[: max(0, len(payload) - num_left_out)]))
