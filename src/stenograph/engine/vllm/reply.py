"""One reply of vLLM, whole or event by event, as chunks that keep every law. Pure.

An engine's word is not trusted: a `VLLMReader` returns the truth, or raises `UpstreamInvalid` with the broken law, for
any bytes. Besides the laws of `wire`:

    one_choice              a reply has a choice
    request_agrees          the reply is to the request sent, by vLLM's name for its id
    logprob_is_told         a logprob is not -9999, vLLM's mark of a missing one
    id_in_vocab             a token's id is in [0, vocabulary)
    count_agrees            there is a logprob for each id, and there are `completion_tokens` of them
    prompt_agrees           `prompt_tokens` is the number of ids sent, or, with media, of effective ids reported
    has_tokens              no token means an aborted generation
    has_finish              fields about the whole generation come with its end, or after it
    finish_is_last          nothing is sampled after the end
    finish_reason           the reason is one of stop, length, abort
    weight_spans            spans of weight versions follow each other, and cover all tokens
    has_routed_experts      they are there, if they were asked for
    has_support             each token has its support, if supports were asked for
    support_of_token        a support is a list of ids of the vocabulary, each once, and the sampled token among them
    routed_experts_shape    they are a .npy file of integers [prompt + completion tokens - 1, layers, top_k], as base64,
                            without the rows not asked for, or with them
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pybase64
from msgspec.structs import replace

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.replay import PackedInts, Replay
from stenograph.core.support import SupportWriter
from stenograph.core.types import (
    Chunk,
    EffectivePrompt,
    Finish,
    FinishReason,
    SupportPiece,
    TopLogprob,
    WeightSpan,
    token_ids,
)
from stenograph.engine.reported import support_piece
from stenograph.engine.rows import EngineUsage, check_ids, short
from stenograph.engine.vllm.request import VLLMRoute
from stenograph.engine.vllm.wire import NO_LOGPROB, VLLMSpan, VLLMTold, check_request, read

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expectations of a reply. `wants_experts`: vLLM has to report the routed experts, from `first_row` on,
    `wants_support`: the support of each token, and all at once.

    `eos_ids` end a turn, without a word of it from vLLM.
    """

    request_id: str
    route: VLLMRoute
    vocab_size: int
    num_prompt: int
    num_top_logprobs: int = 0
    eos_ids: frozenset[int] = frozenset()
    wants_experts: bool = False
    first_row: int = 0
    wants_support: bool = False
    has_media: bool = False


class VLLMReader:
    """One generation's reply, whole or event by event. Its last chunk waits for the usage, the last to come."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._num_ids = 0
        self._last: tuple[Chunk, VLLMTold] | None = None
        self._has_ended = False
        self._num_prompt = expected.num_prompt
        self._effective: EffectivePrompt | None = None

    def __repr__(self) -> str:
        return f"<VLLMReader {self._expected.route.name} {self._num_ids} ids>"

    def whole(self, body: bytes) -> Chunk:
        """The one chunk of a reply sent at once."""
        told = self._told(body)
        if not told.has_choice:
            raise UpstreamInvalid("one_choice", "one choice was asked for, none came")
        if told.finish_reason is None:
            raise UpstreamInvalid("has_finish", "the reply has no finish_reason")
        chunk = self._chunk(told, token_ids(told.ids), array("d", told.logprobs))
        return self._ended(chunk, told, told.usage)

    def event(self, data: bytes) -> Chunk | None:
        """The chunk of an event's data, if any."""
        told = self._told(data)
        if self._has_ended or (self._last is not None and told.has_choice):
            raise UpstreamInvalid("finish_is_last", "the engine went on after the event that ended the generation")
        if not told.has_choice:
            return self._usage(told)
        chunk = self._chunk(told, tuple(told.ids), tuple(told.logprobs))
        if chunk.finish is not None:
            self._last = (chunk, told)
            return None
        if not chunk.ids:
            return None
        effective, self._effective = self._effective, None  # once for a turn
        return chunk if effective is None else replace(chunk, effective=effective)

    def _usage(self, told: VLLMTold) -> Chunk | None:
        """The event after the last choice: the chunk held back can go."""
        if told.usage is None:
            return None  # nothing is said
        if self._last is not None:
            return self._ended(*self._last, told.usage)
        if self._num_ids or told.usage.completion_tokens:
            raise UpstreamInvalid("has_finish", "the engine reports the usage of a generation that has not ended")
        # The completions route says nothing else of a generation that was aborted before it sampled anything.
        aborted = Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
        return self._ended(aborted, told, told.usage)

    def _told(self, body: bytes) -> VLLMTold:
        told = read(self._expected.route, body, with_tops=self._expected.num_top_logprobs > 0)
        check_request(told.request_id, self._expected.request_id, self._expected.route)
        check_ids(told.ids, self._expected.vocab_size)
        if self._expected.has_media and told.effective is not None:
            check_ids(told.effective.ids, self._expected.vocab_size)
            self._effective, self._num_prompt = told.effective, len(told.effective.ids)
        return told

    def _chunk(self, told: VLLMTold, ids: Sequence[int], logprobs: Sequence[float]) -> Chunk:
        """A choice's chunk, without the fields of its end."""
        if len(ids) != len(logprobs):
            raise UpstreamInvalid("count_agrees", f"{len(ids)} ids, but {len(logprobs)} logprobs")
        if NO_LOGPROB in logprobs:
            id_ = ids[logprobs.index(NO_LOGPROB)]
            raise UpstreamInvalid("logprob_is_told", f"vLLM reported no logprob for sampled token {id_}")
        num_top = self._expected.num_top_logprobs
        tops = None if not num_top else tuple(_best(row, num_top, self._expected.vocab_size) for row in told.tops or ())
        if tops is not None and len(tops) != len(ids):
            raise UpstreamInvalid("count_agrees", f"{len(ids)} ids, but {len(tops)} rows of alternatives")
        self._num_ids += len(ids)
        finish = None if told.finish_reason is None else self._finish(told)
        if finish is not None and not self._num_ids and finish.reason is not FinishReason.ABORT:
            raise UpstreamInvalid("has_tokens", "the engine sampled no token, and did not report an abort")
        return Chunk(ids=ids, logprobs=logprobs, top_logprobs=tops, finish=finish)

    def _finish(self, told: VLLMTold) -> Finish:
        reason = _REASONS.get(told.finish_reason or "")
        if reason is None:
            raise UpstreamInvalid("finish_reason", f"unknown finish reason {(told.finish_reason or '')[:80]!r}")
        matched = told.stop_reason if reason is FinishReason.STOP else None
        if reason is FinishReason.STOP and matched is None and told.ids and told.ids[-1] in self._expected.eos_ids:
            matched = told.ids[-1]
        return Finish(reason=reason, matched=matched)

    def _ended(self, chunk: Chunk, told: VLLMTold, usage: EngineUsage | None) -> Chunk:
        """The last chunk of the generation, with the fields about all of it."""
        if usage is None:
            raise UpstreamInvalid("shape", "the reply has no usage")
        if usage.completion_tokens != self._num_ids:
            detail = f"{short(usage.completion_tokens)} completion tokens, but {self._num_ids} ids"
            raise UpstreamInvalid("count_agrees", detail)
        is_unknown = (
            self._expected.has_media and self._effective is None and not self._num_ids
        )  # ended before it was run
        if usage.prompt_tokens != self._num_prompt and not is_unknown:
            detail = f"the prompt has {self._num_prompt} ids, the engine reports {short(usage.prompt_tokens)}"
            raise UpstreamInvalid("prompt_agrees", detail)
        assert chunk.finish is not None
        self._has_ended = True
        return Chunk(
            ids=chunk.ids,
            logprobs=chunk.logprobs,
            support=self._support(told, chunk.ids),
            top_logprobs=chunk.top_logprobs,
            finish=chunk.finish,
            num_cached_tokens=usage.num_cached,
            weights=_weights(told.spans, self._num_ids),
            replay=self._replay(told.routed_experts, chunk.finish),
            effective=self._effective,
            unasked_replay=() if told.routed_experts is None or self._expected.wants_experts else ("routed_experts",),
        )

    def _support(self, told: VLLMTold, ids: Sequence[int]) -> SupportPiece | None:
        if not self._expected.wants_support or not ids:
            return None
        if told.supports is None or len(told.supports) != len(ids):
            raise UpstreamInvalid(
                "has_support",
                f"{len(ids)} ids, but supports of {len(told.supports or ())}; start vLLM with --return-sampling-mask"
                " (docs/engines.md)",
            )
        return support_piece(SupportWriter(self._expected.vocab_size), ids, told.supports)

    def _replay(self, told: str | None, finish: Finish) -> Replay | None:
        if not self._expected.wants_experts:
            return None
        if told is None:
            if finish.reason is FinishReason.ABORT:
                return None  # nothing was computed yet
            raise UpstreamInvalid(
                "has_routed_experts", "there are none; start vLLM with --enable-return-routed-experts (docs/engines.md)"
            )
        num_rows = self._num_prompt + self._num_ids - 1
        return experts_of_npy(told, num_rows=num_rows, first_row=self._expected.first_row)


def _best(row: Sequence[TopLogprob], num_top: int, vocab_size: int) -> tuple[TopLogprob, ...]:
    """The most likely alternatives of a position, of those reported by vLLM; the first is the sampled token."""
    check_ids((top.id for top in row), vocab_size)
    ranked = sorted((top for top in row if top.logprob != NO_LOGPROB), key=lambda top: -top.logprob)
    return tuple(ranked[:num_top])


def _weights(told: Sequence[VLLMSpan] | None, num_ids: int) -> tuple[WeightSpan, ...] | None:
    """The spans with tokens; None where vLLM does not report them, as on its completions route."""
    if told is None:
        return None
    end = 0
    for span in told:
        if span.start != end or span.end < end:
            raise UpstreamInvalid("weight_spans", f"after token {end} comes [{short(span.start)}, {short(span.end)})")
        end = span.end
    if end != num_ids:
        raise UpstreamInvalid("weight_spans", f"they cover {short(end)} of {num_ids} tokens")
    return tuple(
        WeightSpan(version=span.version, start=span.start, end=span.end) for span in told if span.start < span.end
    )


# -- routed experts

_NPY = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|\x02\x00....)"
    rb"\{'descr': '([<|][iu][124])', 'fortran_order': False, 'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \}[ ]*\n",
    re.DOTALL,
)
"""The head of a .npy file of integers in three dimensions. Source: numpy's `lib/format`."""


def experts_of_npy(text: str, *, num_rows: int, first_row: int = 0) -> Replay:
    """The experts of a .npy file: of `num_rows` rows those from `first_row` on, also where it has all of them, as sent
    by a vLLM unable to leave rows out. Raises UpstreamInvalid."""
    law = "routed_experts_shape"
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise UpstreamInvalid(law, f"they are not base64: {error}") from error
    head = _NPY.match(data)
    if head is None:
        raise UpstreamInvalid(law, f"they are no .npy file of integers in three dimensions: {data[:80]!r}")
    rows, layers, top_k = (int(size) for size in head.groups()[1:])
    values = data[head.end() :]
    dtype = np.dtype(head[1].decode())
    if rows not in (num_rows - first_row, num_rows) or len(values) != rows * layers * top_k * dtype.itemsize:
        detail = f"[{rows}, {layers}, {top_k}] in {len(values)} bytes for {num_rows} tokens, from {first_row} on"
        raise UpstreamInvalid(law, detail)
    new = np.frombuffer(values, dtype).reshape(rows, layers, top_k)[rows - (num_rows - first_row) :]
    return Replay(routed_experts=PackedInts.of(new), first_row=first_row)
