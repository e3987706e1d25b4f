"""Committed turns of one line to a training sample. Pure.

A sample is the line's ids as the engine saw them: the first prompt, then each turn's sampled ids, and between them what
the next turn's prompt added. Nothing is tokenized here. Source of the names: docs/http-api.md#samples.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stenograph.core.errors import SamplesInconsistent
from stenograph.core.types import SampledTurn, WeightSpan, token_ids
from stenograph.session.history import CommittedTurn, TurnStatus

Decode = Callable[["array[int]"], str]
"""Ids to text, control tokens included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row. T tokens, of which the last R = `response_length` come after the first prompt.

    `tokens` [T] int32. `loss_mask` [R] bytes: 1 on sampled tokens. `rollout_log_probs` [R] float64, nats: raw logprob
    where the mask is 1, 0.0 elsewhere. `sampling_log_probs` [R], the same under the distribution drawn from, or
    None where an engine did not tell. `weight_versions`: spans over `tokens`. `response` is the last R tokens as text.
    """

    tokens: "array[int]"
    response_length: int
    loss_mask: bytes
    rollout_log_probs: "array[float]"
    sampling_log_probs: "array[float] | None"
    status: TurnStatus
    weight_versions: tuple[WeightSpan, ...]
    response: str
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.rollout_log_probs), self.response_length}
        if self.sampling_log_probs is not None:
            lengths.add(len(self.sampling_log_probs))
        if len(lengths) != 1 or not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"lengths disagree: {lengths} of {len(self.tokens)} tokens")


def assemble(
    line: Sequence[CommittedTurn], *, decode: Decode, max_seq_len: int | None, metadata: Mapping[str, object]
) -> Sample:
    """Join the turns of a line, at least one, into its sample.

    With `max_seq_len`, the first turn that does not fit is cut, the turns after it are dropped, and the status is
    TRUNCATED. Raises SamplesInconsistent if not even the first prompt and one sampled token fit.
    """
    kept = line if max_seq_len is None else _cut(line, max_seq_len)
    tokens = token_ids(line[0].new_prompt_ids)
    start = len(tokens)
    mask = bytearray()
    raw, sampling = array("d"), array("d")
    spans: list[WeightSpan] = []
    for index, turn in enumerate(kept):
        if index:
            tokens.extend(turn.new_prompt_ids)
            mask.extend(bytes(len(turn.new_prompt_ids)))
            raw.extend([0.0] * len(turn.new_prompt_ids))
            sampling.extend([0.0] * len(turn.new_prompt_ids))
        spans += _shifted(turn.sampled.weights, len(tokens))
        tokens.extend(turn.sampled.ids)
        mask.extend(b"\x01" * len(turn.sampled.ids))
        raw.extend(turn.sampled.logprobs)
        sampling.extend(turn.sampled.sampling_logprobs or ())
    told = all(turn.sampled.sampling_logprobs is not None for turn in kept)
    return Sample(
        tokens=tokens,
        response_length=len(mask),
        loss_mask=bytes(mask),
        rollout_log_probs=raw,
        sampling_log_probs=sampling if told else None,
        status=kept[-1].status if len(kept) == len(line) else TurnStatus.TRUNCATED,
        weight_versions=_joined(spans),
        response=decode(tokens[start:]),
        metadata=metadata,
    )


def to_json(sample: Sample, *, token_text: Callable[[int], str] | None = None) -> dict[str, object]:
    """A sample as plain values; with `token_text`, each token as text too."""
    sampling = sample.sampling_log_probs
    body: dict[str, object] = {
        "tokens": sample.tokens.tolist(),
        "response_length": sample.response_length,
        "loss_mask": list(sample.loss_mask),
        "rollout_log_probs": sample.rollout_log_probs.tolist(),
        "sampling_log_probs": None if sampling is None else sampling.tolist(),
        **describe(sample),
    }
    if token_text is not None:
        body["token_texts"] = [token_text(id_) for id_ in sample.tokens]
    return body


def describe(sample: Sample) -> dict[str, object]:
    """What of a sample is not numbers per token."""
    return {
        "response": sample.response,
        "status": sample.status,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in sample.weight_versions
        ],
        "metadata": sample.metadata,
    }


def _cut(line: Sequence[CommittedTurn], max_seq_len: int) -> list[CommittedTurn]:
    """The turns that fit into `max_seq_len` tokens, the last of them cut short if it crosses the end."""
    kept: list[CommittedTurn] = []
    room = max_seq_len
    for turn in line:
        if room <= len(turn.new_prompt_ids):
            break
        room -= len(turn.new_prompt_ids)
        if room < len(turn.sampled.ids):
            kept.append(replace(turn, sampled=_first(turn.sampled, room), status=TurnStatus.TRUNCATED))
            break
        kept.append(turn)
        room -= len(turn.sampled.ids)
    if not kept:
        raise SamplesInconsistent(
            f"max_seq_len is {max_seq_len}, but the first prompt alone has {len(line[0].new_prompt_ids)} tokens",
            param="/max_seq_len",
        )
    return kept


def _first(sampled: SampledTurn, num_tokens: int) -> SampledTurn:
    sampling = sampled.sampling_logprobs
    return replace(
        sampled,
        ids=sampled.ids[:num_tokens],
        logprobs=sampled.logprobs[:num_tokens],
        sampling_logprobs=None if sampling is None else sampling[:num_tokens],
        top_logprobs=None,
        weights=tuple(
            replace(span, end=min(span.end, num_tokens)) for span in sampled.weights if span.start < num_tokens
        ),
    )


def _shifted(spans: Sequence[WeightSpan], offset: int) -> list[WeightSpan]:
    return [WeightSpan(version=span.version, start=span.start + offset, end=span.end + offset) for span in spans]


def _joined(spans: Sequence[WeightSpan]) -> tuple[WeightSpan, ...]:
    """Spans of one version that follow each other, prompts between them aside, become one."""
    joined: list[WeightSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return tuple(joined)
