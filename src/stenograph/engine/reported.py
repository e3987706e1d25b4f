"""Reports of an engine beside its rows of tokens: alternatives, weights, supports, and payloads for a replay. Pure.

SGLang and LMDeploy write them in each `meta_info`. The laws here:

    versions_agree          spans of weight versions cover the tokens, in order
    has_support             where it was asked for, each token has its support, and its logprob among that
    support_of_token        a support is a list of ids of the vocabulary, each once, and the sampled token among them
    replay_is_base64        a requested replay payload is a string of base64 of int32
"""

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.replay import PackedInts, Replay, int32_of_base64
from stenograph.core.support import SupportWriter
from stenograph.core.types import SupportPiece, TopLogprob, WeightSpan
from stenograph.engine.rows import LARGE_PAYLOAD_BYTES, MetaInfo, TopRow, check_ids, short
from stenograph.engine.settings import ReplayKind

REPLAY_FIELDS = ("routed_experts", "indexer_topk")
_PAYLOAD_BEGINS = b'"routed_experts":"'
STAND_IN_TEXT = b"read apart: 7777777777777777777"
"""No base64."""


def alternatives(
    positions: Sequence[Sequence[TopRow] | None] | None, *, num_sampled: int, num_new: int, vocab_size: int
) -> tuple[tuple[TopLogprob, ...], ...] | None:
    """The alternatives at the `num_new` last positions, of a list of those or of all `num_sampled`; None if none."""
    if not positions:
        return None
    if len(positions) not in (num_sampled, num_new):
        detail = f"{short(num_sampled)} completion tokens, but {len(positions)} in output_top_logprobs"
        raise UpstreamInvalid("count_agrees", detail)
    fresh = positions[len(positions) - num_new :]
    check_ids((row.id for rows in fresh for row in rows or ()), vocab_size)
    return tuple(
        tuple(TopLogprob(id=row.id, logprob=row.logprob) for row in rows or () if row.logprob is not None)
        for rows in fresh
    )


def weight_spans(meta: MetaInfo, *, num_sampled: int) -> tuple[WeightSpan, ...]:
    """Spans of the weights of the `num_sampled` tokens, without a gap; empty where not reported."""
    told = meta.weight_versions
    if told is None or not num_sampled:
        version = meta.weight_version
        if version is None or not num_sampled:
            return ()
        return (WeightSpan(version=str(version), start=0, end=num_sampled),)
    end = 0
    for span in told:
        if span.start != end or span.end <= span.start:
            break
        end = span.end
    else:
        if end == num_sampled:
            return tuple(WeightSpan(version=str(span.version), start=span.start, end=span.end) for span in told)
    raise UpstreamInvalid("versions_agree", f"weight_versions must cover all {num_sampled} tokens without gaps")


class ReportedSupport:
    """Reads the supports of one generation's tokens, as SGLang writes them, and their logprobs among these."""

    def __init__(self, vocab_size: int) -> None:
        self._writer = SupportWriter(vocab_size)
        self._rows: Sequence[Sequence[int]] = ()
        self._logprobs: Sequence[float] = ()

    def __repr__(self) -> str:
        return f"<ReportedSupport of {len(self._rows)} tokens>"

    def take(self, meta: MetaInfo, *, num_new: int, num_sampled: int) -> None:
        """Take those of a part's new tokens, of lists of these or of all so far. Raises UpstreamInvalid."""
        rows, logprobs = meta.output_token_sampling_mask or [], meta.output_token_sampling_logprobs or []
        if len(rows) != len(logprobs) or len(rows) not in (num_sampled, num_new):
            raise UpstreamInvalid(
                "has_support",
                f"{short(num_sampled)} completion tokens, but supports of {len(rows)}, and {len(logprobs)} logprobs"
                " among them: SGLang has to know return_sampling_mask (docs/engines.md)",
            )
        start = len(rows) - num_new
        self._rows, self._logprobs = rows[start:], logprobs[start:]

    def piece(self, ids: Sequence[int]) -> SupportPiece:
        """The supports of the tokens taken. Raises UpstreamInvalid."""
        return support_piece(self._writer, ids, self._rows)

    def logprobs(self) -> "array[float]":
        """Their logprobs among their supports."""
        return array("d", self._logprobs)


def support_piece(writer: SupportWriter, ids: Sequence[int], rows: Sequence[Sequence[int]]) -> SupportPiece:
    """The supports of the next tokens, listed as ids by an engine. Raises UpstreamInvalid."""
    try:
        return writer.write_rows(ids, rows)
    except (ValueError, OverflowError) as error:
        raise UpstreamInvalid("support_of_token", str(error)) from error


def replay_of(
    meta: MetaInfo,
    asked: ReplayKind,
    *,
    num_rows: int,
    first_row: int,
    row_size: int,
    apart: memoryview | None = None,
) -> tuple[Replay | None, tuple[str, ...]]:
    """The requested payload for a trainer's replay, None where there is none; and the names of any others.

    Of the `num_rows` rows of routed experts those from `first_row` on were asked for, and no others are kept, also of
    an SGLang that knows no `routed_experts_start_len` and sends all. `row_size`: the numbers in a row; 0 is not known.
    `apart` is the text that `payload_apart` found.
    """
    told = [name for name in REPLAY_FIELDS if _is_reported(meta, name)]
    kept = {name: _payload(meta, name, apart) for name in told if asked in (name, ReplayKind.ALL)}
    unasked = tuple(name for name in told if name not in kept)
    experts = kept.get("routed_experts")
    if experts is not None and first_row and experts.size == num_rows * row_size:
        kept["routed_experts"] = experts[first_row * row_size :]
    packed = {name: PackedInts.of(values) for name, values in kept.items()}
    return Replay(**packed, first_row=first_row if experts is not None else 0) if packed else None, unasked


def _raw_payload(meta: MetaInfo, name: str) -> msgspec.Raw:
    return meta.routed_experts if name == "routed_experts" else meta.indexer_topk


def _is_reported(meta: MetaInfo, name: str) -> bool:
    """Whether there is a payload: a string. Raises UpstreamInvalid for anything else but null."""
    begin = bytes(memoryview(_raw_payload(meta, name))[:1])
    if begin not in (b'"', b"n"):
        raise UpstreamInvalid("replay_is_base64", f"{name} is no string")
    return begin == b'"'


def _payload(meta: MetaInfo, name: str, apart: memoryview | None) -> "NDArray[np.int32]":
    raw = _raw_payload(meta, name)
    begin = bytes(memoryview(raw)[: len(STAND_IN_TEXT) + 1])
    text: memoryview | str = memoryview(raw)[1:-1]
    if apart is not None and begin[1:] == STAND_IN_TEXT:
        text = apart
    try:
        return int32_of_base64(text)
    except ValueError:
        text = text if text is apart else msgspec.json.decode(raw, type=str)  # it may be spelled with escapes
    try:
        return int32_of_base64(text)
    except ValueError as error:
        told = f"{name}, {len(text)} characters, is no base64 of int32: {error}"
        raise UpstreamInvalid("replay_is_base64", told) from error


def payload_apart(body: bytes) -> tuple[bytes, memoryview | None]:
    """The body with `STAND_IN_TEXT` in the place of the text of a large `routed_experts`, and that text.

    The body itself and None where it has none. The decoder passes over a megabyte of base64 a byte at a time. Here the
    machine's vectors look at it: it has to be ASCII without quotes, escapes and control characters. Then the rest is
    JSON if and only if the body is, and says the same but for this text.
    """
    middle = len(body) // 2
    begin, end = body.rfind(b'"', 0, middle) + 1, body.find(b'"', middle)
    if end - begin < LARGE_PAYLOAD_BYTES or not body.endswith(_PAYLOAD_BEGINS, 0, begin):
        return body, None
    text = np.frombuffer(body, dtype=np.uint8, count=end - begin, offset=begin)
    if np.minimum.reduce(text) < ord(" ") or np.maximum.reduce(text) >= 0x7F or body.find(b"\\", begin, end) >= 0:
        return body, None
    rest = b"".join((body[:begin], STAND_IN_TEXT, body[end:]))
    return (rest, memoryview(body)[begin:end]) if rest.count(STAND_IN_TEXT) == 1 else (body, None)
