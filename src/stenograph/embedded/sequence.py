"""One request inside the engine: what it has drawn, and when it ends.

Owns a request's sampler, grammar, text and KV. Knows nothing of the batch that it is in.
"""

from array import array
from dataclasses import dataclass

from stenograph.core.types import Chunk, EngineTimes, Finish, FinishReason, RequestId, SamplingParams, TopLogprob
from stenograph.embedded.grammar import GrammarState
from stenograph.embedded.kvcache import SequenceKv
from stenograph.embedded.sampler import Drawn, Sampler
from stenograph.embedded.weights import F32Array
from stenograph.render.tokenizer import TextStream


@dataclass(slots=True, kw_only=True)
class Times:
    """Monotonic seconds at which a request passed each point; 0.0 until it has."""

    submitted: float
    admitted: float = 0.0
    first_token: float = 0.0


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
    """A running request."""

    def __init__(
        self,
        *,
        request_id: RequestId,
        prompt: "array[int]",
        params: SamplingParams,
        max_tokens: int,
        eos_ids: frozenset[int],
        grammar: GrammarState | None,
        text: TextStream,
        kv: SequenceKv,
        times: Times,
    ) -> None:
        self.request_id = request_id
        self.kv = kv
        self.times = times
        self.num_cached_tokens = kv.length
        self.ids = prompt[:]
        self._max_tokens = max_tokens
        own_stops = frozenset(params.stop_token_ids)
        self._stop_ids = own_stops if params.ignore_eos else own_stops | eos_ids
        self._eos_ids = eos_ids
        self._sampler = Sampler(params, prompt)
        self._wants_top = params.num_top_logprobs > 0
        self._grammar = grammar
        self._stops = StopWatcher(params.stop, text)
        self._num_drawn = 0

    def __repr__(self) -> str:
        return f"<Sequence {self.request_id} {self._num_drawn} drawn, {self.num_pending} pending>"

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the KV yet."""
        return len(self.ids) - self.kv.length

    def draw(self, logits: F32Array, now: float, *, weight_version: str) -> Chunk:
        """Draw the next token from `logits` [V]. Raises DeadEnd and BadGrammar, for this request alone."""
        allowed = None if self._grammar is None else self._grammar.allowed()
        drawn = self._sampler.draw(logits, allowed)
        self._num_drawn += 1
        if self._num_drawn == 1:
            self.times.first_token = now
        finish = self._finish_after(drawn)
        self.ids.append(drawn.id)
        top: tuple[tuple[TopLogprob, ...], ...] | None = (drawn.top,) if self._wants_top else None
        return Chunk(
            ids=(drawn.id,),
            logprobs=(drawn.logprob,),
            sampling_logprobs=(drawn.sampling_logprob,),
            top_logprobs=top,
            finish=finish,
            num_cached_tokens=self.num_cached_tokens,
            times=None if finish is None else self._engine_times(now),
            weight_version=weight_version,
        )

    def aborted(self, now: float) -> Chunk:
        """The chunk that ends this request because somebody asked for it."""
        return Chunk(
            ids=(),
            logprobs=(),
            finish=Finish(reason=FinishReason.ABORT),
            num_cached_tokens=self.num_cached_tokens,
            times=self._engine_times(now),
        )

    def _finish_after(self, drawn: Drawn) -> Finish | None:
        # The end of a grammar ends the request even where eos is ignored: nothing else can follow.
        ends_grammar = self._grammar is not None and drawn.id in self._eos_ids
        if drawn.id in self._stop_ids or ends_grammar:
            return Finish(reason=FinishReason.STOP, matched=drawn.id)
        if self._grammar is not None:
            self._grammar.accept(drawn.id)
        if (stop := self._stops.push(drawn.id)) is not None:
            return Finish(reason=FinishReason.STOP, matched=stop)
        if self._num_drawn >= self._max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return None

    def _engine_times(self, now: float) -> EngineTimes:
        times = self.times
        return EngineTimes(
            submitted=times.submitted,
            admitted=times.admitted or now,
            first_token=times.first_token or now,
            finished=now,
        )
