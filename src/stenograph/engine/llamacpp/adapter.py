"""The adapter of llama.cpp's `/completion`: always streamed, because hanging up is the only way to end it early. Pure.

Owns the laws between the events of one stream, beside those of wire.py:

    count_agrees            `tokens_predicted` never goes back, and the stream's end agrees with the events
    finish_reason           the end is one of eos, word, limit; a word is one of the request's
    has_tokens              an ended generation sampled a token
    grammar_held            a text ended by an end token under a JSON grammar is JSON
    repetition_agrees       tokens sampled again are the same

A token is in no event if the text after it ends within a UTF-8 character. From the first such gap on, everything is
held back until the stream has ended. Then `settle` reads the missing ids off the text; where the text is ambiguous, it
has the engine sample the same again (same seed) as one reply, with the ids. And it asks for the logprob of each after
the ids before it. Stop token ids are found here, since llama.cpp has none: the stream is left at the first.
"""

from collections.abc import Sequence
from dataclasses import replace

from stenograph.core.errors import UpstreamInvalid, UpstreamRefused
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    GrammarKind,
    LogprobsKind,
    LogprobsReport,
    RequestId,
    token_ids,
)
from stenograph.engine.base import Capabilities, GenerateRequest
from stenograph.engine.http.adapter import (
    AdapterOptions,
    Ask,
    Call,
    EngineAdapter,
    EngineReading,
    list_models,
    passed_through,
    told_too_long,
)
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.llamacpp.text import Pieces, is_json, pieces_of
from stenograph.engine.llamacpp.wire import (
    GRAMMARS,
    LONGEST_CONTEXT,
    TOO_LONG,
    EngineFailure,
    LlamaCppEvent,
    LlamaCppToken,
    decode_event,
    decode_model,
    decode_ranking,
    decode_reply,
    encode_ranking,
    encode_repetition,
    encode_request,
)

COMPLETION_PATH = "/completion"
ONE_REQUEST = (("connection", "close"),)
"""llama.cpp closes a connection after a stream, but says so only if asked to: the next request would fail."""
RANKING_SIZES = (64, 4096)
"""Numbers of likeliest tokens to ask for, one after the other, until one token is among them; then all."""


class LlamaCpp(EngineAdapter):
    """A llama.cpp server with the model of our files."""

    too_long = TOO_LONG
    names_requests = False
    probe_paths = ("/health",)

    def __init__(self, options: AdapterOptions, pieces: Pieces | None = None) -> None:
        """`pieces` are those of its tokenizer.json where they are left out. Raises StartupError as `pieces_of` does."""
        self._pieces = pieces or pieces_of(options.tokenizer_json, options.vocab_size)
        self._states_vocab_size = options.states_vocab_size
        self.capabilities = Capabilities(
            engine="llamacpp",
            model=options.model,
            vocab_size=options.vocab_size,
            max_context_tokens=None,
            grammars=GRAMMARS,
            streams=True,
            takes_json=True,
            logprobs=LogprobsReport(kind=options.logprobs or LogprobsKind.RAW),
        )

    def __repr__(self) -> str:
        return f"<LlamaCpp {self.capabilities.model}>"

    async def discover(self, ask: Ask) -> None:
        """The context of a slot, and whether the model's vocabulary is ours. Raises UpstreamInvalid if it is not."""
        reply = await list_models(ask)
        num_vocab, num_context = decode_model(reply.body)
        expected = self.capabilities.vocab_size
        is_other = num_vocab is not None and (
            num_vocab != expected if self._states_vocab_size else num_vocab < expected
        )
        if is_other:
            raise UpstreamInvalid(
                "vocab_agrees",
                f"its model has a vocabulary of {num_vocab}, that of {self.capabilities.model} is {expected}:"
                " it is another model",
            )
        found = expected if num_vocab is None else num_vocab
        if found > expected:
            self._pieces = self._pieces.padded(found)
        self.capabilities = replace(self.capabilities, vocab_size=found, max_context_tokens=num_context)

    def call(self, request: GenerateRequest) -> "tuple[Call, LlamaCppReading]":
        capabilities = self.capabilities
        body = encode_request(
            request, vocab_size=capabilities.vocab_size, max_context_tokens=capabilities.max_context_tokens
        )
        call = Call(path=COMPLETION_PATH, body=body, headers=ONE_REQUEST, streams=True)
        return call, LlamaCppReading(request, capabilities, self._pieces)

    def abort_call(self, request_id: RequestId) -> None:
        """There is none: the engine stops when its client closes the connection."""


class LlamaCppReading(EngineReading):
    """One stream. Tokens are counted from 0; `_held` has those after the first gap, by their place."""

    def __init__(self, request: GenerateRequest, capabilities: Capabilities, pieces: Pieces) -> None:
        self._request = request
        self._vocab_size = capabilities.vocab_size
        self._max_context_tokens = capabilities.max_context_tokens
        limit = capabilities.max_context_tokens or LONGEST_CONTEXT
        self._most_tokens = min(limit, request.params.max_tokens or limit)
        self._pieces = pieces
        self._texts: list[str] = []
        self._stop_ids = frozenset(request.params.stop_token_ids)
        self._ids = token_ids()
        self._held: dict[int, LlamaCppToken] = {}
        self._num_told = 0
        self._num_cached = 0
        self._last: LlamaCppEvent | None = None
        self._stopped_by: int | None = None

    def __repr__(self) -> str:
        return f"<LlamaCppReading {len(self._ids)} ids, {len(self._held)} held>"

    @property
    def has_enough(self) -> bool:
        """Whether the stream can be left: a stop token was sampled."""
        return self._stopped_by is not None

    def whole(self, http: HttpReply) -> Sequence[Chunk]:
        raise UpstreamInvalid("streams", f"a stream was asked for, and {http.content_type[:80]!r} came")

    def event(self, data: bytes) -> Sequence[Chunk]:
        """The event's tokens, unless a gap came before them. Raises UpstreamRefused for an error of the engine's."""
        num_prompt = self._request.prompt.num_tokens
        event = decode_event(data, vocab_size=self._vocab_size, num_prompt=num_prompt)
        if isinstance(event, EngineFailure):
            refused = told_too_long(data, TOO_LONG, num_prompt)
            raise refused or UpstreamRefused(
                status=event.status, content_type="application/json", headers=(), body=data
            )
        if self._last is not None:
            raise UpstreamInvalid("count_agrees", "the engine went on after its last event")
        self._texts.append(event.text)
        self._num_cached = self._num_cached if event.num_cached is None else event.num_cached
        if event.num_predicted is None:
            return ()
        if event.num_predicted > self._most_tokens:
            detail = f"there can be {self._most_tokens} tokens, tokens_predicted is more"
            raise UpstreamInvalid("count_agrees", detail)
        start = event.num_predicted - len(event.sampled)
        if start < self._num_told:
            detail = f"tokens_predicted is {event.num_predicted} after {self._num_told} tokens"
            raise UpstreamInvalid("count_agrees", detail)
        if event.stop_type is not None:
            self._last = event
        sampled = event.sampled[: self._find_stop(event.sampled)]
        self._num_told = start + len(sampled)
        if start == len(self._ids) and not self._held:
            return self._told(sampled)
        self._held |= {start + index: one for index, one in enumerate(sampled)}
        return ()

    async def settle(self, ask: Ask) -> Sequence[Chunk]:
        """The tokens from the first gap on, with those left out of the stream. Raises UpstreamError."""
        if len(self._ids) == self._num_told:
            return ()
        ids = self._read_off() or await self._sampled_again(ask)
        chunks: list[Chunk] = []
        for place in range(len(self._ids), self._num_told):
            sampled = self._held.get(place) or await self._ranked(ask, ids[place])
            chunks += self._told((sampled,))
            self._find_stop((sampled,))
            if sampled.id in self._stop_ids:
                break
        return chunks

    def end(self) -> Sequence[Chunk]:
        finish = self._finish()
        if finish is None:
            return ()
        if not self._ids:
            raise UpstreamInvalid("has_tokens", "the engine sampled no token")
        self._check_grammar()
        return (Chunk(ids=(), logprobs=(), finish=finish, num_cached_tokens=self._num_cached),)

    def _check_grammar(self) -> None:
        """llama.cpp samples without a schema if it cannot compile it; under a grammar in force, text ends in an end
        token."""
        grammar = self._request.params.grammar
        if grammar is None or grammar.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            return
        if self._stopped_by is None:
            has_ended = self._last is not None and self._last.stop_type == "eos"
        else:
            has_ended = self._pieces.is_silent(self._stopped_by)
        text = self._pieces.text(self._ids[:-1]) if has_ended else None
        if text is not None and not is_json(text):
            raise UpstreamInvalid("grammar_held", f"JSON was asked for, but the engine ended after {text[:80]!r}")

    def _told(self, sampled: Sequence[LlamaCppToken]) -> Sequence[Chunk]:
        """Tokens as a chunk, if there are any."""
        if not sampled:
            return ()
        self._ids.extend(one.id for one in sampled)
        num_top = self._request.params.num_top_logprobs
        return (
            Chunk(
                ids=tuple(one.id for one in sampled),
                logprobs=tuple(one.logprob for one in sampled),
                top_logprobs=tuple(one.top[:num_top] for one in sampled) if num_top else None,
                num_cached_tokens=self._num_cached,
            ),
        )

    def _find_stop(self, sampled: Sequence[LlamaCppToken]) -> int:
        """Number of the turn's tokens: up to and with the first stop token. Remembers it."""
        for index, one in enumerate(sampled):
            if one.id in self._stop_ids:
                self._stopped_by = one.id
                return index + 1
        return len(sampled)

    def _read_off(self) -> Sequence[int] | None:
        """All ids, the missing ones by their text; None where the text is ambiguous."""
        text = "".join(self._texts)
        if self._last is not None and self._last.stop_type == "word":
            text += self._last.stopping_word
        held = (self._held.get(place) for place in range(len(self._ids), self._num_told))
        tokens = [*self._ids, *(None if one is None else one.id for one in held)]
        return self._pieces.fill(tokens, text.encode("utf-8", "surrogatepass"))

    async def _sampled_again(self, ask: Ask) -> Sequence[int]:
        """The ids of the same generation, up to and with the token after the last gap."""
        last_gap = max(set(range(len(self._ids), self._num_told)) - set(self._held))
        num = min(last_gap + 2, self._num_told)
        body = encode_repetition(
            self._request, num, vocab_size=self._vocab_size, max_context_tokens=self._max_context_tokens
        )
        http = await self._asked(ask, body)
        reply = decode_reply(http.body, vocab_size=self._vocab_size, num_prompt=self._request.prompt.num_tokens)
        known = {**dict(enumerate(self._ids)), **{place: sampled.id for place, sampled in self._held.items()}}
        if len(reply.ids) != num or any(reply.ids[place] != id_ for place, id_ in known.items() if place < num):
            raise UpstreamInvalid(
                "repetition_agrees",
                "the stream left out tokens that end within a character; sampled again, the others are not the same",
            )
        return reply.ids

    async def _ranked(self, ask: Ask, id_: int) -> LlamaCppToken:
        """A token missing from all events, with its logprob after the ids before it."""
        prompt = self._request.prompt
        for num_top in (*(size for size in RANKING_SIZES if size < self._vocab_size), self._vocab_size):
            http = await self._asked(ask, encode_ranking(prompt, self._ids, num_top))
            num_prompt = prompt.num_tokens + len(self._ids)
            ranking = decode_ranking(http.body, vocab_size=self._vocab_size, num_prompt=num_prompt)
            for top in ranking:
                if top.id == id_:
                    return LlamaCppToken(id=id_, logprob=top.logprob, top=ranking)
        raise UpstreamInvalid("has_logprobs", f"the engine does not report the logprob of sampled token {id_}")

    async def _asked(self, ask: Ask, body: bytes) -> HttpReply:
        http = await ask("POST", COMPLETION_PATH, body)
        if http.status != 200:
            raise passed_through(http)
        return http

    def _finish(self) -> Finish | None:
        if self._stopped_by is not None:
            return Finish(reason=FinishReason.STOP, matched=self._stopped_by)
        if self._last is None:
            return None
        match self._last.stop_type:
            case "eos":
                return Finish(reason=FinishReason.STOP, matched=self._ids[-1] if self._ids else None)
            case "word" if self._last.stopping_word in self._request.params.stop:
                return Finish(reason=FinishReason.STOP, matched=self._last.stopping_word)
            case "limit":
                return Finish(reason=FinishReason.LENGTH)
            case other:
                told = f"{other} {self._last.stopping_word!r}"[:80]
                raise UpstreamInvalid("finish_reason", f"unknown, or not asked for: {told}")
