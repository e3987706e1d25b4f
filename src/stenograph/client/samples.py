"""Samples as NumPy arrays, decoded once from the server's safetensors payload. Pure.

The arrays are views of the payload: nothing is copied, and they are read-only. docs/samples.md says what each field is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, cast, overload

import numpy as np
from numpy.typing import NDArray

from stenograph.client.errors import BadPayload

META = "_samples_meta"

_DTYPES = {"I64": "<i8", "I32": "<i4", "F64": "<f8", "U8": "|u1"}

Reward = float | Mapping[str, float]
"""A reward: a number, or numbers by name."""

SampleStatus = Literal["completed", "truncated", "aborted"]


class SampleOptions(TypedDict, total=False):
    """Options of `POST …/samples`; all optional, as docs/samples.md has them."""

    max_seq_len: int
    metadata: Mapping[str, object]
    kinds: Sequence[str]
    include_side: bool
    include_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VersionSpan:
    """Tokens `[start, end)`, those of whom that were sampled were sampled by this version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedSample:
    """One training row. T tokens, of which the last R = `response_length` come after the first prompt.

    `tokens` int64 [T]; `loss_mask` uint8 [R]; `log_probs` float64 [R], nats, 0.0 where the mask is 0: tempered ones,
    unless `logprobs_kind` says otherwise. `raw_log_probs` and `sampling_log_probs` [R] or None. `routed_experts` int32
    [T - 1, layers, top_k] and `indexer_topk` int32 [T - 1, K], or None. `turns` are the rows of docs/samples.md.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]
    log_probs: NDArray[np.float64]
    status: SampleStatus
    raw_log_probs: NDArray[np.float64] | None = None
    sampling_log_probs: NDArray[np.float64] | None = None
    logprobs_kind: str | None = None
    routed_experts: NDArray[np.int32] | None = None
    indexer_topk: NDArray[np.int32] | None = None
    weight_versions: tuple[str, ...] = ()
    weight_spans: tuple[VersionSpan, ...] = ()
    turns: tuple[Mapping[str, object], ...] = ()
    response: str = ""
    reward: Reward | None = None
    outcome: str | None = None
    metadata: Mapping[str, object]

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.log_probs)}
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedSamples(Sequence[DecodedSample]):
    """A session's samples, oldest leaf first. `empty_reason` says why there is none, and is None where there are."""

    samples: tuple[DecodedSample, ...]
    session_metadata: Mapping[str, object]
    empty_reason: str | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> DecodedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[DecodedSample, ...]: ...
    def __getitem__(self, index: int | slice) -> DecodedSample | tuple[DecodedSample, ...]:
        return self.samples[index]


def decoded(payload: bytes) -> DecodedSamples:
    """The samples of a payload. Raises BadPayload if it is cut, or not of the format."""
    try:
        return _decoded(payload)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadPayload(f"a payload of {len(payload)} bytes is no samples: {error!r}") from error


def _decoded(payload: bytes) -> DecodedSamples:
    tensors = _tensors(payload)
    meta = json.loads(tensors[META].tobytes())
    return DecodedSamples(
        samples=tuple(_sample(fields, tensors, index) for index, fields in enumerate(meta["samples"])),
        session_metadata=meta["session_metadata"],
        empty_reason=meta["empty_reason"],
    )


def _tensors(payload: bytes) -> dict[str, NDArray[np.generic]]:
    """The tensors by name: eight bytes that say the length of the header, the header as JSON, the data."""
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
        dtype = np.dtype(_DTYPES[str(entry["dtype"])])
        flat = np.frombuffer(payload, dtype, (end - begin) // dtype.itemsize, start + begin)
        found[name] = flat.reshape(cast("list[int]", entry["shape"]))
    return found


def _sample(fields: Mapping[str, object], tensors: Mapping[str, NDArray[np.generic]], index: int) -> DecodedSample:
    spans = cast("list[Mapping[str, object]]", fields["weight_spans"])
    return DecodedSample(
        tokens=cast("NDArray[np.int64]", tensors[f"tokens.{index}"]),
        loss_mask=cast("NDArray[np.uint8]", tensors[f"loss_mask.{index}"]),
        log_probs=cast("NDArray[np.float64]", tensors[f"rollout_log_probs.{index}"]),
        routed_experts=cast("NDArray[np.int32] | None", tensors.get(f"rollout_routed_experts.{index}")),
        indexer_topk=cast("NDArray[np.int32] | None", tensors.get(f"rollout_indexer_topk.{index}")),
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
        metadata=cast("Mapping[str, object]", fields["metadata"]),
    )


def _floats(values: object) -> NDArray[np.float64] | None:
    return None if values is None else np.array(values, np.float64)
