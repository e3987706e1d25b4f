"""The payload of a row with scores of a session's tokens. Pure."""

from array import array

import msgspec

from stenograph.core.outcome import Annotation, TurnScores
from stenograph.core.types import ID_TYPECODE
from stenograph.store.codec.rows import RowDamaged
from stenograph.store.codec.turns import maybe_read, maybe_written, text_read, text_written


class _WrittenScores(msgspec.Struct, array_like=True, frozen=True, gc=False):
    node: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


class _WrittenAnnotation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: bytes
    digest: str
    engine: bytes
    policy: bytes | None
    version: bytes | None
    at: float
    turns: list[_WrittenScores]
    tokens: list[tuple[bytes, float]]
    idle_since: float | None


_ENCODER = msgspec.msgpack.Encoder()
_ANNOTATIONS = msgspec.msgpack.Decoder(_WrittenAnnotation)


def encode_annotation(annotation: Annotation, *, idle_since: float | None = None) -> bytes:
    """The payload of an annotation's row, with the time since which its session was idle."""
    return _ENCODER.encode(
        _WrittenAnnotation(
            name=text_written(annotation.name),
            digest=annotation.digest,
            engine=text_written(annotation.engine),
            policy=maybe_written(annotation.policy),
            version=maybe_written(annotation.version),
            at=annotation.at,
            turns=[_turn_written(node, scores) for node, scores in annotation.turns.items()],
            tokens=[(text_written(text), logprob) for text, logprob in annotation.tokens.items()],
            idle_since=idle_since,
        )
    )


def decode_annotation(payload: memoryview) -> tuple[Annotation, float | None]:
    """An annotation, and the time in its row. Raises RowDamaged."""
    try:
        written = _ANNOTATIONS.decode(payload)
        annotation = Annotation(
            name=text_read(written.name),
            digest=written.digest,
            engine=text_read(written.engine),
            policy=maybe_read(written.policy),
            version=maybe_read(written.version),
            at=written.at,
            turns={one.node: _turn_read(one) for one in written.turns},
            tokens={text_read(text): logprob for text, logprob in written.tokens},
        )
    except (ValueError, TypeError) as error:
        raise RowDamaged(f"its content cannot be read: {error}") from error
    return annotation, written.idle_since


def _turn_written(node: int, scores: TurnScores) -> _WrittenScores:
    return _WrittenScores(
        node=node,
        logprobs=scores.logprobs.tobytes(),
        top_ids=scores.top_ids.tobytes(),
        top_logprobs=scores.top_logprobs.tobytes(),
    )


def _turn_read(written: _WrittenScores) -> TurnScores:
    return TurnScores(
        logprobs=array("d", written.logprobs),
        top_ids=array(ID_TYPECODE, written.top_ids),
        top_logprobs=array("d", written.top_logprobs),
    )
