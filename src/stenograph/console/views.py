"""A session as the console shows it: its shape in columns, and its turns with texts cut to a readable length. Pure.

The data of a session's other routes (drift, ledger, findings) is not repeated here. No text is escaped: whoever shows
it makes text of it, never markup.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TypedDict

import msgspec
import numpy as np

from stenograph.console.tokens import TokenLook, kept_lines, shown_kind
from stenograph.core.chat import ParsedReply
from stenograph.core.drift import FORBIDDEN, DriftReport
from stenograph.core.json_pieces import joined, json_pieces
from stenograph.core.json_types import Count, Hex32
from stenograph.core.kinds import HistoryKind
from stenograph.core.logprobs import known_logprobs
from stenograph.core.media import ranges
from stenograph.core.messages import Message
from stenograph.core.types import FinishReason, LogprobsKind, SamplingParams
from stenograph.export.lines import StrandRow, WireSpan, spans_json, strand_row
from stenograph.export.records import DiscardedTurns, RecordedRewrite, WireOutcome, discarded_json, outcome_json
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, leaves
from stenograph.trajectory.turn import Node, TurnStatus

MAX_TURNS = 200
"""Most turns of one page."""
SHOWN_CHARS = 8192
"""Characters of a text shown unless the whole is asked for."""
SHOWN_MESSAGES = 200
"""Messages of a turn shown unless the whole is asked for."""
_TURNS_AT_ONCE = 8
"""Short turns written at once: a third of a millisecond."""


class VocabularyRef(TypedDict):
    """The vocabulary of the ids: its hash, by which it is fetched, and its size."""

    hash: str
    size: Count


class ShownLine(TypedDict):
    """A line, by its last turn. `kept`: it becomes a sample by default."""

    leaf: Count
    strand: Count
    num_turns: Count
    num_tokens: Count
    kept: bool


class TurnColumns(TypedDict):
    """All turns, oldest commit first, a list for each fact. A root's `parent` is -1.

    `num_tokens` is the length of the line down to the turn, `num_prompt` the number of ids that its prompt added,
    `num_trained` that of its sampled ids which a sample trains. `status` is an index in `statuses`.
    """

    id: Sequence[Count]
    parent: Sequence[int]
    strand: Sequence[Count]
    status: Sequence[Count]
    num_prompt: Sequence[Count]
    num_sampled: Sequence[Count]
    num_trimmed: Sequence[Count]
    num_trained: Sequence[Count]
    num_tokens: Sequence[Count]
    statuses: Sequence[TurnStatus]


class LineImage(TypedDict):
    """An image at its placeholder, token `at` of the line down to `node`; in samples it is tokens `[start, start +
    length)`."""

    node: Count
    at: Count
    sha256: str
    start: Count
    length: Count


class ConsoleSession(TypedDict):
    """A session's shape. `main` is the last turn of its own line, null while it has none. `versions` are those of the
    weights, as the flags of tokens count them from 1. `scores` are names of annotations to be had with tokens.
    `vocabulary` is null if another model's ids are in it."""

    session_id: Hex32
    created_at: float
    history: HistoryKind
    group: str | None
    metadata: Mapping[str, object]
    outcome: WireOutcome | None
    busy: bool
    num_turns: Count
    sampled_tokens: Count
    trained_tokens: Count
    num_requests: Count
    discarded: DiscardedTurns
    main: Count | None
    lines: Sequence[ShownLine]
    strands: Sequence[StrandRow]
    turns: TurnColumns
    images: Sequence[LineImage]
    versions: Sequence[str]
    scores: Sequence[str]
    vocabulary: VocabularyRef | None


class DriftCounts(TypedDict):
    """The drift of all lines of a session, counted. Where `known` is false, nobody has compared them yet, and the
    counts are 0. `unrenderable` lines cannot be compared."""

    session_id: Hex32
    num_turns: Count
    known: bool
    lines: Count
    forbidden: Count
    tolerated: Count
    unrenderable: Count


class ShownCall(TypedDict):
    """A tool call, its arguments as they were spelled."""

    id: str
    name: str
    arguments: str


class ShownImage(TypedDict):
    """An image of a message, before character `at` of its content; its bytes are at `/sessions/{id}/media/{sha256}`."""

    at: Count
    sha256: str
    media_type: str
    num_bytes: Count


class ShownMessage(TypedDict):
    """A message. `cut` is the number of characters that were left out of its texts."""

    role: str
    content: str | None
    reasoning: str | None
    calls: Sequence[ShownCall]
    answers: str | None
    media: Sequence[ShownImage]
    cut: Count


class ShownFault(TypedDict):
    """A fault of a reply; ids `[start, end)` of the reply."""

    problem: str
    seen: str
    start: Count
    end: Count


class ShownTurn(TypedDict):
    """A turn. `messages` are those that its request added, `left_out` the number of those that are not shown.

    Times are seconds: `requested_at` of the epoch, `stages_s` how long each stage took, in order. `mean_logprob` is
    that of the sampled tokens, of the kind `logprobs_kind`, null where there is none. `weights` are spans of the
    sampled tokens, null where the weights changed meanwhile and nobody knows for which.
    """

    node: Count
    parent: Count | None
    strand: Count
    status: TurnStatus
    finish: FinishReason
    matched: int | str | None
    asked: str
    tools: Sequence[str]
    messages: Sequence[ShownMessage]
    left_out: Count
    reply: ShownMessage
    faults: Sequence[ShownFault]
    rewrites: Sequence[RecordedRewrite]
    params: Mapping[str, object]
    prompt_tokens: Count
    cached_tokens: Count
    requested_at: float
    stages_s: Mapping[str, float]
    weights: Sequence[WireSpan] | None
    policy: str
    logprobs_kind: LogprobsKind
    mean_logprob: float | None


class TurnPage(TypedDict):
    """Turns of a line, from its `start`-th on, counted from 0."""

    session_id: Hex32
    leaf: Count | None
    start: Count
    turns: Sequence[ShownTurn]
    num_turns: Count


def console_session(
    facts: SessionFacts,
    look: TokenLook,
    *,
    created_at: float,
    busy: bool,
    num_requests: int,
    vocabulary: VocabularyRef | None,
    scores: Sequence[str] = (),
) -> ConsoleSession:
    """A session's shape."""
    nodes, by_node, main = facts.nodes, facts.by_node(), facts.latest
    kept = {leaf.id for leaf in kept_lines(facts)}
    lines: list[ShownLine] = [
        {
            "leaf": leaf.id,
            "strand": by_node[leaf.id].number,
            "num_turns": leaf.depth,
            "num_tokens": leaf.num_tokens,
            "kept": leaf.id in kept,
        }
        for leaf in leaves(nodes)
    ]
    return {
        "session_id": facts.session_id,
        "created_at": created_at,
        "history": facts.options.history,
        "group": facts.options.stated.group,
        "metadata": facts.options.metadata,
        "outcome": outcome_json(facts.outcome),
        "busy": busy,
        "num_turns": len(nodes),
        "sampled_tokens": sum(len(node.turn.sampled.ids) for node in nodes),
        "trained_tokens": sum(look.trained.values()),
        "num_requests": num_requests,
        "discarded": discarded_json(facts.discarded),
        "main": None if main is None else main.id,
        "lines": lines,
        "strands": [strand_row(strand) for strand in facts.strands],
        "turns": _columns(nodes, {id_: strand.number for id_, strand in by_node.items()}, look),
        "images": [image for node in nodes if node.turn.media for image in _images(node)],
        "versions": list(look.versions),
        "scores": scores,
        "vocabulary": vocabulary,
    }


def drift_counts(session_id: str, num_turns: int, num_lines: int, reports: Sequence[DriftReport] | None) -> DriftCounts:
    """The drift of a session, of each of its lines if they were compared."""
    found = [drift for report in reports or () for drift in report.drifts]
    num_forbidden = sum(drift.type in FORBIDDEN for drift in found)
    return {
        "session_id": session_id,
        "num_turns": num_turns,
        "known": reports is not None,
        "lines": num_lines,
        "forbidden": num_forbidden,
        "tolerated": len(found) - num_forbidden,
        "unrenderable": sum(report.unrenderable is not None for report in reports or ()),
    }


def _columns(nodes: Sequence[Node], strand_of: Mapping[int, int], look: TokenLook) -> TurnColumns:
    statuses = list(TurnStatus)
    return {
        "id": [node.id for node in nodes],
        "parent": [-1 if node.parent is None else node.parent.id for node in nodes],
        "strand": [strand_of[node.id] for node in nodes],
        "status": [statuses.index(node.turn.status) for node in nodes],
        "num_prompt": [len(node.turn.new_prompt_ids) for node in nodes],
        "num_sampled": [len(node.turn.sampled.ids) for node in nodes],
        "num_trimmed": [node.turn.num_trimmed for node in nodes],
        "num_trained": [look.trained.get(node.id, 0) for node in nodes],
        "num_tokens": [node.num_tokens for node in nodes],
        "statuses": statuses,
    }


def _images(node: Node) -> Iterator[LineImage]:
    for one, placed in list(zip(node.media, ranges(node.media), strict=True))[-len(node.turn.media) :]:
        yield {
            "node": node.id,
            "at": one.position,
            "sha256": one.ref.sha256,
            "start": placed.start,
            "length": placed.length,
        }


def turn_page(
    session_id: str,
    line: Sequence[Node],
    strand_of: Mapping[int, StrandFacts],
    *,
    start: int = 0,
    limit: int | None = None,
    whole: bool = False,
) -> Iterator[bytes]:
    """A `TurnPage` as JSON: turns of a line, from its `start`-th on, `whole` with uncut texts. Made piece by piece as
    it is sent, on the loop one in each iteration: a few turns, or a part of one with long texts."""
    leaf = line[-1].id if line else None
    yield msgspec.json.encode({"session_id": session_id, "leaf": leaf, "start": start})[:-1] + b',"turns":['
    written: list[bytes] = []
    before = b""
    for node in line[start : None if limit is None else start + limit]:
        row = shown_turn(node, strand_of[node.id].number, whole=whole)
        if _num_chars(row) <= SHOWN_CHARS:
            written.append(before + msgspec.json.encode(row))
        else:
            yield from joined(chain(written, [before], json_pieces(row)))
            written = []
        if len(written) == _TURNS_AT_ONCE:
            yield b"".join(written)
            written = []
        before = b","
    yield b"".join(written) + b'],"num_turns":%d}' % len(line)


def _num_chars(turn: ShownTurn) -> int:
    """About how many characters a turn is written with, at least where they are many."""
    texts = [text for message in (*turn["messages"], turn["reply"]) for text in _texts(message)]
    texts += [text for one in turn["rewrites"] for text in (one["from"], one["to"])]
    texts += [fault["seen"] for fault in turn["faults"]]
    return sum(map(len, texts)) + 32 * (len(texts) + len(turn["tools"])) + len(turn["asked"])


def _texts(message: ShownMessage) -> Iterator[str]:
    yield message["content"] or ""
    yield message["reasoning"] or ""
    for call in message["calls"]:
        yield call["arguments"]


def shown_turn(node: Node, strand: int, *, whole: bool) -> ShownTurn:
    """A turn with its texts."""
    turn, sampled = node.turn, node.turn.sampled
    kind = shown_kind(turn)
    logprobs = np.frombuffer(known_logprobs(sampled, turn.params)[kind])
    messages = turn.messages if whole else turn.messages[:SHOWN_MESSAGES]
    return {
        "node": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "strand": strand,
        "status": turn.status,
        "finish": sampled.finish.reason,
        "matched": sampled.finish.matched,
        "asked": turn.asked.value,
        "tools": [tool.name for tool in turn.context.tools],
        "messages": [_message(message, whole=whole) for message in messages],
        "left_out": len(turn.messages) - len(messages),
        "reply": _message(turn.reply.message, whole=whole),
        "faults": _faults(turn.reply),
        "rewrites": [
            {"rule": one.rule, "where": one.where, "from": one.before, "to": one.after} for one in turn.rewrites
        ],
        "params": _asked_params(msgspec.to_builtins(turn.params)),
        "prompt_tokens": node.num_tokens - len(sampled.ids),
        "cached_tokens": sampled.num_cached_tokens,
        "requested_at": turn.requested_at,
        "stages_s": {str(stage): seconds for stage, seconds in turn.stages.durations_s().items()},
        "weights": None if sampled.mixed is not None else spans_json(sampled.weights),
        "policy": turn.policy,
        "logprobs_kind": kind,
        "mean_logprob": float(logprobs.mean()) if len(logprobs) else None,
    }


_UNASKED: Mapping[str, object] = msgspec.to_builtins(SamplingParams())


def _asked_params(params: Mapping[str, object]) -> dict[str, object]:
    """The parameters with an effect, and the temperature. A grammar is named, not written out: it may be long."""
    shown = {name: value for name, value in params.items() if name == "temperature" or value != _UNASKED[name]}
    if "grammar" in shown:
        shown["grammar"] = True
    return shown


def _faults(reply: ParsedReply) -> list[ShownFault]:
    return [
        {"problem": str(fault.problem), "seen": fault.seen, "start": fault.start, "end": fault.end}
        for fault in reply.faults
    ]


def _message(message: Message, *, whole: bool) -> ShownMessage:
    cutter = _Cutter(None if whole else SHOWN_CHARS)
    return {
        "role": str(message.role),
        "content": None if message.content is None else cutter.cut(message.content),
        "reasoning": None if message.reasoning is None else cutter.cut(message.reasoning),
        "calls": [
            {"id": call.id, "name": call.name, "arguments": cutter.cut(call.arguments)} for call in message.tool_calls
        ],
        "answers": message.tool_call_id,
        "media": [
            {
                "at": one.at,
                "sha256": one.ref.sha256,
                "media_type": one.ref.media_type,
                "num_bytes": one.ref.num_bytes,
            }
            for one in message.media
        ],
        "cut": cutter.num_cut,
    }


class _Cutter:
    """Cuts texts to a number of characters each, and counts the rest."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.num_cut = 0

    def cut(self, text: str) -> str:
        if self._limit is None or len(text) <= self._limit:
            return text
        self.num_cut += len(text) - self._limit
        return text[: self._limit]
