"""A session as its trainer reads it: records, ids, metadata. Pure: session state to values for `json_pieces`.

The shapes are the miles session server's: `session_id`, `records`, `metadata`; a record has `timestamp`,
`request_timestamp`, `method`, `path`, `status_code`, `request` as it went to the engine, `response` in the shape of
SGLang's chat route. `records=delta` leaves out the contents of earlier records: messages and ids of earlier turns.
"""

from array import array
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Annotated, Literal, NotRequired, TypedDict, cast

import msgspec
from msgspec import Meta

from stenograph.core.chat import Asked, ParseFault, ParseProblem, ReplyFinish, finish_of
from stenograph.core.drift import DriftFacts
from stenograph.core.ids_json import encode_ids, pieces_of
from stenograph.core.json_pieces import PIECE_VALUES, Written, as_chunked_list, joined, json_pieces
from stenograph.core.json_types import Count, Hex32, Logprob, TokenIds
from stenograph.core.message_json import NumberedMessage, RepliedMessage, message_body, numbered_body
from stenograph.core.messages import Message
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.stages import AFTER_WRITING
from stenograph.core.types import FinishReason, LogprobsKind, SampledTurn
from stenograph.export.lines import LeftOut, StrandRow, WireSpan, spans_json
from stenograph.trajectory.history import Discarded
from stenograph.trajectory.turn import CommittedTurn, Node, TurnStatus, line_ids

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


RecordedRewrite = TypedDict("RecordedRewrite", {"rule": str, "where": str, "from": str, "to": str})
RecordedRewrite.__doc__ = """A change to what the client sent: the rule, the client's own pointer, and both texts.

Of a text of more than 4 KiB there is its hash and its length."""


class RecordedRequest(TypedDict):
    """A request as it went to the engine; the two counts come with `records=delta`. Beside these fields it has the
    client's sampling fields, by the client's names and as they were sent."""

    messages: Sequence[RepliedMessage]
    input_ids: TokenIds
    tools: Sequence[object]
    parameters: Mapping[str, object]
    rewrites: NotRequired[Sequence[RecordedRewrite]]
    num_kept_ids: NotRequired[Count]
    num_kept_messages: NotRequired[Count]
    routed_experts_start_len: NotRequired[Count]


class RecordedFinish(TypedDict):
    """The reason for the turn's end, and the stop string or token id that ended it."""

    type: FinishReason
    matched: int | str | None


class RecordedMetaInfo(TypedDict):
    """As SGLang writes it; a triple is `[logprob, id, null]`, with the engine's own logprob, of the distribution
    `logprobs_kind`. `support` and the replay payloads are base64."""

    id: Hex32
    finish_reason: RecordedFinish
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    output_token_logprobs: Sequence[tuple[Logprob, int, None]]
    logprobs_kind: LogprobsKind
    output_token_tempered_logprobs: NotRequired[Sequence[Logprob]]
    output_token_sampling_logprobs: NotRequired[Sequence[Logprob]]
    support: NotRequired[str]
    weight_version: NotRequired[str]
    routed_experts: NotRequired[str]
    indexer_topk: NotRequired[str]


class RecordedFault(TypedDict):
    """One fault of a reply as a message: its text, shortened, and its ids `[start, end)` of the reply."""

    problem: ParseProblem
    seen: str
    start: Count
    end: Count


class RecordedChoice(TypedDict):
    """The recorded reply: a chat's `message`, or a completion's `text`."""

    index: Literal[0]
    parse_problem: ParseProblem | None
    parse_faults: Sequence[RecordedFault]
    finish_reason: ReplyFinish
    stop_reason: int | str | None
    meta_info: RecordedMetaInfo
    message: NotRequired[NumberedMessage]
    text: NotRequired[str]


class RecordedUsage(TypedDict):
    """Token counts of a turn."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class RecordedResponse(TypedDict):
    """A reply in the shape of SGLang's chat route."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    choices: Annotated[Sequence[RecordedChoice], Meta(min_length=1, max_length=1)]
    usage: RecordedUsage


class Record(TypedDict):
    """One turn, the same before and after a restart. `stages` are monotonic seconds, `stage_seconds` durations, both
    up to the stage before the turn is written. `policy` is the model or LoRA as its engine
    calls it. With `mixed_version` the weights changed meanwhile, no token's are known: `weight_versions` is null.
    `cached_from` names the weights for which the engine caches the turn; null: it keeps no cache by the weights.
    `trace_id` is there where `--otlp-endpoint` made a trace."""

    timestamp: float
    request_timestamp: float
    method: Literal["POST"]
    path: str
    status_code: Literal[200]
    request_id: Hex32
    node_id: Count
    status: TurnStatus
    request: RecordedRequest
    response: RecordedResponse
    weight_versions: Sequence[WireSpan] | None
    mixed_version: bool
    cached_from: str | None
    policy: str
    stages: Mapping[str, float]
    stage_seconds: Mapping[str, float]
    trace_id: NotRequired[Hex32]


class DiscardedTurns(TypedDict):
    """The committed turns that later turns of their session replaced, and the sampled tokens in them."""

    turns: Count
    sampled_tokens: Count


class WireTurnReward(TypedDict):
    """The reward of a turn, by the id of its node."""

    turn: Count
    reward: float


class WireTokenRewards(TypedDict):
    """The rewards of a turn's sampled tokens."""

    turn: Count
    rewards: Sequence[float]


class WireOutcome(TypedDict):
    """The outcome of a rollout. `reward` is a number, or numbers by name."""

    reward: float | Mapping[str, float] | None
    verdict: RolloutVerdict
    detail: str | None
    turns: NotRequired[Sequence[WireTurnReward]]
    tokens: NotRequired[Sequence[WireTokenRewards]]


class SessionMetadata(TypedDict):
    """The session's own metadata, and the server's keys over it; unless it is linear, also `tree` (docs/samples.md).

    `rewrites` counts by rule the changes to what the client sent. With samples `left_out` counts, by kind, the strands
    that are none, and the sampled tokens in them; under `infra_failed` those of a rollout that failed so. `outcome` and
    `group` are there where the session has them, and so is `policy`, its LoRA.
    """

    accumulated_token_ids: TokenIds
    max_trim_tokens: Count
    discarded: DiscardedTurns
    tito_session_mismatch: NotRequired[Sequence[DriftFacts]]
    strands: Sequence[StrandRow]
    rewrites: Mapping[str, Count]
    tree: NotRequired[Mapping[str, object]]
    outcome: NotRequired[WireOutcome | None]
    group: NotRequired[str]
    policy: NotRequired[str]
    left_out: NotRequired[Mapping[str, LeftOut]]


class SessionView(TypedDict):
    """A session: the records of its main line or of the strand that was asked for, and metadata for a trainer."""

    session_id: Hex32
    records: Sequence[Record]
    metadata: SessionMetadata


def records(line: Sequence[Node], *, delta: bool) -> Iterator[Record]:
    """The records of a line, oldest first, for `json_pieces`: a long session's are many megabytes.

    `delta`: each with only the additions of its turn, and how much was left out. Else the text of an earlier record is
    joined, not written again: so write each record before the next one is taken. A completion's has no messages, and
    nothing but completions follows it.
    """
    ids, messages = _GrowingList(), _GrowingList()
    num_ids = num_messages = 0
    for node in line:
        turn = node.turn
        if turn.num_trimmed:
            ids = _GrowingList()
            ids.extend(_ids_text(line_ids(node.parent)[: -turn.num_trimmed]))
            num_ids -= turn.num_trimmed
        if turn.asked is Asked.COMPLETION:
            messages, num_messages = _GrowingList(), 0
        request: dict[str, object]
        if delta:
            request = {"num_kept_ids": num_ids, "num_kept_messages": num_messages}
            request["messages"] = map(_message, turn.messages)
            request["input_ids"] = turn.new_prompt_ids
        else:
            messages.extend(_messages_text(turn.messages))
            ids.extend(_ids_text(turn.new_prompt_ids))
            request = {"messages": Written(messages.pieces()), "input_ids": Written(ids.pieces())}
        yield _record(node, request)
        ids.extend(_ids_text(turn.sampled.ids))
        num_ids = node.num_tokens
        if turn.asked is Asked.CHAT:
            messages.extend(_messages_text((turn.reply.message,)))
            num_messages = node.num_messages


class _GrowingList:
    """A growing JSON list, written again and again: only its new end is written, the rest is at hand."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._new: list[Iterable[Iterable[bytes]]] = []
        self._is_empty = True

    def extend(self, elements: Iterable[Iterable[bytes]]) -> None:
        """Add elements, each of them text in pieces; they are written when `pieces` comes to them."""
        self._new.append(elements)

    def pieces(self) -> Iterator[bytes]:
        """The whole list. To be read to its end."""
        yield b"["
        yield from self._pieces
        for piece in joined(self._new_text()):
            self._pieces.append(piece)
            yield piece
        yield b"]"

    def _new_text(self) -> Iterator[bytes]:
        new, self._new = self._new, []
        for element in chain.from_iterable(new):
            if not self._is_empty:
                yield b","
            self._is_empty = False
            yield from element


def _ids_text(ids: "array[int]") -> Iterator[tuple[bytes]]:
    return ((encode_ids(piece),) for piece in pieces_of(ids))


def _messages_text(messages: Iterable[Message]) -> Iterator[Iterator[bytes]]:
    return (json_pieces(_message(message)) for message in messages)


def discarded_json(discarded: Discarded) -> DiscardedTurns:
    """The turns discarded by a session's commits, as plain values."""
    return {"turns": discarded.num_turns, "sampled_tokens": discarded.num_tokens}


def outcome_json(outcome: SessionOutcome | None) -> WireOutcome | None:
    """A session's outcome as plain values; None if it has none."""
    if outcome is None:
        return None
    told: WireOutcome = {"reward": outcome.reward, "verdict": outcome.verdict, "detail": outcome.detail}
    if outcome.turns:
        told["turns"] = [{"turn": node, "reward": reward} for node, reward in outcome.turns.items()]
    if outcome.tokens:
        told["tokens"] = [{"turn": node, "rewards": rewards.tolist()} for node, rewards in outcome.tokens.items()]
    return told


def _record(node: Node, request: Mapping[str, object]) -> Record:
    turn = node.turn
    stages = turn.stages
    of_chats: dict[str, object] = {
        "tool_choice": msgspec.to_builtins(turn.tool_choice),
        "parallel_tool_calls": turn.parallel_tool_calls,
        "chat_template_kwargs": turn.context.template_kwargs,
    }
    kept = _OBJECT.decode(turn.request_json)
    sent, path = _OBJECT.decode(kept.pop("sent", b"{}")), kept.pop("path", None)
    kept.pop("wire", None)  # a dialect's own, to write the reply anew
    tools = [msgspec.Raw(tool.json.encode()) for tool in turn.context.tools]
    if turn.rewrites:
        told = [{"rule": one.rule, "where": one.where, "from": one.before, "to": one.after} for one in turn.rewrites]
        request = {**request, "rewrites": told}
    replay = turn.sampled.replay
    if replay is not None and replay.routed_experts is not None:
        request = {**request, "routed_experts_start_len": replay.first_row}
    parameters: dict[str, object] = {
        **kept,
        "sampling_params": msgspec.to_builtins(turn.params),
        **(of_chats if turn.asked is Asked.CHAT else {}),
    }
    record: Record = {
        "timestamp": turn.committed_at,
        "request_timestamp": turn.requested_at,
        "method": "POST",
        "path": cast("str", path),  # as its dialect wrote it, JSON already
        "status_code": 200,
        "request_id": turn.request_id,
        "node_id": node.id,
        "status": turn.status,
        "request": cast("RecordedRequest", {**sent, **request, "tools": tools, "parameters": parameters}),
        "response": _response(node),
        "weight_versions": None if turn.sampled.mixed is not None else spans_json(turn.sampled.weights),
        "mixed_version": turn.sampled.mixed is not None,
        "cached_from": turn.sampled.cached_from,
        "policy": turn.policy,
        "stages": {
            "start": stages.start,
            **{name: end for name, end in stages.ends.items() if name not in AFTER_WRITING},
        },
        "stage_seconds": {
            str(stage): seconds for stage, seconds in stages.durations_s().items() if stage not in AFTER_WRITING
        },
    }
    if turn.trace_id:
        record["trace_id"] = turn.trace_id
    return record


def _response(node: Node) -> RecordedResponse:
    turn, sampled = node.turn, node.turn.sampled
    num_prompt, num_sampled = node.num_tokens - len(sampled.ids), len(sampled.ids)
    is_chat = turn.asked is Asked.CHAT
    said = {"message": numbered_body(turn.reply.message)} if is_chat else {"text": turn.reply.message.content}
    choice = {
        "index": 0,
        **said,
        "parse_problem": turn.reply.problem,
        "parse_faults": [_fault(fault) for fault in turn.reply.faults],
        "finish_reason": finish_of(sampled.finish.reason, turn.reply.message),
        "stop_reason": sampled.finish.matched,
        "meta_info": _meta_info(turn, num_prompt),
    }
    return {
        "id": turn.reply_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(turn.committed_at),
        "choices": [cast("RecordedChoice", choice)],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


def _fault(fault: ParseFault) -> RecordedFault:
    return {"problem": fault.problem, "seen": fault.seen, "start": fault.start, "end": fault.end}


def _meta_info(turn: CommittedTurn, num_prompt: int) -> RecordedMetaInfo:
    sampled = turn.sampled
    meta: RecordedMetaInfo = {
        "prompt_tokens": num_prompt,
        "id": turn.request_id,
        "finish_reason": {"type": sampled.finish.reason, "matched": sampled.finish.matched},
        "completion_tokens": len(sampled.ids),
        "cached_tokens": sampled.num_cached_tokens,
        "output_token_logprobs": as_chunked_list(_triples(sampled.ids, sampled.logprobs)),
        "logprobs_kind": sampled.logprobs_kind,
    }
    if sampled.tempered_logprobs is not None:
        meta["output_token_tempered_logprobs"] = sampled.tempered_logprobs
    if sampled.sampling_logprobs is not None:
        meta["output_token_sampling_logprobs"] = sampled.sampling_logprobs
    if sampled.support is not None:
        meta["support"] = b64encode(sampled.support).decode()
    if sampled.weights:
        meta["weight_version"] = sampled.weights[-1].version
    _add_replay(meta, sampled)
    return meta


def _add_replay(meta: RecordedMetaInfo, sampled: SampledTurn) -> None:
    if sampled.replay is None:
        return
    if sampled.replay.routed_experts is not None:
        meta["routed_experts"] = sampled.replay.routed_experts.base64
    if sampled.replay.indexer_topk is not None:
        meta["indexer_topk"] = sampled.replay.indexer_topk.base64


def _triples(ids: "array[int]", logprobs: "array[float]") -> Iterator[list[tuple[float, int, None]]]:
    starts = range(0, len(ids), PIECE_VALUES)
    spans = (slice(start, start + PIECE_VALUES) for start in starts)
    return (list(zip(logprobs[span], ids[span], repeat(None))) for span in spans)


def _message(message: Message) -> RepliedMessage:
    body = message_body(message)
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body
