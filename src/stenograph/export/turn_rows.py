"""The turns of a sample as its trainer needs them: each one's place, and how it was sampled. Pure.

Anything missing from a row was not asked for, and had no effect. Numbers per token are made in samples.py.
"""

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from typing import Annotated, NotRequired, TypedDict

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from stenograph.core.json_types import Count
from stenograph.core.logprobs import Logprobs, known_logprobs
from stenograph.core.support import first_supports, supports
from stenograph.core.types import LogprobsKind, RepetitionOver, SamplingParams
from stenograph.export.lines import LinePart, inconsistent

BY_PREFERENCE = (LogprobsKind.TEMPERED, LogprobsKind.RAW, LogprobsKind.SAMPLING)
"""Kinds of log-probabilities as a sample's `rollout_log_probs` prefers them."""

Span = Annotated[Sequence[Count], Meta(min_length=2, max_length=2)]


class LogitBias(TypedDict):
    """A bias in nats that was added to the logit of a token."""

    id: Count
    bias: float


class TurnRow(TypedDict):
    """One turn of a sample. Places are in `tokens`, half-open.

    The tokens `[prompt_start, start)` are those that its prompt added, `[start, end)` those that were sampled, as far
    as they are in the sample. `logprobs_kind` is there where the turn's `rollout_log_probs` are not tempered.
    `repetition_over`: the tokens that the repetition penalty counted. `grammar`: one held the reply. `forced`: spans of
    tokens beside which the grammar allowed no other; absent where no grammar held the reply, or the engine does not
    report it. `support`: base64 of which ids could be sampled beside each token (docs/samples.md); absent where every
    id could, or the engine was not asked or does not report it. `mixed_version`: the weights changed while it was
    sampled, and of no token is known which sampled it. `cached_from`: the weights for which the engine caches the turn;
    absent where it keeps no cache by the weights. Of a fork's turn the first `inherited` sampled tokens are those of
    the session before it, and are trained there. `policy` is there where the sample's turns have several.
    """

    node_id: Count
    prompt_start: Count
    start: Count
    end: Count
    temperature: float
    top_p: NotRequired[float]
    top_k: NotRequired[Count]
    min_p: NotRequired[float]
    presence_penalty: NotRequired[float]
    frequency_penalty: NotRequired[float]
    repetition_penalty: NotRequired[float]
    repetition_over: NotRequired[RepetitionOver]
    logit_bias: NotRequired[Sequence[LogitBias]]
    min_tokens: NotRequired[Count]
    grammar: NotRequired[bool]
    forced: NotRequired[Sequence[Span]]
    support: NotRequired[str]
    mixed_version: NotRequired[bool]
    cached_from: NotRequired[str]
    inherited: NotRequired[Count]
    policy: NotRequired[str]
    logprobs_kind: NotRequired[LogprobsKind]


def turn_rows(parts: Sequence[LinePart], kinds: Sequence[LogprobsKind]) -> list[TurnRow]:
    """A row for each part of a line; `kinds` are those of their log-probabilities in the sample."""
    rows: list[TurnRow] = []
    at, has_policies = 0, len({part.node.turn.policy for part in parts}) > 1
    for part, kind in zip(parts, kinds, strict=True):
        start, end = at + part.num_prompt, at + part.num_tokens
        params, forced = part.node.turn.params, part.node.turn.sampled.forced
        row: TurnRow = {
            "node_id": part.node.id,
            "prompt_start": at,
            "start": start,
            "end": end,
            "temperature": params.temperature,
        }
        _add_asked(row, params)
        if forced is not None and params.grammar is not None:
            row["forced"] = [[start + a, start + b] for a, b in _runs(forced[: part.num_sampled])]
        if part.node.turn.sampled.support is not None and part.num_sampled:
            row["support"] = b64encode(_support_of(part, part.node.turn.sampled.support)).decode()
        if kind is not LogprobsKind.TEMPERED and part.num_sampled:
            row["logprobs_kind"] = kind
        if part.node.turn.sampled.mixed is not None and part.num_sampled:
            row["mixed_version"] = True
        if part.node.turn.sampled.cached_from is not None:
            row["cached_from"] = part.node.turn.sampled.cached_from
        if has_policies:
            row["policy"] = part.node.turn.policy
        rows.append(row)
        at = end
    return rows


def kinds_of_turns(known: Sequence[Logprobs], is_trained: Sequence[bool]) -> list[LogprobsKind]:
    """The kind that a sample shows of each turn's `known` log-probabilities: one common to all trained turns, the first
    of `BY_PREFERENCE`; else the turn's first."""
    common = set(LogprobsKind)
    for of_turn in compress(known, is_trained):
        common.intersection_update(of_turn)
    wanted = (*(kind for kind in BY_PREFERENCE if kind in common), *BY_PREFERENCE, LogprobsKind.OTHER)
    return [next(kind for kind in wanted if kind in of_turn) for of_turn in known]


def check_kind(parts: Sequence[LinePart], required: LogprobsKind) -> None:
    """Raise SamplesInconsistent for a part without known log-probabilities of this kind."""
    for part in parts:
        turn = part.node.turn
        if required not in known_logprobs(turn.sampled, turn.params):
            told = f"the engine reported {turn.sampled.logprobs_kind} ones at temperature {turn.params.temperature:g}"
            raise inconsistent(
                part.node,
                f"it has no {required} log-probabilities, which --require-logprobs {required} asks for: {told}",
            )


def sampling_mask(tokens: "array[int]", num_given: int, rows: Sequence[TurnRow]) -> Iterator[NDArray[np.int64] | None]:
    """For each of `tokens[num_given:]` the ids open to sampling, ascending; None for a token of a prompt, and where
    every id could be sampled, or it is not known."""
    at = num_given
    for row in rows:
        if "support" in row:
            yield from repeat(None, row["start"] - at)
            yield from supports(b64decode(row["support"]), tokens[row["start"] : row["end"]])
            at = row["end"]
    yield from repeat(None, len(tokens) - at)


def _support_of(part: LinePart, whole: bytes) -> bytes:
    """The supports of a turn's tokens in the line; `whole` are those of the turn."""
    is_whole = part.num_sampled == len(part.node.turn.sampled.ids)
    return whole if is_whole else first_supports(whole, part.num_sampled)


def _add_asked(row: TurnRow, params: SamplingParams) -> None:
    """Add the parameters with an effect on the distribution."""
    if params.top_p < 1.0:
        row["top_p"] = params.top_p
    if params.top_k:
        row["top_k"] = params.top_k
    if params.min_p:
        row["min_p"] = params.min_p
    if params.presence_penalty:
        row["presence_penalty"] = params.presence_penalty
    if params.frequency_penalty:
        row["frequency_penalty"] = params.frequency_penalty
    if params.repetition_penalty != 1.0:
        row["repetition_penalty"], row["repetition_over"] = params.repetition_penalty, params.repetition_over
    if params.logit_bias:
        row["logit_bias"] = [{"id": id_, "bias": bias} for id_, bias in params.logit_bias]
    if params.min_tokens:
        row["min_tokens"] = params.min_tokens
    if params.grammar is not None:
        row["grammar"] = True


def _runs(flags: bytes) -> list[tuple[int, int]]:
    """Spans of the bytes 1."""
    runs: list[tuple[int, int]] = []
    start = flags.find(1)
    while start >= 0:
        end = flags.find(0, start)
        end = len(flags) if end < 0 else end
        runs.append((start, end))
        start = flags.find(1, end)
    return runs
