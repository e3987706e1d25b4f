"""One request inside the engine: what it has drawn, and when it ends.

Owns a request's sampler, guide, stop strings and ids, and holds the table of its KV while it runs. It may run, be
preempted (its table goes, everything else stays) and run again. Knows nothing of the batch that it is in.
"""

from array import array
from concurrent.futures import Future

import numpy as np

from stenograph.core.types import Chunk, Finish, FinishReason, RequestId, SamplingParams, TopLogprob
from stenograph.embedded.block_pool import BlockTable
from stenograph.embedded.forward import LogitsFor, Segment
from stenograph.embedded.grammar_base import CompiledGrammar
from stenograph.embedded.guide import Guide
from stenograph.embedded.sampler import Drawn, Sampler
from stenograph.embedded.times import Times
from stenograph.embedded.weights import F32Array
from stenograph.render.tokenizer import TextStream


class StopWatcher:
    """Finds stop strings in text that comes in pieces, across their borders."""

    def __init__(self, stops: tuple[str, ...], text: TextStream) -> None:
        self._stops = stops
        self._text = text
        self._tail = ""
        self._keep = max(map(len, stops), default=1) - 1

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes: the one that begins first, then the longest."""
        if not self._stops:
            return None
        seen = self._tail + self._text.push(token_id)
        found = [(at, -len(stop), stop) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
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
        text: TextStream,
        times: Times,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.grammar = grammar
        self.times = times
        self.ids = prompt[:]
        self.table: BlockTable | None = None
        self.guide: Guide | None = None
        self.num_cached_tokens = 0
        own_stops = frozenset(params.stop_token_ids)
        self._stop_ids = own_stops if params.ignore_eos else own_stops | eos_ids
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._sampler = Sampler(params, prompt)
        self._wants_top = params.num_top_logprobs > 0
        self._stops = StopWatcher(params.stop, text)
        self._num_drawn = 0

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id} {self._num_drawn} drawn, {len(self.ids)} tokens, {self.num_filled} in KV>"

    @property
    def num_filled(self) -> int:
        """Tokens whose keys and values are computed; 0 while it waits."""
        return 0 if self.table is None else self.table.num_filled

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the KV yet: one while it decodes, more in prefill."""
        return len(self.ids) - self.num_filled

    @property
    def is_ready(self) -> bool:
        """Whether its grammar, if it has one, has been compiled or refused."""
        return self.grammar is None or self.grammar.done()

    def segment(self, num_tokens: int) -> Segment:
        """Its next `num_tokens` for the forward, for which its table has room; logits for the last, if all are in."""
        assert self.table is not None, "only a running sequence is computed"
        start, end = self.num_filled, self.num_filled + num_tokens
        return Segment(
            ids=np.array(self.ids[start:end], np.intc),
            start=start,
            spans=self.table.spans(end),
            logits_for=LogitsFor.LAST if end == len(self.ids) else LogitsFor.NONE,
        )

    def draw(self, logits: F32Array, now: float, *, weight_version: str) -> Chunk:
        """Draw the next token from `logits` [V]. Raises DeadEnd, BadLogits and BadGrammar, for this request alone.

        Where no token is the end, a finished grammar ends the request by itself, with a chunk of no tokens.
        """
        if self.guide is not None and not self._eos_ids and self.guide.is_finished:
            return self._without_tokens(FinishReason.STOP)
        allowed = None if self.guide is None else self.guide.mask()
        drawn = self._sampler.draw(logits, allowed)
        self._num_drawn += 1
        self.times.first_token = self.times.first_token or now
        self.times.tokens.append(now)
        self.ids.append(drawn.id)
        top: tuple[tuple[TopLogprob, ...], ...] | None = (drawn.top,) if self._wants_top else None
        finish = self._finish_after(drawn)
        if finish is None and self.guide is not None:
            self.guide.accept(drawn.id)
        return Chunk(
            ids=(drawn.id,),
            logprobs=(drawn.logprob,),
            sampling_logprobs=(drawn.sampling_logprob,),
            top_logprobs=top,
            finish=finish,
            num_cached_tokens=self.num_cached_tokens,
            weight_version=weight_version,
        )

    def aborted(self) -> Chunk:
        """The chunk that ends this request because somebody asked for it."""
        return self._without_tokens(FinishReason.ABORT)

    def _without_tokens(self, reason: FinishReason) -> Chunk:
        finish = Finish(reason=reason)
        return Chunk(ids=(), logprobs=(), finish=finish, num_cached_tokens=self.num_cached_tokens)

    def _finish_after(self, drawn: Drawn) -> Finish | None:
        # The end of a grammar ends the request even where eos is ignored: nothing else can follow.
        ends_grammar = self.guide is not None and drawn.id in self._eos_ids
        if drawn.id in self._stop_ids or ends_grammar:
            return Finish(reason=FinishReason.STOP, matched=drawn.id)
        if (stop := self._stops.push(drawn.id)) is not None:
            return Finish(reason=FinishReason.STOP, matched=stop)
        if self._num_drawn >= self._max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None
