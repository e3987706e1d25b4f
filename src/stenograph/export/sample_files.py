"""A file of samples, read again: safetensors, JSON or Arrow, as `export`, `run` and `POST …/samples` write them. Pure.

Reads only the fields for checking each sample against the store. The format is known by the file's beginning.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from stenograph.export.arrow import import_pyarrow
from stenograph.export.safetensors import META

T = TypeVar("T")

_ARROW_STREAM = b"\xff\xff\xff\xff"
_ARROW_FILE = b"ARROW1"
_DTYPES = {"I64": "<i8", "F64": "<f8", "I32": "<i4", "U8": "|u1"}
_MAX_HEADER_BYTES = 100 * 2**20
"""Source: the safetensors library refuses longer ones."""


class NoSampleFile(Exception):
    """The file is none of samples. The message says why."""


class FiledTurn(msgspec.Struct, frozen=True):
    """A row of a sample's `turns`: its turn's place, the kinds of its log-probabilities, and the ids open to sampling
    beside its tokens (core/support.py)."""

    node_id: int
    prompt_start: int
    start: int
    end: int
    logprobs_kind: str = "tempered"
    support: bytes | None = None


class FiledSpan(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` were sampled by weights `version`."""

    version: str
    start: int
    end: int


class FiledMedium(msgspec.Struct, frozen=True):
    """A row of a sample's `media`: tokens `[start, start + length)` stand for the medium with this hash."""

    sha256: str
    kind: str
    start: int
    length: int


class FiledCustody(msgspec.Struct, frozen=True):
    """A sample's session, the digest of each of its turns, and its trained turns."""

    session_id: str
    digests: list[str]
    trained: list[int]


class _FiledMetadata(msgspec.Struct, frozen=True):
    custody: FiledCustody | None = None


class _FiledFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a sample written as JSON in every format, and those of the JSON format alone."""

    response_length: int
    turns: list[FiledTurn]
    weight_spans: list[FiledSpan]
    metadata: _FiledMetadata
    media: list[FiledMedium] = []
    raw_log_probs: list[float] | None = None
    sampling_log_probs: list[float] | None = None
    tokens: list[int] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None


class _FiledSet(msgspec.Struct, frozen=True):
    samples: list[msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class FiledSample:
    """One sample of a file: `tokens` [T], and over the last R of them the mask and log-probabilities, as they stand
    there. Nothing of it is checked but its types."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]
    rollout_log_probs: NDArray[np.float64]
    raw_log_probs: NDArray[np.float64] | None
    sampling_log_probs: NDArray[np.float64] | None
    response_length: int
    turns: Sequence[FiledTurn]
    weight_spans: Sequence[FiledSpan]
    media: Sequence[FiledMedium]
    custody: FiledCustody | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFile:
    """A file's samples, in order, read one at a time. `num_samples` None: not known before they are read.

    Iterating raises NoSampleFile at an entry that is not a sample.
    """

    samples: Iterator[FiledSample]
    num_samples: int | None


def sample_file(content: memoryview) -> SampleFile:
    """The samples in a file's bytes. Raises NoSampleFile, and ArrowMissing for Arrow where there is no pyarrow."""
    first = bytes(content[:8])
    if first[:4] == _ARROW_STREAM or first[:6] == _ARROW_FILE:
        return SampleFile(samples=_arrow_samples(content, is_file=first[:6] == _ARROW_FILE), num_samples=None)
    if first.lstrip()[:1] == b"{":
        raws = _set(content).samples
        return SampleFile(samples=map(_json_sample, raws), num_samples=len(raws))
    return _safetensors_file(content)


def _set(text: memoryview) -> _FiledSet:
    return _decoded(text, _FiledSet)


def _decoded(text: memoryview | msgspec.Raw | str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoSampleFile(f"it is not the JSON of samples: {error}") from error


def _json_sample(raw: msgspec.Raw) -> FiledSample:
    facts = _decoded(raw, _FiledFacts)
    if facts.tokens is None or facts.loss_mask is None or facts.rollout_log_probs is None:
        raise NoSampleFile("a sample lacks tokens, loss_mask or rollout_log_probs")
    return _sample(
        facts,
        _numbers(facts.tokens, np.int64),
        _numbers(facts.loss_mask, np.uint8),
        _numbers(facts.rollout_log_probs, np.float64),
    )


def _sample(
    facts: _FiledFacts,
    tokens: NDArray[np.int64],
    loss_mask: NDArray[np.uint8],
    logprobs: NDArray[np.float64],
) -> FiledSample:
    raw, sampling = facts.raw_log_probs, facts.sampling_log_probs
    return FiledSample(
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_log_probs=logprobs,
        raw_log_probs=None if raw is None else _numbers(raw, np.float64),
        sampling_log_probs=None if sampling is None else _numbers(sampling, np.float64),
        response_length=facts.response_length,
        turns=facts.turns,
        weight_spans=facts.weight_spans,
        media=facts.media,
        custody=facts.metadata.custody,
    )


def _numbers(values: Sequence[float], dtype: type[Any]) -> NDArray[Any]:
    try:
        return np.array(values, dtype)
    except (OverflowError, ValueError) as error:
        raise NoSampleFile(f"a number is out of its range: {error}") from error


# --- safetensors ------------------------------------------------------------------------------------------------------


class _TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _safetensors_file(content: memoryview) -> SampleFile:
    entries, data = _entries(content)
    metas = _set(_tensor(entries, data, META, "U8").data).samples
    samples = (_safetensors_sample(entries, data, index, raw) for index, raw in enumerate(metas))
    return SampleFile(samples=samples, num_samples=len(metas))


def _entries(content: memoryview) -> tuple[dict[str, _TensorEntry], memoryview]:
    """The header of a file, and the bytes behind it."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 0 < length <= min(len(content) - 8, _MAX_HEADER_BYTES):
        raise NoSampleFile("it is neither safetensors nor JSON nor Arrow")
    try:
        return msgspec.json.decode(content[8 : 8 + length], type=dict[str, _TensorEntry]), content[8 + length :]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoSampleFile(f"its safetensors header cannot be read: {error}") from error


def _tensor(entries: dict[str, _TensorEntry], data: memoryview, name: str, dtype: str) -> NDArray[Any]:
    """A tensor [N], without a copy."""
    entry = entries.get(name)
    if entry is None or entry.dtype != dtype or len(entry.shape) != 1:
        raise NoSampleFile(f"it has no tensor {name} of {dtype} with one dimension")
    start, end = entry.data_offsets
    if not 0 <= start <= end <= len(data) or end - start != entry.shape[0] * np.dtype(_DTYPES[dtype]).itemsize:
        raise NoSampleFile(f"the bytes of its tensor {name} are not there")
    return np.frombuffer(data[start:end], _DTYPES[dtype])


def _safetensors_sample(
    entries: dict[str, _TensorEntry], data: memoryview, index: int, raw: msgspec.Raw
) -> FiledSample:
    return _sample(
        _decoded(raw, _FiledFacts),
        _tensor(entries, data, f"tokens.{index}", "I64"),
        _tensor(entries, data, f"loss_mask.{index}", "U8"),
        _tensor(entries, data, f"rollout_log_probs.{index}", "F64"),
    )


# --- Arrow ------------------------------------------------------------------------------------------------------------

_ARROW_COLUMNS = (
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "raw_log_probs", "sampling_log_probs",
    "weight_spans", "turns", "supports", "metadata", "media",
)  # fmt: skip


def _arrow_samples(content: memoryview, *, is_file: bool) -> Iterator[FiledSample]:
    return _arrow_rows(import_pyarrow(), content, is_file=is_file)


def _arrow_rows(pa: Any, content: memoryview, *, is_file: bool) -> Iterator[FiledSample]:
    try:
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.py_buffer(content))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            batch.validate(full=True)  # else its offsets may point anywhere
            columns = {name: batch.column(name) for name in _ARROW_COLUMNS}
            yield from (_arrow_sample(pa, columns, row) for row in range(batch.num_rows))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoSampleFile(f"it is not the Arrow of samples: {error}") from error


def _arrow_sample(pa: Any, columns: dict[str, Any], row: int) -> FiledSample:
    def numbers(name: str, kind: Any) -> NDArray[Any] | None:
        values = columns[name][row]
        return values.values.cast(kind).to_numpy(zero_copy_only=False) if values.is_valid else None

    tokens, mask = numbers("tokens", pa.int64()), numbers("loss_mask", pa.uint8())
    logprobs = numbers("rollout_log_probs", pa.float64())
    if tokens is None or mask is None or logprobs is None:
        raise NoSampleFile("a sample lacks tokens, loss_mask or rollout_log_probs")
    return FiledSample(
        tokens=tokens,
        loss_mask=mask,
        rollout_log_probs=logprobs,
        raw_log_probs=numbers("raw_log_probs", pa.float64()),
        sampling_log_probs=numbers("sampling_log_probs", pa.float64()),
        response_length=columns["response_length"][row].as_py(),
        turns=_arrow_turns(columns["turns"][row].as_py(), columns["supports"][row].as_py()),
        weight_spans=[FiledSpan(**span) for span in columns["weight_spans"][row].as_py()],
        media=[FiledMedium(**row) for row in columns["media"][row].as_py() or ()],
        custody=_decoded(columns["metadata"][row].as_py(), _FiledMetadata).custody,
    )


def _arrow_turns(text: str, supports: list[bytes | None]) -> list[FiledTurn]:
    turns = _decoded(text, list[FiledTurn])
    return [structs.replace(turn, support=one) for turn, one in zip(turns, supports, strict=True)]
