"""A turn as a list of MessagePack: its additions to its parent. And the texts, arrays and loose values of rows. Pure.

Texts are UTF-8 with lone surrogates, since a JSON text can hold them. Arrays are their bytes, little-endian: int32 and
float64, or of many values the smallest type that gives each back exactly, as an extension of MessagePack.
"""

import sys
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, cast

import msgspec
from msgspec.msgpack import Ext
from msgspec.structs import replace

from stenograph.core.chat import Asked, ParsedReply, ParseFault, ParseProblem, ToolChoice, ToolMode
from stenograph.core.day import Day
from stenograph.core.loaded import entry
from stenograph.core.messages import Expansion, MediaKind, MediaRef, Message, PlacedMedia, Role, Tool, ToolCall
from stenograph.core.replay import PackedInts, Replay, int32_of_base64
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.stages import StageTimes
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
    TopLogprob,
    WeightSpan,
)
from stenograph.trajectory.commits import PlacedTurn, StrandOpened
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus

_IS_LITTLE = sys.byteorder == "little"
_DEFAULT_PARAMS = SamplingParams()

_MANY = 1024
"""From here on the bytes saved are worth more than finding the type: some 3 ns of CPU a byte against 35 µs a turn."""

_FLOAT32 = 4
"""The code of an extension with float32. With ids it is the bytes of each, 1 to 3: all lowest bytes, then the next."""

_Text = bytes | None
_Array = bytes | Ext
_Calls = list[tuple[bytes, bytes, bytes]]
_WrittenMessage = tuple[Role, _Text, _Text, _Calls, _Text, _Text]
_WrittenRef = tuple[str, MediaKind, bytes, int]


class _WrittenSampled(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ids: _Array
    logprobs: _Array
    sampling_logprobs: _Array | None
    top_logprobs: tuple[_Array, _Array, _Array] | None
    finish: FinishReason
    matched: int | bytes | None
    weights: list[tuple[bytes, int, int]]
    num_cached: int
    times: tuple[float, float, float, float] | None
    routed_experts: bytes | None
    indexer_topk: bytes | None
    has_replay: bool
    logprobs_kind: LogprobsKind
    tempered_logprobs: _Array | None
    forced: bytes | None
    mixed: tuple[_Text] | None = None  # older rows end before these
    support: bytes | None = None
    first_row: int = 0
    cached_from: _Text = None
    replay_item_bytes: tuple[int, int] | None = None
    """Of `routed_experts` and `indexer_topk`; None where these are int32 in base64, as older rows have them."""


class WrittenTurn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    parent: int | None
    strand: int | None
    opened: tuple[bytes | None, bytes, int | None, int | None] | None
    request_id: str
    new_prompt_ids: _Array
    num_trimmed: int
    sampled: _WrittenSampled
    status: TurnStatus
    messages: list[_WrittenMessage]
    reply: _WrittenMessage
    faults: list[tuple[ParseProblem, bytes, int, int]]
    num_reasoning: int
    asked: Asked
    context: tuple[list[tuple[bytes, bytes, bytes]], bytes, str | None] | None
    params: dict[str, Any] | None
    tool_choice: tuple[ToolMode, _Text] | None
    parallel: bool
    reply_id: str
    request_json: bytes | None
    rewrites: list[tuple[bytes, bytes, bytes, bytes, int | None]]
    requested_at: float
    committed_at: float
    started: float
    stages: dict[str, float]
    policy: bytes = b""
    trace_id: str = ""  # older rows end before it
    placed_media: list[tuple[int, int, _WrittenRef]] = []
    """Of each medium, the number of its message, and its place there."""
    media: list[tuple[int, _Array, _WrittenRef]] = []
    num_inherited: int = 0  # older rows end before it


def turn_written(placed: PlacedTurn) -> WrittenTurn:
    turn, opened = placed.turn, placed.opened
    before = None if placed.parent is None else placed.parent.turn
    context, params, choice, request_json = turn.context, turn.params, turn.tool_choice, turn.request_json
    return WrittenTurn(
        parent=None if placed.parent is None else placed.parent.id,
        strand=placed.strand,
        opened=None
        if placed.strand is not None
        else (opened.key, text_written(opened.agent_id), opened.continues, opened.fork_of),
        request_id=turn.request_id,
        new_prompt_ids=_ids_written(turn.new_prompt_ids),
        num_trimmed=turn.num_trimmed,
        sampled=_sampled_written(turn.sampled),
        status=turn.status,
        messages=[_message_written(message) for message in turn.messages],
        reply=_message_written(turn.reply.message),
        faults=[(fault.problem, text_written(fault.seen), fault.start, fault.end) for fault in turn.reply.faults],
        num_reasoning=turn.reply.num_reasoning_tokens,
        asked=turn.asked,
        context=None if before is not None and context is before.context else _context_written(context),
        params=None if before is not None and params is before.params else params_written(params),
        tool_choice=None
        if before is not None and choice is before.tool_choice
        else (choice.mode, maybe_written(choice.name)),
        parallel=turn.parallel_tool_calls,
        reply_id=turn.reply_id,
        request_json=None if before is not None and request_json is before.request_json else request_json,
        rewrites=[
            (text_written(r.rule), text_written(r.where), text_written(r.before), text_written(r.after), r.message)
            for r in turn.rewrites
        ],
        requested_at=turn.requested_at,
        committed_at=turn.committed_at,
        started=turn.stages.start,
        stages=turn.stages.ends,
        policy=text_written(turn.policy),
        trace_id=turn.trace_id,
        placed_media=[
            (number, one.at, _ref_written(one.ref))
            for number, message in enumerate(turn.messages)
            for one in message.media
        ],
        media=[(one.position, _ids_written(one.ids), _ref_written(one.ref)) for one in turn.media],
        num_inherited=turn.num_inherited,
    )


def turn_read(written: WrittenTurn, node_of: Callable[[int], Node]) -> PlacedTurn:
    parent = None if written.parent is None else node_of(written.parent)
    before = None if parent is None else parent.turn
    turn = CommittedTurn(
        request_id=RequestId(written.request_id),
        new_prompt_ids=_ids_read(written.new_prompt_ids),
        num_trimmed=written.num_trimmed,
        sampled=_sampled_read(written.sampled),
        status=written.status,
        messages=tuple(_messages_read(written)),
        reply=ParsedReply(
            message=_message_read(written.reply),
            faults=tuple(
                ParseFault(problem=problem, seen=text_read(seen), start=start, end=end)
                for problem, seen, start, end in written.faults
            ),
            num_reasoning_tokens=written.num_reasoning,
        ),
        asked=written.asked,
        context=_kept(before, "context") if written.context is None else _context_read(written.context),
        params=_kept(before, "params") if written.params is None else params_read(written.params),
        tool_choice=_kept(before, "tool_choice")
        if written.tool_choice is None
        else ToolChoice(mode=written.tool_choice[0], name=maybe_read(written.tool_choice[1])),
        parallel_tool_calls=written.parallel,
        reply_id=written.reply_id,
        request_json=_kept(before, "request_json") if written.request_json is None else written.request_json,
        rewrites=tuple(
            AppliedRewrite(
                rule=text_read(rule), where=text_read(where), before=text_read(old), after=text_read(new), message=at
            )
            for rule, where, old, new, at in written.rewrites
        ),
        requested_at=written.requested_at,
        committed_at=written.committed_at,
        stages=StageTimes(start=written.started, **written.stages),
        policy=text_read(written.policy),
        trace_id=written.trace_id,
        media=tuple(
            Expansion(position=position, ref=_ref_read(ref), ids=_ids_read(ids)) for position, ids, ref in written.media
        ),
        num_inherited=written.num_inherited,
    )
    opened = StrandOpened()
    if written.opened is not None:
        key, agent_id, continues, fork_of = written.opened
        opened = StrandOpened(key=key, agent_id=text_read(agent_id), continues=continues, fork_of=fork_of)
    return PlacedTurn(turn=turn, parent=parent, strand=written.strand, opened=opened)


def _kept(before: CommittedTurn | None, name: str) -> Any:
    """A value shared by a turn and the one before it."""
    if before is None:
        raise ValueError(f"a first turn has no {name}")
    return getattr(before, name)


def _context_written(context: PromptContext) -> tuple[list[tuple[bytes, bytes, bytes]], bytes, str | None]:
    tools = [
        (text_written(tool.name), text_written(tool.json), text_written(tool.parameters_json)) for tool in context.tools
    ]
    kwargs = msgspec.json.encode(context.template_kwargs)
    return tools, kwargs, None if context.day is None else context.day.date.isoformat()


def _context_read(written: tuple[list[tuple[bytes, bytes, bytes]], bytes, str | None]) -> PromptContext:
    tools, kwargs, day = written
    return PromptContext(
        tools=tuple(
            Tool(name=text_read(name), json=text_read(json), parameters_json=text_read(p)) for name, json, p in tools
        ),
        template_kwargs=object_read(kwargs),
        day=None if day is None else Day.of_iso(day),
    )


def _sampled_written(sampled: SampledTurn) -> _WrittenSampled:
    times, replay, matched, tops = sampled.times, sampled.replay, sampled.finish.matched, sampled.top_logprobs
    experts, indexer = (None, None) if replay is None else (replay.routed_experts, replay.indexer_topk)
    return _WrittenSampled(
        ids=_ids_written(sampled.ids),
        logprobs=_floats_written(sampled.logprobs),
        sampling_logprobs=_maybe_floats_written(sampled.sampling_logprobs),
        top_logprobs=None if tops is None else _tops_written(tops),
        finish=sampled.finish.reason,
        matched=text_written(matched) if isinstance(matched, str) else matched,
        weights=[(text_written(span.version), span.start, span.end) for span in sampled.weights],
        num_cached=sampled.num_cached_tokens,
        times=None if times is None else (times.submitted, times.admitted, times.first_token, times.finished),
        routed_experts=None if experts is None else experts.data,
        indexer_topk=None if indexer is None else indexer.data,
        has_replay=replay is not None,
        logprobs_kind=sampled.logprobs_kind,
        tempered_logprobs=_maybe_floats_written(sampled.tempered_logprobs),
        forced=sampled.forced,
        mixed=None if sampled.mixed is None else (maybe_written(sampled.mixed.oldest),),
        support=sampled.support,
        first_row=0 if replay is None else replay.first_row,
        cached_from=maybe_written(sampled.cached_from),
        replay_item_bytes=(experts.item_bytes if experts else 1, indexer.item_bytes if indexer else 1),
    )


def _sampled_read(written: _WrittenSampled) -> SampledTurn:
    times, matched = written.times, written.matched
    of_experts, of_indexer = written.replay_item_bytes or (None, None)
    replay = Replay(
        routed_experts=_maybe_packed(written.routed_experts, of_experts),
        indexer_topk=_maybe_packed(written.indexer_topk, of_indexer),
        first_row=written.first_row,
    )
    return SampledTurn(
        ids=_ids_read(written.ids),
        logprobs=_floats_read(written.logprobs),
        sampling_logprobs=_maybe_floats_read(written.sampling_logprobs),
        top_logprobs=None if written.top_logprobs is None else _tops_read(*written.top_logprobs),
        finish=Finish(reason=written.finish, matched=text_read(matched) if isinstance(matched, bytes) else matched),
        weights=tuple(WeightSpan(version=text_read(v), start=start, end=end) for v, start, end in written.weights),
        num_cached_tokens=written.num_cached,
        times=None
        if times is None
        else EngineTimes(submitted=times[0], admitted=times[1], first_token=times[2], finished=times[3]),
        replay=replay if written.has_replay else None,
        logprobs_kind=written.logprobs_kind,
        tempered_logprobs=_maybe_floats_read(written.tempered_logprobs),
        forced=written.forced,
        mixed=None if written.mixed is None else MixedWeights(oldest=maybe_read(written.mixed[0])),
        support=written.support,
        cached_from=maybe_read(written.cached_from),
    )


def _maybe_packed(data: bytes | None, item_bytes: int | None) -> PackedInts | None:
    """Replay data as it was packed; older rows have an engine's base64, damaged where the engine's was."""
    if data is None or item_bytes is not None:
        return None if data is None else PackedInts(data, item_bytes or 1)
    try:
        return PackedInts.of(int32_of_base64(text_read(data)))
    except ValueError:
        return PackedInts(b"", 1)  # of the wrong size for any line: its samples are refused


def _maybe_floats_written(values: "array[float] | None") -> _Array | None:
    return None if values is None else _floats_written(values)


def _maybe_floats_read(written: _Array | None) -> "array[float] | None":
    return None if written is None else _floats_read(written)


def _tops_written(rows: tuple[tuple[TopLogprob, ...], ...]) -> tuple[_Array, _Array, _Array]:
    lengths = array("i", map(len, rows))
    ids = array("i", (one.id for row in rows for one in row))
    logprobs = array("d", (one.logprob for row in rows for one in row))
    return _ids_written(lengths), _ids_written(ids), _floats_written(logprobs)


def _tops_read(lengths: _Array, ids: _Array, logprobs: _Array) -> tuple[tuple[TopLogprob, ...], ...]:
    read = _ids_read(ids)
    every = (TopLogprob(id=id_, logprob=logprob) for id_, logprob in zip(read, _floats_read(logprobs), strict=True))
    rows = tuple(tuple(islice(every, length)) for length in _ids_read(lengths))
    if sum(map(len, rows)) != len(read):
        raise ValueError("the rows of top logprobs do not have as many as there are")
    return rows


def _message_written(message: Message) -> _WrittenMessage:
    calls = [
        (text_written(call.id), text_written(call.name), text_written(call.arguments)) for call in message.tool_calls
    ]
    return (
        message.role,
        maybe_written(message.content),
        maybe_written(message.reasoning),
        calls,
        maybe_written(message.tool_call_id),
        maybe_written(message.name),
    )


def _message_read(written: _WrittenMessage) -> Message:
    role, content, reasoning, calls, tool_call_id, name = written
    return Message(
        role=role,
        content=maybe_read(content),
        reasoning=maybe_read(reasoning),
        tool_calls=tuple(ToolCall(id=text_read(i), name=text_read(n), arguments=text_read(a)) for i, n, a in calls),
        tool_call_id=maybe_read(tool_call_id),
        name=maybe_read(name),
    )


def _messages_read(written: WrittenTurn) -> list[Message]:
    messages = list(map(_message_read, written.messages))
    for number, at, ref in written.placed_media:
        message = messages[number]
        messages[number] = replace(message, media=(*message.media, PlacedMedia(at=at, ref=_ref_read(ref))))
    return messages


def _ref_written(ref: MediaRef) -> _WrittenRef:
    return ref.sha256, ref.kind, text_written(ref.media_type), ref.num_bytes


def _ref_read(written: _WrittenRef) -> MediaRef:
    sha256, kind, media_type, num_bytes = written
    return MediaRef(sha256=sha256, kind=kind, media_type=text_read(media_type), num_bytes=num_bytes)


def params_written(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults in anything: 1 and 1.0 do, and 0.0 and -0.0."""
    found: dict[str, object] = {}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if repr(value) != repr(getattr(_DEFAULT_PARAMS, name)):
            found[name] = value
    return values_written(found)


def params_read(written: Mapping[str, Any]) -> SamplingParams:
    """The parameters of those fields."""
    values = values_read(written)
    if (over := values.get("repetition_over")) is not None:
        values["repetition_over"] = RepetitionOver(over)
    return SamplingParams(**values)


def values_written(values: Mapping[str, object]) -> dict[str, Any]:
    return {name: _value_written(value) for name, value in values.items()}


def _value_written(value: object) -> Any:
    """A field of SamplingParams: a text as bytes, a tuple as a list, a grammar as an object."""
    match value:
        case str():
            return text_written(value)
        case tuple() | list():
            return [_value_written(one) for one in cast("tuple[object, ...]", value)]
        case Grammar():
            return {"kind": value.kind, "source": text_written(value.source)}
        case _:
            return value


def values_read(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value_read(value) for name, value in values.items()}


def _value_read(value: Any) -> Any:
    match value:
        case bytes():
            return text_read(value)
        case list():
            return tuple(map(_value_read, cast("list[object]", value)))
        case dict():
            written = cast("dict[str, bytes | str]", value)
            return Grammar(kind=GrammarKind(str(written["kind"])), source=text_read(cast("bytes", written["source"])))
        case _:
            return value


def text_written(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def text_read(written: bytes) -> str:
    return written.decode("utf-8", "surrogatepass")


def maybe_written(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def maybe_read(written: bytes | None) -> str | None:
    return None if written is None else written.decode("utf-8", "surrogatepass")


def object_read(written: bytes) -> dict[str, object]:
    return msgspec.json.decode(written, type=dict[str, object])


def _ids_written(ids: "array[int]") -> _Array:
    """Ids, or counts."""
    if len(ids) < _MANY:
        return _array_written(ids)
    values = entry("numpy:frombuffer")(ids, "i4").astype("<i4", copy=False)
    item_bytes = (int(values.view("<u4").max()).bit_length() + 7) // 8 or 1
    if item_bytes > 3:  # of a negative number, too
        return _array_written(ids)
    return Ext(item_bytes, values.view("u1").reshape(-1, 4).T[:item_bytes].tobytes())


def _ids_read(written: _Array) -> "array[int]":
    if isinstance(written, bytes):
        return cast("array[int]", _array_read("i", written))
    item_bytes, data = written.code, bytes(written.data)
    if not 1 <= item_bytes <= 3 or len(data) % item_bytes:
        raise ValueError(f"{len(data)} bytes of code {item_bytes} are no ids")
    num = len(data) // item_bytes
    ids = bytearray(4 * num)
    for byte in range(item_bytes):
        ids[byte::4] = data[byte * num : byte * num + num]
    return cast("array[int]", _array_read("i", ids))


def _floats_written(values: "array[float]") -> _Array:
    """Log-probabilities, which engines compute in float32."""
    if len(values) < _MANY:
        return _array_written(values)
    wide = entry("numpy:frombuffer")(values, "f8")
    with entry("numpy:errstate")(all="ignore"):
        narrow = wide.astype("<f4")
        is_exact = (narrow == wide).all()  # NaN is not
    return Ext(_FLOAT32, narrow.tobytes()) if is_exact else _array_written(values)


def _floats_read(written: _Array) -> "array[float]":
    if isinstance(written, bytes):
        return cast("array[float]", _array_read("d", written))
    if written.code != _FLOAT32:
        raise ValueError(f"no float32, but code {written.code}")
    return array("d", _array_read("f", bytes(written.data)))


def _array_written(values: "array[int] | array[float]") -> bytes:
    if not _IS_LITTLE:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _array_read(typecode: str, written: bytes | bytearray) -> "array[Any]":
    values: array[Any] = array(typecode)
    values.frombytes(written)
    if not _IS_LITTLE:
        values.byteswap()
    return values
