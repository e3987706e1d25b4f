"""A session's committed turns to training samples, one for each kept line. Pure. START READING HERE in this package.

A sample is its line's ids as the engine saw them: the first prompt, then each turn's sampled ids, and between them the
additions of the next turn's prompt. Nothing is tokenized here. lines.py selects the lines, their lengths, and the
sample to train each shared turn. Source of the names: docs/samples.md.
"""

import enum
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Annotated, NotRequired, TypedDict, cast

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from stenograph.core.json_pieces import as_chunked_list, as_list
from stenograph.core.json_types import Count, Logprob, TokenIds
from stenograph.core.kinds import Compat, StrandKind
from stenograph.core.loaded import entry
from stenograph.core.logprobs import Logprobs, known_logprobs
from stenograph.core.message_json import MediaRow
from stenograph.core.outcome import RolloutVerdict, SessionOutcome
from stenograph.core.types import LogprobsKind, WeightSpan
from stenograph.export.custody import CUSTODY, DigestChain
from stenograph.export.lines import (
    SampleLine,
    WireSpan,
    cut,
    leaf_descriptor,
    owners,
    spans_json,
    strand_row,
    whole_line,
)
from stenograph.export.replay import ReplayRows, ReplayShape, indexer_topk, replayable, routed_experts
from stenograph.export.turn_rows import TurnRow, check_kind, kinds_of_turns, sampling_mask, turn_rows
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts, leaves_of
from stenograph.trajectory.turn import Node, TurnStatus

Decode = Callable[["array[int]"], str]
"""Ids to text, control tokens included."""

LEAF = "leaf"
GROUP = "group"
POLICY = "policy"
STRAND_KEYS = ("strand", "kind", "rule", "client", "agent_id", "chapter", "continues")
MISMATCH = "tito_session_mismatch"
DISCARDED = "discarded"
MIXED = "mixed"
"""The `logprobs_kind` of a sample with log-probabilities of several kinds: its `turns` name the kind of each."""
TRUNCATED_TURNS = "truncated_turns"
_PIECE_TEXTS = 512
"""Token texts made and written at once, in a millisecond."""

SERVER_KEYS = frozenset(
    {LEAF, CUSTODY, POLICY, MISMATCH, DISCARDED, TRUNCATED_TURNS, *STRAND_KEYS, "accumulated_token_ids"}
)
"""Metadata for which consumers believe the server: a client's values under these names are left out."""


class EmptyReason(enum.StrEnum):
    """The reason for having no sample. The values are those of the miles session server."""

    NO_RECORDS = "no_records"
    """The session has no committed turn, or none with known effective ids."""
    ALL_TRUNCATED = "all_truncated"
    """In no line does a first prompt and one sampled token fit into `max_seq_len`."""
    LEFT_OUT = "left_out"
    """Every strand is of a kind not asked for. Ours: that server knows no strands."""
    INFRA_FAILED = "infra_failed"
    """The rollout failed by infrastructure, and such were not asked for. Ours too."""


class PrefixCacheInfo(TypedDict):
    """Sums over a sample's turns."""

    cached_tokens: Count
    total_prompt_tokens: Count


class SampleFacts(TypedDict):
    """The fields of a sample beside its numbers per token."""

    response: str
    status: TurnStatus
    logprobs_kind: NotRequired[str]
    weight_versions: Sequence[str]
    weight_spans: Sequence[WireSpan]
    turns: Sequence[TurnRow]
    prefix_cache_info: PrefixCacheInfo
    reward: float | Mapping[str, float] | None
    outcome: RolloutVerdict | None
    metadata: Mapping[str, object]
    media: NotRequired[Sequence[MediaRow]]


class JsonSample(SampleFacts):
    """A sample (docs/samples.md)."""

    tokens: TokenIds
    response_length: Count
    loss_mask: Sequence[Annotated[int, Meta(ge=0, le=1)]]
    rollout_log_probs: Sequence[Logprob]
    raw_log_probs: Sequence[Logprob] | None
    sampling_log_probs: Sequence[Logprob] | None
    rollout_routed_experts: Sequence[object] | None
    rollout_indexer_topk: Sequence[object] | None
    scores: NotRequired[Mapping[str, Sequence[Logprob]]]
    token_rewards: NotRequired[Sequence[float]]
    token_texts: NotRequired[Sequence[str]]
    sampling_mask: NotRequired[Sequence[TokenIds | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row. T tokens; the last R = `response_length` come after the first prompt.

    `tokens` [T] int32. `loss_mask` [R] bytes: 1 on the sampled tokens trained by this sample. `rollout_log_probs` [R]
    float64, nats: the tempered logprob where the mask is 1, 0.0 elsewhere; `logprobs_kind` names another kind in its
    place, None for the tempered one, `MIXED` where the turns differ. `raw_log_probs` and `sampling_log_probs` [R], the
    same under the distributions of those names, or None where one of the turns has none. `response` is the last R
    tokens as text. `weight_versions`: of each turn with a known version, the oldest that sampled in it, or may have.
    `weight_spans`: spans over `tokens`, in order; every sampled token in a span was sampled by its version; prompt
    tokens between them take no part. `turns` has a row for each turn. `routed_experts` [T - 1, layers, top_k] and
    `indexer_topk` [T - 1, K] are made by export/replay.py, or None. `num_prompt_tokens` and `num_cached_tokens` are
    sums over the turns, as the engine counted them. `outcome` is the session's, None if nobody has set it. `scores` [R]
    by name are the asked for annotations', 0.0 where the mask is 0, and so are `token_rewards` [R]; None where the
    outcome has no rewards of turns and tokens. `media` has a row for each medium in `tokens`.
    """

    tokens: "array[int]"
    response_length: int
    loss_mask: bytes
    rollout_log_probs: "array[float]"
    raw_log_probs: "array[float] | None"
    sampling_log_probs: "array[float] | None"
    logprobs_kind: str | None
    status: TurnStatus
    weight_versions: tuple[str, ...]
    weight_spans: tuple[WeightSpan, ...]
    turns: Sequence[TurnRow]
    response: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    routed_experts: ReplayRows | None = field(default=None, compare=False)
    indexer_topk: ReplayRows | None = field(default=None, compare=False)
    outcome: SessionOutcome | None = None
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    token_rewards: "array[float] | None" = None
    scores: "Mapping[str, array[float]]" = field(default_factory=dict[str, "array[float]"])
    media: Sequence[MediaRow] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.rollout_log_probs), self.response_length}
        lengths.update(len(row) for row in (self.raw_log_probs, self.sampling_log_probs) if row is not None)
        if len(lengths) != 1 or not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"lengths disagree: {lengths} of {len(self.tokens)} tokens")
        for replay in (self.routed_experts, self.indexer_topk):
            if replay is not None and len(replay) != len(self.tokens) - 1:
                raise ValueError(f"{len(replay)} rows to replay for {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """The samples of a session, oldest leaf first; `empty_reason` is set where there is none, and only there.

    `num_trained` counts, by node id, the trained tokens of each turn, its first sampled ones. `left_out` are the kept
    lines of kinds not asked for, `failed` those of a rollout that failed by infrastructure.
    """

    samples: tuple[Sample, ...]
    empty_reason: EmptyReason | None
    num_trained: Mapping[int, int] = field(default_factory=dict[int, int])
    left_out: tuple[SampleLine, ...] = ()
    failed: tuple[SampleLine, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.samples) == (self.empty_reason is not None):
            raise ValueError(f"{len(self.samples)} samples, and empty for {self.empty_reason}")


def make_samples(
    nodes: Sequence[Node],
    *,
    decode: Decode,
    max_trim_tokens: int,
    max_seq_len: int | None = None,
    replay_shape: ReplayShape | None = None,
    metadata: Mapping[str, object] | None = None,
    mismatches: Mapping[int, Sequence[object]] | None = None,
    discarded: Mapping[str, object] | None = None,
    session: SessionFacts | None = None,
    kinds: Collection[StrandKind] = tuple(StrandKind),
    required: LogprobsKind | None = None,
    include_failed: bool = True,
) -> SampleSet:
    """One sample for each kept line of a session's turns, given oldest commit first. Mutates nothing.

    May run on a worker, on a snapshot of `History.nodes`. `max_trim_tokens` is the renderer's. `metadata` goes into
    every sample, with the server's own keys on top: `mismatches` is the drift of each leaf's line by node id, as plain
    values, as far as it was computed; `discarded` counts the turns discarded by the session's commits. `session` gives
    each line's strand; only strands of `kinds` become samples. With `max_seq_len` a line ends with its last sampled
    token within that length, and one without any gives no sample. Without `include_failed` a rollout with the outcome
    `infra_failed` gives none. Every trained token must have the log-probabilities in `required`. Raises
    SamplesInconsistent: a line cannot be accounted for token by token, or lacks the required ones.
    """
    nodes = [one for one in nodes if one.turn.sampled.ids or entry("stenograph.export.media:is_reported")(one.turn)]
    if not nodes:
        return SampleSet(samples=(), empty_reason=EmptyReason.NO_RECORDS)
    strands = {} if session is None else session.by_node()
    lines: list[SampleLine] = []
    left_out: list[SampleLine] = []
    failed: list[SampleLine] = []
    outcome, options = (None, SessionOptions()) if session is None else (session.outcome, session.options)
    group, compat = options.stated.group, options.compat
    leaves_out = not include_failed and outcome is not None and outcome.verdict is RolloutVerdict.INFRA_FAILED
    kept = leaves_of(nodes, None if session is None else options.history)
    for leaf in kept:
        whole = whole_line(leaf, max_trim_tokens=max_trim_tokens)
        if leaf.id in strands and strands[leaf.id].kind not in kinds:
            left_out.append(whole)
            continue
        if leaves_out:
            failed.append(whole)
            continue
        if _has_replay(whole):
            whole = replayable(whole)
        line = whole if max_seq_len is None else cut(whole, max_seq_len)
        if line is not None:
            lines.append(line)
    owner = owners(lines)
    chain = DigestChain(session.session_id) if session is not None and session.session_id else None
    theirs = {key: value for key, value in (metadata or {}).items() if key not in SERVER_KEYS}
    samples: list[Sample] = []
    for index, line in enumerate(lines):
        ours = _servers_own(line, strands.get(line.leaf.id), group, mismatches, discarded)
        owned = frozenset(part.node.id for part in line.parts if owner[part.node.id] == index)
        if chain is not None:
            ours[CUSTODY] = chain.custody(line.parts, owned)
        if required is not None:
            check_kind([part for part in line.parts if part.node.id in owned and part.num_sampled], required)
        samples.append(_sample(line, owned, decode, replay_shape, compat, {**theirs, **ours}, outcome))
    reason: EmptyReason | None = EmptyReason.LEFT_OUT if len(left_out) == len(kept) else EmptyReason.ALL_TRUNCATED
    reason = None if samples else EmptyReason.INFRA_FAILED if failed else reason
    return SampleSet(
        samples=tuple(samples),
        empty_reason=reason,
        num_trained=_num_trained(lines, owner),
        left_out=tuple(left_out),
        failed=tuple(failed),
    )


def _servers_own(
    line: SampleLine,
    strand: StrandFacts | None,
    group: str | None,
    mismatches: Mapping[int, Sequence[object]] | None,
    discarded: Mapping[str, object] | None,
) -> dict[str, object]:
    """The server's own metadata of a sample; no client can set it."""
    num_truncated = sum(part.node.turn.status is TurnStatus.TRUNCATED for part in line.parts)
    ours: dict[str, object] = {LEAF: leaf_descriptor(line.leaf), TRUNCATED_TURNS: num_truncated}
    if policies := {part.node.turn.policy for part in line.parts if part.node.turn.policy}:
        ours[POLICY] = policies.pop() if len(policies) == 1 else None
    if group is not None:
        ours[GROUP] = group
    if strand is not None:
        row: Mapping[str, object] = strand_row(strand)
        ours.update((key, row[key]) for key in STRAND_KEYS)
    if mismatches is not None and line.leaf.id in mismatches:
        ours[MISMATCH] = mismatches[line.leaf.id]
    if discarded is not None:
        ours[DISCARDED] = discarded
    return ours


def _num_trained(lines: Sequence[SampleLine], owner: Mapping[int, int]) -> dict[int, int]:
    """Trained tokens of each turn, by node id; `owner` is the index of the line to train it."""
    held = ((index, part) for index, line in enumerate(lines) for part in line.parts)
    return {part.node.id: part.num_sampled for index, part in held if owner[part.node.id] == index}


def to_json(sample: Sample, *, token_text: Callable[[int], str] | None = None, with_masks: bool = False) -> JsonSample:
    """A sample for `json_pieces`; with `token_text`, each token as text too, `with_masks` the ids of each support."""
    facts = describe(sample)
    body: JsonSample = {
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "loss_mask": cast("Sequence[int]", np.frombuffer(sample.loss_mask, np.uint8)),
        "rollout_log_probs": sample.rollout_log_probs,
        "raw_log_probs": sample.raw_log_probs,
        "sampling_log_probs": sample.sampling_log_probs,
        "rollout_routed_experts": cast("Sequence[object] | None", sample.routed_experts),
        "rollout_indexer_topk": cast("Sequence[object] | None", sample.indexer_topk),
        "response": facts["response"],
        "status": facts["status"],
        "weight_versions": facts["weight_versions"],
        "weight_spans": facts["weight_spans"],
        "turns": facts["turns"],
        "prefix_cache_info": facts["prefix_cache_info"],
        "reward": facts["reward"],
        "outcome": facts["outcome"],
        "metadata": facts["metadata"],
    }
    if "logprobs_kind" in facts:
        body["logprobs_kind"] = facts["logprobs_kind"]
    if sample.scores:
        body["scores"] = sample.scores
    if "media" in facts:
        body["media"] = facts["media"]
    if sample.token_rewards is not None:
        body["token_rewards"] = sample.token_rewards
    if token_text is not None:
        starts = range(0, len(sample.tokens), _PIECE_TEXTS)
        texts = ([token_text(id_) for id_ in sample.tokens[start : start + _PIECE_TEXTS]] for start in starts)
        body["token_texts"] = as_chunked_list(texts)
    if with_masks:
        masks = sampling_mask(sample.tokens, len(sample.tokens) - sample.response_length, sample.turns)
        body["sampling_mask"] = cast("Sequence[TokenIds | None]", as_list(masks))
    return body


def describe(sample: Sample) -> SampleFacts:
    """The fields of a sample beside its numbers per token."""
    facts: SampleFacts = {
        "response": sample.response,
        "status": sample.status,
        "weight_versions": sample.weight_versions,
        "weight_spans": spans_json(sample.weight_spans),
        "turns": sample.turns,
        "prefix_cache_info": {
            "cached_tokens": sample.num_cached_tokens,
            "total_prompt_tokens": sample.num_prompt_tokens,
        },
        "reward": None if sample.outcome is None else sample.outcome.reward,
        "outcome": None if sample.outcome is None else sample.outcome.verdict,
        "metadata": sample.metadata,
    }
    if sample.logprobs_kind is not None:
        facts["logprobs_kind"] = sample.logprobs_kind
    if sample.media:
        facts["media"] = sample.media
    return facts


def _sample(
    line: SampleLine,
    owned: frozenset[int],
    decode: Decode,
    replay_shape: ReplayShape | None,
    compat: Compat | None,
    metadata: Mapping[str, object],
    outcome: SessionOutcome | None,
) -> Sample:
    num_tokens = len(line.ids)
    was_sampled, mask = bytearray(num_tokens), bytearray(num_tokens)
    spans: list[WeightSpan] = []
    end = 0
    for part in line.parts:
        start = end + part.num_prompt
        end += part.num_tokens
        was_sampled[start:end] = b"\x01" * part.num_sampled
        spans += _placed(part.node.turn.sampled.weights, start, end)
        if part.node.id in owned:
            mask[start:end] = was_sampled[start:end]
    turns = [part.node.turn for part in line.parts]
    is_trained = [part.node.id in owned and part.num_sampled > 0 for part in line.parts]
    known = [known_logprobs(turn.sampled, turn.params) for turn in turns]
    kinds = kinds_of_turns(known, is_trained)
    told = set(compress(kinds, is_trained))
    kind = MIXED if len(told) > 1 else next(iter(told), LogprobsKind.TEMPERED)
    experts = topk = None
    if _has_replay(line):
        experts = _of_contract(routed_experts(line, replay_shape), compat)
        topk = _of_contract(indexer_topk(line), compat)
    first = line.parts[0].num_prompt
    return Sample(
        tokens=line.ids,
        response_length=num_tokens - first,
        loss_mask=bytes(mask[first:]),
        rollout_log_probs=_logprobs(line, is_trained, known, kinds)[first:],
        raw_log_probs=_all_of(line, is_trained, known, LogprobsKind.RAW),
        sampling_log_probs=_all_of(line, is_trained, known, LogprobsKind.SAMPLING),
        logprobs_kind=None if kind is LogprobsKind.TEMPERED else str(kind),
        status=line.status,
        weight_versions=tuple(oldest for turn in turns if (oldest := turn.sampled.oldest_version) is not None),
        weight_spans=_joined(spans, was_sampled),
        turns=turn_rows(line.parts, kinds),
        response=decode(line.ids[first:]),
        num_prompt_tokens=sum(part.node.num_effective - len(part.node.turn.sampled.ids) for part in line.parts),
        num_cached_tokens=sum(turn.sampled.num_cached_tokens for turn in turns),
        routed_experts=experts,
        indexer_topk=topk,
        outcome=outcome,
        metadata=metadata,
        media=entry("stenograph.export.media:media_rows")(line) if line.leaf.media else (),
    )


def _logprobs(
    line: SampleLine, is_trained: Sequence[bool], known: Sequence[Logprobs], kinds: Sequence[LogprobsKind]
) -> "array[float]":
    """Log-probabilities [T]: of each trained turn those of its kind, 0.0 elsewhere."""
    found, end = _zeros(len(line.ids)), 0
    for part, wanted, of_turn, kind in zip(line.parts, is_trained, known, kinds, strict=True):
        start = end + part.num_prompt
        end += part.num_tokens
        if wanted:
            found[start:end] = of_turn[kind][: part.num_sampled]
    return found


def _all_of(
    line: SampleLine, is_trained: Sequence[bool], known: Sequence[Logprobs], kind: LogprobsKind
) -> "array[float] | None":
    """Log-probabilities [R] of one kind; None where one of the turns has none of it."""
    if any(part.num_sampled and kind not in of_turn for part, of_turn in zip(line.parts, known, strict=True)):
        return None
    return _logprobs(line, is_trained, known, [kind] * len(known))[line.parts[0].num_prompt :]


def _has_replay(line: SampleLine) -> bool:
    """Whether any turn of the line has data for a replay."""
    return any(part.node.turn.sampled.replay is not None for part in line.parts)


def _of_contract(rows: ReplayRows | None, compat: Compat | None) -> ReplayRows | None:
    """The rows in the type of the session's contract: miles' decoder takes int32 alone."""
    return rows if rows is None or compat is not Compat.MILES else rows.astype(np.int32)


def as_numpy(values: "array[int] | array[float]") -> NDArray[np.generic]:
    """An array [T] of numbers as it lies in memory."""
    return np.frombuffer(values, dtype=values.typecode)


def _zeros(num: int) -> "array[float]":
    return array("d", bytes(8 * num))


def _placed(spans: Sequence[WeightSpan], start: int, end: int) -> list[WeightSpan]:
    """A turn's spans over the line's ids; `[start, end)` are the turn's."""
    placed = (
        WeightSpan(version=span.version, start=start + span.start, end=min(start + span.end, end)) for span in spans
    )
    return [span for span in placed if span.start < span.end]


def _joined(spans: Sequence[WeightSpan], was_sampled: bytearray) -> tuple[WeightSpan, ...]:
    """Spans of one version with no other sampled token between them become one, over the prompts between them."""
    joined: list[WeightSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.version == span.version and was_sampled.find(1, last.end, span.start) < 0:
            joined[-1] = WeightSpan(version=span.version, start=last.start, end=span.end)
        else:
            joined.append(span)
    return tuple(joined)
