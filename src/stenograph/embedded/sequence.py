"""One request inside the engine: the tokens it has sampled, and when it ends.

Owns a request's sampler, guide, stop strings and ids, and holds the table of its KV while it runs. It may run, be
preempted (its table goes, everything else stays) and run again. Knows nothing of its batch.
"""

from array import array
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stenograph.core.logprobs import has_support
from stenograph.core.replay import PackedInts, Replay
from stenograph.core.support import SupportWriter
from stenograph.core.types import Chunk, Finish, FinishReason, RequestId, SamplingParams, TopLogprob
from stenograph.embedded.forward.base import LogitsFor, Routes, RowSpan, Segment
from stenograph.embedded.forward.weights import F32Array
from stenograph.embedded.grammar.base import CompiledGrammar
from stenograph.embedded.grammar.guide import Guide
from stenograph.embedded.kv.block_pool import BlockTable
from stenograph.embedded.sampler import (
    Allowed,
    BadLogits,
    SampledToken,
    TokenSampler,
    log_sum_exp,
    top_logprobs,
)
from stenograph.embedded.wire import Times

if TYPE_CHECKING:
    from stenograph.model.tokenizer import TextStream


class StopWatcher:
    """Finds stop strings in text, across the borders of its pieces.

    One completed by the first `min_tokens` tokens is text, and is passed over. `text` is read where there are any.
    """

    def __init__(self, stops: tuple[str, ...], text: "TextStream | None", *, min_tokens: int = 0) -> None:
        self._stops = stops
        self._num_passed_over = min_tokens
        self._text = text
        self._tail = ""
        self._keep = max(map(len, stops), default=1) - 1

    def push(self, token_id: int) -> str | None:
        """The stop string completed by this token: the first to begin, then the longest."""
        if self._text is None or not self._stops:
            return None
        num_before = len(self._tail)
        seen = self._tail + self._text.push(token_id)
        if self._num_passed_over:
            self._num_passed_over -= 1
        elif found := [
            (at, -len(stop), stop)
            for stop in self._stops
            if (at := seen.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]:
            return min(found)[2]
        self._tail = seen[-self._keep :] if self._keep else ""
        return None


class Sequence:
    """A request, from its tokens on."""

    def __init__(
        self,
        *,
        request_id: RequestId,
        arrival: int,
        prompt: "array[int]",
        params: SamplingParams,
        max_tokens: int,
        eos_ids: frozenset[int],
        grammar: "Future[CompiledGrammar] | None",
        text: "TextStream | None",
        times: Times,
        vocab_size: int,
        routes_from: int | None = None,
    ) -> None:
        """`routes_from`: the first position with its experts collected in `routes`; None: none are."""
        self.request_id = request_id
        self.arrival = arrival
        self.grammar = grammar
        self.times = times
        self.ids = prompt[:]
        self.table: BlockTable | None = None
        self.guide: Guide | None = None
        self.num_cached_tokens = 0
        self.cached_from: str | None = None
        own_stops = frozenset(params.stop_token_ids)
        self._stop_ids = own_stops if params.ignore_eos else own_stops | eos_ids
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._sampler = TokenSampler(params, prompt)
        self._support = SupportWriter(vocab_size) if params.support and has_support(params) else None
        self._wants_top = params.num_top_logprobs > 0
        self._stops = StopWatcher(params.stop, text, min_tokens=params.min_tokens)
        self._num_sampled = 0
        self._routes_from = routes_from
        self._routes: list[Routes] = []

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self._num_sampled} sampled, {len(self.ids)} tokens, {self.num_filled} in KV>"
        )

    @property
    def num_filled(self) -> int:
        """Tokens with computed keys and values; 0 while it waits."""
        return 0 if self.table is None else self.table.num_filled

    @property
    def num_pending(self) -> int:
        """Tokens not in the KV yet: one while it decodes, more in prefill."""
        return len(self.ids) - self.num_filled

    @property
    def findable_ids(self) -> "array[int]":
        """The ids to look up in the KV; the last one is computed in any case."""
        return self.ids

    @property
    def is_ready(self) -> bool:
        """Whether its grammar, if it has one, has been compiled or refused."""
        return self.grammar is None or self.grammar.done()

    def segment(self, num_tokens: int) -> Segment:
        """Its next `num_tokens` for the forward; its table has rows for them; logits for the last, if all are in."""
        assert self.table is not None, "only a running sequence is computed"
        start, end = self.num_filled, self.num_filled + num_tokens
        return Segment(
            ids=np.array(self.ids[start:end], np.intc),
            start=start,
            spans=self.table.spans(end),
            logits_for=LogitsFor.LAST if end == len(self.ids) else LogitsFor.NONE,
        )

    def restart(self) -> None:
        """Other weights compute from now on; sampled tokens stay."""
        return

    def advance(self, rows: F32Array, start: int, now: float, *, weight_version: str) -> Chunk | None:
        """Take the logits [n, V] of a segment from position `start` on: the last ones sample. Raises as `sample`."""
        return self.sample(rows[-1], now, weight_version=weight_version)

    def sample(self, logits: F32Array, now: float, *, weight_version: str) -> Chunk:
        """Sample the next token from `logits` [V]. Raises DeadEnd, BadLogits and BadGrammar, for this request alone.

        Where no token is the end, a finished grammar ends the request by itself, with a chunk of no tokens.
        """
        if self.guide is not None and not self._eos_ids and self.guide.is_finished:
            return self._without_tokens(FinishReason.STOP)
        allowed = None if self.guide is None else self.guide.mask()
        forced = None if allowed is None else (int(np.count_nonzero(allowed)) == 1,)
        if self._num_sampled < self._min_tokens:
            allowed = self._without_stops(allowed, len(logits))
        sampled = self._sampler.sample(logits, allowed)
        self._num_sampled += 1
        self.times.first_token = self.times.first_token or now
        self.ids.append(sampled.id)
        top: tuple[tuple[TopLogprob, ...], ...] | None = (sampled.top,) if self._wants_top else None
        finish = self._finish_after(sampled)
        if finish is None and self.guide is not None:
            self.guide.accept(sampled.id)
        return Chunk(
            ids=(sampled.id,),
            logprobs=(sampled.logprob,),
            tempered_logprobs=None if sampled.tempered_logprob is None else (sampled.tempered_logprob,),
            sampling_logprobs=(sampled.sampling_logprob,),
            forced=forced,
            support=None if self._support is None else self._support.write(sampled.id, sampled.support),
            top_logprobs=top,
            finish=finish,
            num_cached_tokens=self.num_cached_tokens,
            weight_version=weight_version,
        )

    def unreported_rows(self) -> tuple[RowSpan, ...]:
        """The rows used to compute the token just sampled and not yet reported: at first those of all positions from
        the requested one on, then the last position's, whatever was computed again meanwhile."""
        if self._routes_from is None or self.table is None:
            return ()
        first = self._routes_from if self._num_sampled == 1 else len(self.ids) - 2
        return self.table.spans(len(self.ids) - 1, first)

    def report(self, routes: Routes | None) -> None:
        """Take the experts of `unreported_rows`; None: the model has none."""
        if routes is not None:
            self._routes.append(routes)

    def replay(self) -> Replay | None:
        """The experts of all positions used to compute a token, from the requested one on; None if there are none."""
        if not self._routes or self._routes_from is None:
            return None
        return Replay(routed_experts=PackedInts.of(np.concatenate(self._routes)), first_row=self._routes_from)

    def _without_stops(self, allowed: Allowed | None, vocab_size: int) -> Allowed | None:
        """The ids [V] open to sampling while none may end the turn: `allowed` (None: all) less the ending ones.

        If a grammar allows nothing else, it has come to its end, and so has the turn.
        """
        if not self._stop_ids:
            return allowed
        going_on = np.ones(vocab_size, np.bool_) if allowed is None else allowed.copy()
        going_on[list(self._stop_ids)] = False
        return going_on if allowed is None or going_on.any() else allowed

    def aborted(self) -> Chunk:
        """The last chunk of an aborted request."""
        return self._without_tokens(FinishReason.ABORT)

    def _without_tokens(self, reason: FinishReason) -> Chunk:
        finish = Finish(reason=reason)
        return Chunk(ids=(), logprobs=(), finish=finish, num_cached_tokens=self.num_cached_tokens)

    def _finish_after(self, sampled: SampledToken) -> Finish | None:
        # The end of a grammar ends the request even where eos is ignored: nothing else can follow.
        ends_grammar = self.guide is not None and sampled.id in self._eos_ids
        if sampled.id in self._stop_ids or ends_grammar:
            return Finish(reason=FinishReason.STOP, matched=sampled.id)
        if (stop := self._stops.push(sampled.id)) is not None:
            return Finish(reason=FinishReason.STOP, matched=stop)
        if self._num_sampled >= self._max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None


class ForcedSequence(Sequence):
    """A request with all its tokens given: those from `start` on get their log-probabilities, in one chunk at its end.

    It survives a preemption with its results; other weights begin it anew, so all are of the same.
    """

    def __init__(
        self,
        *,
        request_id: RequestId,
        arrival: int,
        line: "array[int]",
        start: int,
        params: SamplingParams,
        times: Times,
        vocab_size: int,
    ) -> None:
        super().__init__(
            request_id=request_id,
            arrival=arrival,
            prompt=line[:-1],  # nothing comes after the last: it needs no logits
            params=params,
            max_tokens=1,
            eos_ids=frozenset(),
            grammar=None,
            text=None,
            times=times,
            vocab_size=vocab_size,
        )
        self._line = line
        self._start = start
        self._num_top = params.num_top_logprobs
        self._logprobs: list[float] = []
        self._tops: list[tuple[TopLogprob, ...]] = []

    @property
    def findable_ids(self) -> "array[int]":
        """The ids before the next one to be scored: its logits are those of the one before it."""
        return self._line[: self._start + len(self._logprobs)]

    def segment(self, num_tokens: int) -> Segment:
        plain = super().segment(num_tokens)
        has_scored = plain.start + num_tokens >= self._start
        return replace(plain, logits_for=LogitsFor.ALL if has_scored else LogitsFor.NONE)

    def restart(self) -> None:
        self._logprobs.clear()
        self._tops.clear()

    def advance(self, rows: F32Array, start: int, now: float, *, weight_version: str) -> Chunk | None:
        """Score the tokens after those of a segment; the one chunk follows the last. Raises BadLogits."""
        first = self._start + len(self._logprobs) - 1 - start
        for place, row in enumerate(rows[first:], start=start + first + 1):
            exact = row.astype(np.float64)
            ln_total = log_sum_exp(exact)
            if not np.isfinite(ln_total):
                raise BadLogits
            self._logprobs.append(float(exact[self._line[place]]) - ln_total)
            if self._num_top:
                self._tops.append(top_logprobs(exact, ln_total, self._num_top))
        if self.num_pending:
            return None
        self.times.first_token = now
        return Chunk(
            ids=tuple(self._line[self._start :]),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._tops) if self._num_top else None,
            finish=Finish(reason=FinishReason.LENGTH),
            num_cached_tokens=self.num_cached_tokens,
            weight_version=weight_version,
        )
