"""Samples as NumPy arrays, decoded once from the server's safetensors payload. Pure.

The arrays are views of the payload: nothing is copied, and they are read-only. docs/samples.md explains each field.
"""

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict, cast, overload

import numpy as np
from numpy.typing import NDArray

from stenograph.client.errors import BadPayload
from stenograph.client.shown import html_page, repr_line, reward_text
from stenograph.core.support import split, supports

META = "_samples_meta"

DTYPES = {"I64": "<i8", "F64": "<f8", "U32": "<u4", "I32": "<i4", "U16": "<u2", "U8": "|u1"}

ReplayRows = NDArray[np.uint8 | np.uint16 | np.uint32 | np.int32]
"""Data for a trainer's replay, a row for each token but the last, in the smallest sufficient type."""

Reward = float | Mapping[str, float]
"""A reward: a number, or numbers by name."""

_SHOWN_CHARS = 4000
"""Characters of a response in a notebook."""

SampleStatus = Literal["completed", "truncated", "aborted"]


class SampleOptions(TypedDict, total=False):
    """Options of `POST …/samples`; all optional, as docs/samples.md has them."""

    max_seq_len: int
    metadata: Mapping[str, object]
    kinds: Sequence[str]
    include_side: bool
    include_failed: bool
    scores: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VersionSpan:
    """Tokens `[start, end)`: the sampled ones among them are of this version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedSupport:
    """The ids open to sampling beside each of a sample's last R tokens.

    Token i's are `ids[offsets[i] : offsets[i + 1]]`, ascending, the token among them; `ids` int32, `offsets` int64 [R +
    1]. `is_known` bool [R]: where it is not set, the span is empty: a prompt's token, one with every id possible, or
    one without known ids (docs/samples.md). `vocab_size` is the model's.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    is_known: NDArray[np.bool_]
    vocab_size: int

    def __len__(self) -> int:
        return len(self.is_known)

    def __getitem__(self, index: int) -> NDArray[np.int32] | None:
        if not self.is_known[index]:
            return None
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def __repr__(self) -> str:
        num_known = int(self.is_known.sum())
        mean = len(self.ids) / num_known if num_known else 0.0
        return f"<DecodedSupport of {num_known} of {len(self)} tokens, {mean:.1f} ids each of {self.vocab_size}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMedia:
    """An image of a sample: tokens `[start, start + length)` stand for it. `sha256` is of its bytes, in hex."""

    sha256: str
    kind: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DecodedSample:
    """One training row. T tokens; the last R = `response_length` come after the first prompt.

    `tokens` int64 [T]; `loss_mask` uint8 [R]; `log_probs` float64 [R], nats, 0.0 where the mask is 0: tempered ones,
    unless `logprobs_kind` says otherwise. `raw_log_probs` and `sampling_log_probs` [R] or None. `routed_experts`
    [T - 1, layers, top_k] and `indexer_topk` [T - 1, K], or None. `turns` are the rows of docs/samples.md.
    `num_prompt_tokens` and `num_cached_tokens` are sums over the turns, as the engine counted them. `scores` float64
    [R] are the annotations asked for, by name, 0.0 where the mask is 0, and so are `token_rewards` [R]; None where
    turns and tokens have no rewards of their own. `media` are the images in `tokens`, in order; `session.media(sha256)`
    has their bytes.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]
    log_probs: NDArray[np.float64]
    status: SampleStatus
    raw_log_probs: NDArray[np.float64] | None = None
    sampling_log_probs: NDArray[np.float64] | None = None
    logprobs_kind: str | None = None
    routed_experts: ReplayRows | None = None
    indexer_topk: ReplayRows | None = None
    weight_versions: tuple[str, ...] = ()
    weight_spans: tuple[VersionSpan, ...] = ()
    turns: tuple[Mapping[str, object], ...] = ()
    response: str = ""
    reward: Reward | None = None
    outcome: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    metadata: Mapping[str, object]
    token_rewards: NDArray[np.float64] | None = None
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])
    media: tuple[SampleMedia, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.log_probs), *map(len, self.scores.values())}
        if len(lengths) != 1 or len(self.loss_mask) > len(self.tokens):
            raise BadPayload(f"a sample's mask and log-probabilities have lengths {lengths} of {len(self.tokens)}")

    @property
    def response_length(self) -> int:
        """R."""
        return len(self.loss_mask)

    @property
    def prompt_length(self) -> int:
        """T - R."""
        return len(self.tokens) - len(self.loss_mask)

    @property
    def num_trained(self) -> int:
        """Tokens with mask 1."""
        return int(self.loss_mask.sum())

    def support(self) -> DecodedSupport | None:
        """The ids open to sampling, decoded anew at each call; None where no turn has them.

        Raises BadPayload for bytes other than a support of these tokens.
        """
        spans: dict[int, NDArray[np.int64]] = {}
        vocab_size = 0
        for turn in self.turns:
            if "support" not in turn:
                continue
            start, end = cast("int", turn["start"]), cast("int", turn["end"])
            try:
                whole = b64decode(cast("str", turn["support"]), validate=True)
                vocab_size, _ = split(whole)
                of_turn = enumerate(supports(whole, self.tokens[start:end].tolist()), start - self.prompt_length)
                spans.update((place, ids) for place, ids in of_turn if ids is not None)
            except ValueError as error:
                raise BadPayload(f"the support of the turn at tokens {start} to {end} is damaged: {error}") from error
        if not vocab_size:
            return None
        counts, is_known = np.zeros(self.response_length + 1, np.int64), np.zeros(self.response_length, np.bool_)
        for place, ids in spans.items():
            counts[place + 1], is_known[place] = len(ids), True
        in_order = [spans[place] for place in sorted(spans)]
        return DecodedSupport(
            ids=np.concatenate([np.zeros(0, np.int64), *in_order]).astype(np.int32),
            offsets=counts.cumsum(),
            is_known=is_known,
            vocab_size=vocab_size,
        )

    def __repr__(self) -> str:
        weights = f", weights {', '.join(sorted(set(self.weight_versions)))}" if self.weight_versions else ""
        return (
            f"<DecodedSample {self.status}: {self.prompt_length} + {self.response_length} tokens, {self.num_trained}"
            f" trained, {len(self.turns)} turns, reward {reward_text(self.reward)}{weights}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (turn.get("node_id"), turn.get("prompt_start"), turn.get("start"), turn.get("end"), turn.get("temperature"))
            for turn in self.turns
        ]
        columns = ("turn", "prompt from", "sampled from", "to", "temperature")
        return html_page(repr(self)[1:-1], columns, rows, below=self.response[:_SHOWN_CHARS])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DecodedSamples(Sequence[DecodedSample]):
    """A session's samples, oldest leaf first. `empty_reason` says why there is none, and is None where there are.

    `payload` is the safetensors payload as the server wrote it; the samples' arrays are views of it.
    """

    samples: tuple[DecodedSample, ...]
    session_metadata: Mapping[str, object]
    empty_reason: str | None = None
    payload: bytes = b""

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> DecodedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[DecodedSample, ...]: ...
    def __getitem__(self, index: int | slice) -> DecodedSample | tuple[DecodedSample, ...]:
        return self.samples[index]

    def __repr__(self) -> str:
        empty = "" if self.empty_reason is None else f", {self.empty_reason}"
        trained = sum(sample.num_trained for sample in self.samples)
        tokens = sum(len(sample.tokens) for sample in self.samples)
        return f"<DecodedSamples {len(self.samples)} of {tokens} tokens, {trained} trained{empty}>"

    def _repr_html_(self) -> str:
        rows = [
            (
                index,
                sample.status,
                sample.metadata.get("kind", ""),
                sample.prompt_length,
                sample.response_length,
                sample.num_trained,
                len(sample.turns),
                reward_text(sample.reward),
                repr_line(sample.response),
            )
            for index, sample in enumerate(self.samples)
        ]
        columns = ("", "status", "kind", "prompt", "response", "trained", "turns", "reward", "text")
        return html_page(repr(self)[1:-1], columns, rows)


def decoded(payload: bytes) -> DecodedSamples:
    """The samples of a payload. Raises BadPayload if it is cut, or not of the format."""
    try:
        return _decoded(payload)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadPayload(f"a payload of {len(payload)} bytes is no samples: {error!r}") from error


def _decoded(payload: bytes) -> DecodedSamples:
    tensors = read_tensors(payload)
    meta = json.loads(tensors[META].tobytes())
    return DecodedSamples(
        samples=tuple(read_sample(fields, tensors, index) for index, fields in enumerate(meta["samples"])),
        session_metadata=meta["session_metadata"],
        empty_reason=meta["empty_reason"],
        payload=payload,
    )


def read_tensors(payload: bytes) -> dict[str, NDArray[np.generic]]:
    """The tensors by name: eight bytes for the length of the header, the header as JSON, the data."""
    start = 8 + int.from_bytes(payload[:8], "little")
    if len(payload) < start:
        raise ValueError("its header is cut")
    header = cast("dict[str, dict[str, object]]", json.loads(payload[8:start]))
    found: dict[str, NDArray[np.generic]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = cast("tuple[int, int]", entry["data_offsets"])
        if not 0 <= begin <= end <= len(payload) - start:
            raise ValueError(f"tensor {name} is cut")
        dtype = np.dtype(DTYPES[str(entry["dtype"])])
        flat = np.frombuffer(payload, dtype, (end - begin) // dtype.itemsize, start + begin)
        found[name] = flat.reshape(cast("list[int]", entry["shape"]))
    return found


def read_sample(fields: Mapping[str, object], tensors: Mapping[str, NDArray[np.generic]], index: int) -> DecodedSample:
    spans = cast("list[Mapping[str, object]]", fields["weight_spans"])
    counts = cast("Mapping[str, int]", fields.get("prefix_cache_info", {}))
    return DecodedSample(
        tokens=cast("NDArray[np.int64]", tensors[f"tokens.{index}"]),
        loss_mask=cast("NDArray[np.uint8]", tensors[f"loss_mask.{index}"]),
        log_probs=cast("NDArray[np.float64]", tensors[f"rollout_log_probs.{index}"]),
        routed_experts=cast("ReplayRows | None", tensors.get(f"rollout_routed_experts.{index}")),
        indexer_topk=cast("ReplayRows | None", tensors.get(f"rollout_indexer_topk.{index}")),
        raw_log_probs=_floats(fields["raw_log_probs"]),
        sampling_log_probs=_floats(fields["sampling_log_probs"]),
        logprobs_kind=cast("str | None", fields.get("logprobs_kind")),
        status=cast("SampleStatus", fields["status"]),
        weight_versions=tuple(cast("list[str]", fields["weight_versions"])),
        weight_spans=tuple(
            VersionSpan(version=str(span["version"]), start=cast("int", span["start"]), end=cast("int", span["end"]))
            for span in spans
        ),
        turns=tuple(cast("list[Mapping[str, object]]", fields["turns"])),
        response=str(fields["response"]),
        reward=cast("Reward | None", fields["reward"]),
        outcome=cast("str | None", fields["outcome"]),
        num_prompt_tokens=int(counts.get("total_prompt_tokens", 0)),
        num_cached_tokens=int(counts.get("cached_tokens", 0)),
        metadata=cast("Mapping[str, object]", fields["metadata"]),
        media=tuple(
            SampleMedia(
                sha256=str(one["sha256"]),
                kind=str(one["kind"]),
                start=cast("int", one["start"]),
                length=cast("int", one["length"]),
            )
            for one in cast("list[Mapping[str, object]]", fields.get("media", []))
        ),
        token_rewards=_floats(fields.get("token_rewards")),
        scores={
            name: np.array(values, np.float64)
            for name, values in cast("Mapping[str, list[float]]", fields.get("scores", {})).items()
        },
    )


def _floats(values: object) -> NDArray[np.float64] | None:
    return None if values is None else np.array(values, np.float64)
