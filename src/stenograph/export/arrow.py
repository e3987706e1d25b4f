"""Samples as one Arrow IPC stream: a row per sample, for trainers that read tables (datasets, Ray Data, Polars). Pure.

Needs pyarrow. It is three times the size of all else together and so an extra (`pip install -e '.[arrow]'`), imported
when the first sample is asked for in this format. Its columns are those of the JSON format; `turns`, `metadata` and
`prefix_cache_info` are JSON texts, and so is `rewards`: the reward, be it a number or several. The supports of turns
are a column of bytes. In the schema's metadata are `session_metadata` and `empty_reason`, as JSON.
"""

import functools
import importlib
import math
from array import array
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.json_pieces import json_pieces
from stenograph.export.replay import ReplayRows
from stenograph.export.samples import Sample, SampleSet, as_numpy, describe
from stenograph.export.turn_rows import TurnRow

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
"""As registered with IANA."""

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Source: Arrow's columnar format, IPC streaming format."""


class ArrowMissing(Exception):
    """There is no pyarrow. The message says how to get it."""


def to_arrow(
    samples: Sequence[Sample], *, session_metadata: Mapping[str, object], empty_reason: str | None
) -> Iterator[memoryview]:
    """An IPC stream with a record batch of one row for each sample, one message at a time.

    Nearly all of the work releases the GIL: it belongs on workers, one call of `next` after the other. Raises
    ArrowMissing, at the call, where there is no pyarrow.
    """
    import_pyarrow()
    described = {"session_metadata": session_metadata, "empty_reason": empty_reason}
    return _messages(samples, described)


def arrow_schema(meta: Mapping[str, bytes]) -> memoryview:
    """The first message of a stream of samples, with metadata. Raises ArrowMissing."""
    return memoryview(_batch(import_pyarrow(), []).schema.with_metadata(meta).serialize())


def arrow_row(sample: Sample) -> memoryview:
    """The message of one sample. Raises ArrowMissing."""
    return memoryview(_batch(import_pyarrow(), [sample]).serialize())


def _messages(samples: Sequence[Sample], described: Mapping[str, object]) -> Iterator[memoryview]:
    meta = {key: b"".join(json_pieces(value)) for key, value in described.items()}
    yield arrow_schema(meta)
    yield from map(arrow_row, samples)
    yield memoryview(END_OF_STREAM)


def _batch(pa: Any, samples: Sequence[Sample]) -> Any:
    medium = pa.struct([("sha256", pa.string()), ("kind", pa.string()), ("start", pa.int64()), ("length", pa.int64())])
    span = pa.struct([("version", pa.string()), ("start", pa.int64()), ("end", pa.int64())])
    described = [describe(sample) for sample in samples]
    experts = [_int32(sample.routed_experts) for sample in samples]
    chosen = [_int32(sample.indexer_topk) for sample in samples]
    columns: dict[str, Any] = {
        "tokens": _lists(pa, [as_numpy(sample.tokens) for sample in samples], pa.int64()),
        "response_length": pa.array([sample.response_length for sample in samples], pa.int64()),
        "loss_mask": _lists(pa, [np.frombuffer(sample.loss_mask, np.uint8) for sample in samples], pa.uint8()),
        "rollout_log_probs": _lists(pa, [as_numpy(sample.rollout_log_probs) for sample in samples], pa.float64()),
        "raw_log_probs": _lists(pa, [_maybe_numpy(sample.raw_log_probs) for sample in samples], pa.float64()),
        "sampling_log_probs": _lists(pa, [_maybe_numpy(sample.sampling_log_probs) for sample in samples], pa.float64()),
        "scores": pa.array(
            [None if not sample.scores else list(sample.scores.items()) for sample in samples],
            pa.map_(pa.string(), pa.list_(pa.float64())),
        ),
        "token_rewards": _lists(pa, [_maybe_numpy(sample.token_rewards) for sample in samples], pa.float64()),
        "media": pa.array([row.get("media") for row in described], pa.list_(medium)),
        "logprobs_kind": pa.array([sample.logprobs_kind for sample in samples], pa.string()),
        "rollout_routed_experts": _lists(pa, experts, pa.int32(), depth=3),
        "rollout_indexer_topk": _lists(pa, chosen, pa.int32(), depth=2),
        "response": pa.array([sample.response for sample in samples], pa.string()),
        "status": pa.array([str(sample.status) for sample in samples], pa.string()),
        "weight_versions": pa.array([row["weight_versions"] for row in described], pa.list_(pa.string())),
        "weight_spans": pa.array([row["weight_spans"] for row in described], pa.list_(span)),
        "turns": _json_texts(pa, [[_without_support(turn) for turn in row["turns"]] for row in described]),
        "supports": pa.array([_supports(row["turns"]) for row in described], pa.list_(pa.binary())),
        "prefix_cache_info": _json_texts(pa, [row["prefix_cache_info"] for row in described]),
        "reward": pa.array([_number(row["reward"]) for row in described], pa.float64()),
        "rewards": _json_texts(pa, [row["reward"] for row in described]),
        "outcome": pa.array([row["outcome"] for row in described], pa.string()),
        "metadata": _json_texts(pa, [row["metadata"] for row in described]),
    }
    return pa.RecordBatch.from_pydict(columns)


def import_pyarrow() -> Any:
    """The library. Raises ArrowMissing."""
    try:
        module = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.ipc")
    except ImportError as error:
        raise ArrowMissing("format 'arrow' needs pyarrow, which is not installed here: pip install pyarrow.") from error
    return module


def load_pyarrow() -> None:
    """Import the library. It takes long the first time: work for a worker. Raises ArrowMissing."""
    import_pyarrow()


class BulkArrow:
    """One IPC stream of the samples of many sessions: the columns of `to_arrow`, and before them `session_id`,
    `empty_reason` and `error` (JSON). A session without a sample has one row, with all else null. The last record batch
    has no rows; its message's own metadata has the counts of the answer.

    Raises ArrowMissing where there is no pyarrow.
    """

    def __init__(self) -> None:
        self._pa = import_pyarrow()
        own = [self._pa.field(name, self._pa.string()) for name in ("session_id", "empty_reason", "error")]
        self._schema = self._pa.schema([*own, *_batch(self._pa, []).schema])

    def __repr__(self) -> str:
        return f"<BulkArrow of {len(self._schema)} columns>"

    def head(self) -> memoryview:
        """The stream's first message."""
        return memoryview(self._schema.serialize())

    def rows(self, session_id: str, made: SampleSet) -> Iterator[memoryview]:
        """The messages of a session's samples, or of the reason why it has none. Work for the CPU pool, one call of
        `next` after the other."""
        if made.empty_reason is not None:
            yield self._row([session_id, str(made.empty_reason), None], None)
        for sample in made.samples:
            yield self._row([session_id, None, None], _batch(self._pa, [sample]))

    def failed(self, session_id: str, *, code: str, message: str) -> memoryview:
        """The row of a session without samples because of an error."""
        error = msgspec.json.encode({"code": code, "message": message}).decode()
        return self._row([session_id, None, error], None)

    def end(self, facts: Mapping[str, object]) -> memoryview:
        """The last record batch, without rows, with facts about the whole answer as JSON, and the stream's end."""
        sink, meta = self._pa.BufferOutputStream(), {key: msgspec.json.encode(value) for key, value in facts.items()}
        with self._pa.ipc.new_stream(sink, self._schema) as stream:
            stream.write_batch(self._pa.RecordBatch.from_pylist([], schema=self._schema), custom_metadata=meta)
        return memoryview(sink.getvalue())[len(self.head()) :]

    def _row(self, own: Sequence[str | None], batch: Any) -> memoryview:
        columns = [self._pa.array([value], self._pa.string()) for value in own]
        rest = list(self._schema)[len(own) :]
        columns += [self._pa.nulls(1, field.type) for field in rest] if batch is None else batch.columns
        return memoryview(self._pa.RecordBatch.from_arrays(columns, schema=self._schema).serialize())


@functools.cache
def bulk_arrow() -> BulkArrow:
    """The encoder shared by all answers: it has no state. Raises ArrowMissing."""
    return BulkArrow()


def _without_support(turn: TurnRow) -> dict[str, object]:
    return {key: value for key, value in turn.items() if key != "support"}


def _supports(turns: Sequence[TurnRow]) -> list[bytes | None]:
    return [b64decode(turn["support"]) if "support" in turn else None for turn in turns]


def _number(reward: float | Mapping[str, float] | None) -> float | None:
    return None if isinstance(reward, Mapping) else reward


def _maybe_numpy(values: "array[float] | None") -> NDArray[np.generic] | None:
    return None if values is None else as_numpy(values)


def _int32(rows: ReplayRows | None) -> NDArray[np.int32] | None:
    """Rows in one type: a stream has one schema for all samples, while their smallest types differ."""
    return None if rows is None else rows.astype(np.int32, copy=False)


def _lists(pa: Any, rows: Sequence[NDArray[Any] | None], kind: Any, *, depth: int = 1) -> Any:
    """A column of arrays of `depth` dimensions, as lists of lists, without an object per number. At most one row."""
    (row,) = rows or (None,)
    shape = (0,) * depth if row is None else row.shape
    values = pa.array([] if row is None else row.reshape(-1), kind)
    for inner in range(depth - 1, 0, -1):
        num_lists = math.prod(shape[:inner])
        ends = np.arange(num_lists + 1, dtype=np.int32) * shape[inner]
        values = pa.ListArray.from_arrays(pa.array(ends), values)
    offsets = pa.array([0, *(shape[0] for _ in rows)], pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array([row is None for row in rows], pa.bool_()))


def _json_texts(pa: Any, values: Sequence[object]) -> Any:
    return pa.array([msgspec.json.encode(value).decode() for value in values], pa.string())
