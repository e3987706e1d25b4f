"""The values passed between the rooms: prompts, sampling parameters, chunks, sampled turns.

All are frozen, and an invalid one cannot be made. Nothing in one refers back to it, so the garbage collector, made for
cycles, tracks none of them (`gc=False`). Token ids are `array('i')` (int32): four bytes an id, and prefixes compare
without making objects. Arrays are mutable; only the function that built one may change it.
"""

import enum
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NewType

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from stenograph.core.loaded import entry
from stenograph.core.messages import MediaItem, Message, ReplyDelta, whole_delta
from stenograph.core.replay import Replay

SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)

ID_TYPECODE = "i"
"""`array` type code of token ids: a C int, 32 bits on every platform of CPython."""


token_ids: "partial[array[int]]" = partial(array, ID_TYPECODE)
"""Makes an id array of ids, or an empty one. Raises OverflowError or TypeError for anything but an int32."""


class GrammarKind(enum.StrEnum):
    """Languages of `Grammar.source`."""

    JSON_OBJECT = "json_object"
    """Any JSON object; `source` is empty."""
    JSON_SCHEMA = "json_schema"
    """`source` is a JSON Schema as JSON text."""
    REGEX = "regex"
    """`source` is a regular expression, to be matched by the whole output."""
    CHOICE = "choice"
    """`source` is a JSON list of strings; the output is one of them."""
    LARK = "lark"
    """`source` is a grammar in llguidance's Lark dialect: `start: …`."""
    EBNF = "ebnf"
    """`source` is a grammar in GBNF, the EBNF of most engines: `root ::= …`."""


class Grammar(Struct, frozen=True, kw_only=True, gc=False):
    """A constraint on the sampled text. Equal grammars compile to the same automaton, so it may be a cache key."""

    kind: GrammarKind
    source: str = ""


class RepetitionOver(enum.StrEnum):
    """The tokens that a `repetition_penalty` counts: an engine's rule."""

    LINE = "line"
    """All before: those of the prompt and the turn's own."""
    TURN = "turn"
    """The turn's own alone."""


class SamplingParams(Struct, frozen=True, kw_only=True, gc=False):
    """The parameters of sampling. Defaults sample from the model's own distribution, to the end of the context.

    `temperature` 0 is greedy; `top_k` 0 is off; `logit_bias` pairs are `(id, bias in nats)`; `num_top_logprobs` asks
    for so many alternatives per position, `support` for the ids that could be sampled at each. `repetition_over` is not
    asked for: it names the tokens counted by the engine's `repetition_penalty`. `max_tokens` None means as far as the
    context allows. Nothing ends a turn before `min_tokens` are sampled: until then stop tokens, the model's own among
    them, cannot be sampled, and a stop string complete by then is text like any other; but where a grammar allows
    nothing but its end, it ends.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repetition_over: RepetitionOver = RepetitionOver.LINE
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    num_top_logprobs: int = 0
    support: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ParamOutOfRange("temperature", "in [0, 100]", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise ParamOutOfRange("top_p", "in (0, 1]", self.top_p)
        if not 0 <= self.top_k < 2**31:
            raise ParamOutOfRange("top_k", "in [0, 2^31)", self.top_k)
        if not 0.0 <= self.min_p <= 1.0:
            raise ParamOutOfRange("min_p", "in [0, 1]", self.min_p)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ParamOutOfRange("seed", "a 64-bit integer", self.seed)
        if not all(self.stop):
            raise ParamOutOfRange("stop", "non-empty strings", self.stop)
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise ParamOutOfRange("presence_penalty", "in [-2, 2]", self.presence_penalty)
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise ParamOutOfRange("frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ParamOutOfRange("repetition_penalty", "in [0.01, 100]", self.repetition_penalty)
        if not 0 <= self.num_top_logprobs <= 20:
            raise ParamOutOfRange("top_logprobs", "in [0, 20]", self.num_top_logprobs)
        self._check_lengths()
        if self.stop_token_ids or self.logit_bias:
            self._check_ids()

    def _check_lengths(self) -> None:
        limit = self.max_tokens
        if limit is not None and not 1 <= limit < 2**31:
            raise ParamOutOfRange("max_tokens", "in [1, 2^31)", limit)
        if not 0 <= self.min_tokens < 2**31:
            raise ParamOutOfRange("min_tokens", "in [0, 2^31)", self.min_tokens)
        if limit is not None and self.min_tokens > limit:
            raise ParamOutOfRange("min_tokens", f"at most max_tokens, {limit}", self.min_tokens)

    def _check_ids(self) -> None:
        for id_ in self.stop_token_ids:
            if not 0 <= id_ < 2**31:
                raise ParamOutOfRange("stop_token_ids", "token ids", id_)
        for id_, bias in self.logit_bias:
            if not 0 <= id_ < 2**31:
                raise ParamOutOfRange("logit_bias", "of token ids", id_)
            if not -100.0 <= bias <= 100.0:
                raise ParamOutOfRange("logit_bias", "of biases in [-100, 100]", bias)

    def foreign_id(self, vocab_size: int) -> tuple[str, int] | None:
        """The first id outside a vocabulary of this size, after the name of its field."""
        fields = {"stop_token_ids": self.stop_token_ids, "logit_bias": [id_ for id_, _ in self.logit_bias]}
        return next(((name, id_) for name, ids in fields.items() for id_ in ids if id_ >= vocab_size), None)


class ParamOutOfRange(ValueError):
    """A sampling parameter is outside its range. `name` is the field's name as clients write it."""

    def __init__(self, name: str, expected: str, actual: object) -> None:
        super().__init__(f"{name} must be {expected}, got {actual!r}")
        self.name = name


class FinishReason(enum.StrEnum):
    """The reason for a turn's end, in OpenAI's words. `tool_calls` is a view that the protocol makes of `STOP`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Finish(Struct, frozen=True, kw_only=True, gc=False):
    """The reason why a turn ended, and the match: the stop token's id, the stop string, or nothing."""

    reason: FinishReason
    matched: int | str | None = None


class LogprobsKind(enum.StrEnum):
    """Distributions under which a sampled token has a log-probability."""

    RAW = "raw"
    """The softmax of the model's logits."""
    TEMPERED = "tempered"
    """The softmax of the logits divided by the temperature, with nothing cut off. At temperature 0 there is none."""
    SAMPLING = "sampling"
    """The distribution sampled from: after constraints (penalties, biases, a grammar), temperature, cuts."""
    OTHER = "other"
    """None of these: after some of the steps of sampling and before others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsReport:
    """An engine's declaration of its log-probabilities.

    `after_constraints`: it takes them after penalties, biases and grammars, whatever their kind.
    """

    kind: LogprobsKind = LogprobsKind.RAW
    after_constraints: bool = False


RAW_LOGPROBS = LogprobsReport()


class TopLogprob(Struct, frozen=True, kw_only=True, gc=False):
    """One alternative at a position: `logprob` is ln p(id) in nats under the distribution reported by the engine."""

    id: int
    logprob: float


class WeightSpan(Struct, frozen=True, kw_only=True, gc=False):
    """Tokens `[start, end)` of a turn were sampled by weights `version`."""

    version: str
    start: int
    end: int


class MixedWeights(Struct, frozen=True, kw_only=True, gc=False):
    """A turn's weights changed while it was sampled. `oldest` are those at its beginning, None if they have no name."""

    oldest: str | None


class EngineTimes(Struct, frozen=True, kw_only=True, gc=False):
    """Times of the engine's steps, in seconds of the machine's monotonic clock (one zero for all processes)."""

    submitted: float
    admitted: float
    first_token: float
    finished: float


_OF_THE_BYTES = frozenset({"etag", "content-md5", "content-digest", "repr-digest", "digest"})


class EngineReply(Struct, frozen=True, kw_only=True, gc=False):
    """A whole reply as its engine wrote it, for a client that gets it unchanged.

    `body` goes out byte for byte, under `content_type` and `headers` (end-to-end ones only, lower-case names).
    `message` is its content: the engine has parsed its own text, and the client will send this back. The client knows
    the reply by `id`, the reply's own.
    """

    id: str
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...]
    message: Message

    @property
    def delta(self) -> ReplyDelta:
        """All of it as one piece of a stream."""
        return whole_delta(self.message)

    def with_body(self, body: bytes) -> "EngineReply":
        """Another copy of it, without the headers true of the engine's own bytes alone."""
        if body is self.body:
            return self
        headers = tuple(pair for pair in self.headers if pair[0] not in _OF_THE_BYTES)
        return replace(self, body=body, headers=headers)


class WrittenPiece(Struct, frozen=True, kw_only=True, gc=False):
    """A piece of a reply written by its engine during sampling, before the ids of its `num_tokens` are known."""

    id: str
    delta: ReplyDelta
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportPiece:
    """The supports of consecutive tokens of a turn, in three columns."""

    heads: bytes
    gaps: bytes
    sets: bytes


class MediaRange(Struct, frozen=True, kw_only=True, gc=False):
    """`length` effective ids from `start` stand for one medium."""

    start: int
    length: int


class EffectivePrompt(Struct, frozen=True, kw_only=True, gc=False):
    """The prompt of the model's forward pass, as its engine reports it: each placeholder replaced by a range of ids."""

    ids: Sequence[int]
    ranges: tuple[MediaRange, ...]


class Chunk(Struct, frozen=True, kw_only=True, gc=False):
    """A step of a generation: the ids sampled since the last chunk, in order.

    `logprobs[i]` is ln p(ids[i]) in nats under the distribution declared by the engine's capabilities.
    `tempered_logprobs` and `sampling_logprobs` are the same under the distributions of those names (`LogprobsKind`),
    from an engine with several; None where it reports one, or where they are equal to `logprobs` by definition.
    `forced[i]`: a grammar left no other token to sample; None where it is not reported. `support`: the ids that could
    be sampled beside each; None where it was not asked for, or is not reported. Few tokens come as tuples, a whole
    reply's as arrays (int32, float64). `finish` is set in the last chunk of a generation, and only there, and so are
    `reply`, where the engine wrote the client's reply itself, and `replay`. `weight_version` sampled this chunk's ids,
    or (`is_version_of_reply`) is the engine's one version for the whole reply, when it wrote it; an engine that reports
    its weights only at the end has them in the last chunk's `weights`, over all ids of the turn. `mixed`, in the last:
    they changed since the beginning, at unknown ids. An engine that streams the client's reply has `written` in each
    chunk, and all ids in the last. `unasked_replay` names the unrequested payloads of `Replay`; they are left out.
    `cached_from`, in the last, names the weights that computed the cached tokens, from an engine that keeps its cache
    apart by itself. `effective` comes once, for a prompt with media.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    tempered_logprobs: Sequence[float] | None = None
    sampling_logprobs: Sequence[float] | None = None
    forced: Sequence[bool] | None = None
    support: SupportPiece | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None = None
    finish: Finish | None = None
    num_cached_tokens: int = 0
    times: EngineTimes | None = None
    weight_version: str | None = None
    is_version_of_reply: bool = False
    weights: tuple[WeightSpan, ...] | None = None
    mixed: MixedWeights | None = None
    reply: EngineReply | None = None
    written: WrittenPiece | None = None
    replay: Replay | None = None
    unasked_replay: tuple[str, ...] = ()
    cached_from: str | None = None
    effective: EffectivePrompt | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the last chunk, with or without known ids."""
        return len(self.ids) if self.written is None else self.written.num_tokens


def all_finite(values: "array[float]") -> bool:
    """Whether there is no NaN and no infinity among them."""
    if len(values) < 300 and math.isfinite(sum(values)):  # NumPy's one look costs more; a NaN stays in a sum
        return True
    return bool(entry("numpy:isfinite")(values).all())


class SampledTurn(Struct, frozen=True, kw_only=True, gc=False):
    """The ids sampled by an engine for one turn, checked.

    `ids` [T] int32, `logprobs` [T] float64 in nats, of the distribution `logprobs_kind`; see `Chunk` for
    `tempered_logprobs` and `sampling_logprobs` [T], and `forced` [T], a byte 1 or 0 for each token. `support` has the
    supports of the tokens (core/support.py); None where they are not known, or nothing is ruled out. `mixed`: other
    weights came while it was sampled, nobody knows for which of its tokens; it has no `weights` then. `cached_from`:
    the weights for which the engine caches it; None where its cache is not kept apart by them.
    """

    ids: "array[int]"
    logprobs: "array[float]"
    sampling_logprobs: "array[float] | None"
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None
    finish: Finish
    weights: tuple[WeightSpan, ...]
    num_cached_tokens: int
    times: EngineTimes | None
    replay: Replay | None = None
    logprobs_kind: LogprobsKind = LogprobsKind.RAW
    tempered_logprobs: "array[float] | None" = None
    forced: bytes | None = None
    support: bytes | None = None
    mixed: MixedWeights | None = None
    cached_from: str | None = None

    @property
    def oldest_version(self) -> str | None:
        """Name of the oldest weights that sampled in it, or may have; None where it is not known."""
        if self.mixed is not None:
            return self.mixed.oldest
        return self.weights[0].version if self.weights else None

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} ids but {len(self.logprobs)} logprobs")
        for name in ("tempered_logprobs", "sampling_logprobs", "forced"):
            row: Sequence[float] | None = getattr(self, name)
            if row is not None and len(row) != len(self.ids):
                raise ValueError(f"{len(self.ids)} ids but {len(row)} {name.replace('_', ' ')}")
        if self.mixed is not None and self.weights:
            raise ValueError(f"mixed weights beside {self.weights}")
        if not all_finite(self.logprobs):
            raise ValueError("a logprob is not finite")
        end = 0
        for span in self.weights:
            if not end <= span.start < span.end <= len(self.ids):
                raise ValueError(f"weight spans must ascend within {len(self.ids)} ids, got {self.weights}")
            end = span.end


class PromptEnd(enum.Enum):
    """State of the reply's reasoning at the end of a prompt."""

    SILENT = "silent"
    """Nothing: the reply begins as the model likes."""
    OPENS = "opens"
    """Its last text is the opening marker of the reasoning."""
    OPENED = "opened"
    """The same, with white space after the marker."""
    CLOSES = "closes"
    """Its last text is the closing marker of the reasoning."""
    CLOSED = "closed"
    """The same, with white space after the marker."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the reply begins within its reasoning."""
        return self is PromptEnd.OPENS or self is PromptEnd.OPENED


class PromptMedia(Struct, frozen=True, kw_only=True, gc=False):
    """A medium in the place of the placeholder at `position` of the logical ids.

    `recorded` is its expansion in the kept line; None where the prompt brings it.
    """

    position: int
    item: MediaItem
    recorded: "array[int] | None" = None


class Prompt(Struct, frozen=True, kw_only=True, gc=False):
    """Ids for the engine: first the `num_kept` of the parent node's line, untouched; then `new_ids`.

    `of_kept` makes the kept ids, as many as the history has: few ask for them, and `ids` is made of them anew each
    time; `num_tokens` counts all. `num_trimmed` of the parent's last ids are left out: a stop token, replaced by the
    next message's opener. `json_fragments` are all ids as JSON without brackets, in pieces to be joined by commas, for
    an engine with text requests; None for others. `end` says whether a chat's prompt opened the reasoning: it is
    settled where the prompt is rendered, and read from here. Of a prompt with `media`, in order of their positions, all
    ids are logical ones: core/media.py.
    """

    new_ids: "array[int]"
    num_kept: int = 0
    num_trimmed: int = 0
    of_kept: "Callable[[], array[int]] | None" = None
    json_fragments: tuple[bytes, ...] | None = None
    end: PromptEnd = PromptEnd.SILENT
    media: tuple[PromptMedia, ...] = ()
    num_tokens: int = 0

    @staticmethod
    def of(ids: "array[int]", *, num_kept: int = 0) -> "Prompt":
        """The prompt of these ids, the first `num_kept` of them kept."""
        return Prompt(new_ids=ids[num_kept:], num_kept=num_kept, of_kept=lambda: ids[:num_kept])

    def __post_init__(self) -> None:
        force_setattr(self, "num_tokens", self.num_kept + len(self.new_ids))
        if self.num_kept < 0 or (self.num_kept and self.of_kept is None):
            raise ValueError(f"{self.num_kept} ids are kept, and nobody has them")

    @property
    def num_expanded(self) -> int:
        """Tokens, with the effective ones of media already in the line: no more are known before the engine has it."""
        if not self.media:
            return self.num_tokens
        return self.num_tokens + sum(len(one.recorded) - 1 for one in self.media if one.recorded is not None)

    @property
    def first_new_row(self) -> int:
        """The first position, of effective ids, with its forward pass in this prompt: the last kept token, after which
        came another one."""
        return max(0, self.num_expanded - len(self.new_ids) - 1)

    @property
    def ids(self) -> "array[int]":
        """All ids [T]."""
        return self.new_ids if self.of_kept is None else self.of_kept() + self.new_ids


class Usage(Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of one turn, as OpenAI counts them: `num_cached` of `num_prompt` were not computed again."""

    num_prompt: int
    num_completion: int
    num_cached: int = 0
    num_reasoning: int = 0
