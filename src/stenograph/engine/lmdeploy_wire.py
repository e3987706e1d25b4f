"""LMDeploy's routes that take ids, as bytes: what a server has, a request to a body, a reply to chunks. Pure.

Owns LMDeploy's field names, for `/generate` and for `/v1/chat/completions` with `input_ids`. LMDeploy passes over
fields that it does not know, so nothing is sent that this server has not said that it reads (its `/openapi.json`).
A stream has in each event what is new; what was sampled is held to the laws of `sglang_rows`, since LMDeploy writes
the same rows. Further laws are here:

    one_choice              an event of the chat route has one choice, or, with the usage, none
    has_usage               a reply of the chat route counts its tokens
    finish_is_last          nothing but the usage follows the part that has the finish reason
    no_failure              the engine did not fail: LMDeploy tells of that in a finish reason within a 200
    replay_shape            routed experts are numbers, for each token but the last, of each layer, as many each

Sources: LMDeploy's `serve/openai/protocol.py` (`GenerateReqInput`, `GenerateReqOutput`, `ChatCompletionRequest`),
`serve/openai/endpoints/generate.py`, `serve/openai/chat_completions/serving.py`, `serve/core/async_engine.py`.
"""

import base64
import enum
import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.errors import InvalidRequest, StenographError, UpstreamInvalid, UpstreamRefused
from stenograph.core.types import Chunk, Finish, FinishReason, Grammar, GrammarKind, Replay, RequestId, SamplingParams
from stenograph.engine.base import GenerateRequest
from stenograph.engine.sglang_request import as_json, prompt_ids
from stenograph.engine.sglang_rows import (
    META_LAWS,
    DrawnTokens,
    Natural,
    Row,
    TopRow,
    alternatives,
    decoded,
    laws,
    reason_of,
    short,
)

JSON_TYPE = "application/json"
MAX_TEMPERATURE = 2.0
_FIRST_SESSION = 2**52
"""Above the ids that a server gives by itself, and below what JSON's readers round."""


class Route(enum.StrEnum):
    """The ways in for ids, by path."""

    GENERATE = "/generate"
    CHAT = "/v1/chat/completions"


NEEDED: dict[Route, frozenset[str]] = {
    Route.GENERATE: frozenset({"input_ids", "return_logprob", "include_stop_str_in_output", "session_id"}),
    Route.CHAT: frozenset(
        {"input_ids", "return_logprob", "return_token_ids", "include_stop_str_in_output", "session_id"}
    ),
}
"""Fields without which a route cannot tell what was drawn."""
OLDEST: dict[Route, frozenset[str]] = {
    Route.GENERATE: NEEDED[Route.GENERATE] | {"stop_token_ids"},
    Route.CHAT: NEEDED[Route.CHAT] | {"seed", "response_format"},
}
"""What is taken to be known of a server that does not show its fields."""
GRAMMARS = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA, GrammarKind.REGEX})
"""What any version can hold a reply to; which one a server can, its fields say."""

# -- what a server has


class _Ref(msgspec.Struct, frozen=True):
    ref: str = msgspec.field(name="$ref", default="")


class _Media(msgspec.Struct, frozen=True):
    schema: _Ref = _Ref()


class _Body(msgspec.Struct, frozen=True):
    content: dict[str, _Media] = {}


class _Post(msgspec.Struct, frozen=True):
    requestBody: _Body = _Body()  # noqa: N815 - as OpenAPI spells it


class _Path(msgspec.Struct, frozen=True):
    post: _Post | None = None


class _Schema(msgspec.Struct, frozen=True):
    properties: dict[str, msgspec.Raw] = {}


class _Components(msgspec.Struct, frozen=True):
    schemas: dict[str, _Schema] = {}


class _Document(msgspec.Struct, frozen=True):
    paths: dict[str, _Path]
    components: _Components = _Components()


_DOCUMENT = msgspec.json.Decoder(_Document)


def fields_by_route(openapi: bytes) -> dict[Route, frozenset[str]]:
    """The fields that each route of a server reads, of those that take ids. Raises UpstreamInvalid for no document."""
    document = decoded(_DOCUMENT, openapi, ())
    found: dict[Route, frozenset[str]] = {}
    for route in Route:
        post = document.paths.get(route, _Path()).post
        media = None if post is None else post.requestBody.content.get(JSON_TYPE)
        if media is not None:
            schema = document.components.schemas.get(media.schema.ref.rsplit("/", 1)[-1], _Schema())
            if NEEDED[route] <= schema.properties.keys():
                found[route] = frozenset(schema.properties)
    return found


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


_MODELS = msgspec.json.Decoder(_Models)


def served_model(body: bytes, *, wanted: str) -> str:
    """The model's name there: `wanted` if the server has it, else its first. Raises UpstreamInvalid if it has none."""
    names = [card.id for card in decoded(_MODELS, body, ()).data]
    if not names:
        raise UpstreamInvalid("has_model", "the engine serves no model")
    return wanted if wanted in names else names[0]


def grammars_of(fields: Collection[str]) -> frozenset[GrammarKind]:
    """What a route with these fields can hold a reply to."""
    return GRAMMARS if "response_format" in fields else frozenset()


# -- the request


def session_of(request_id: RequestId) -> int:
    """The number by which a generation can be aborted; LMDeploy's ids are numbers."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return _FIRST_SESSION + int.from_bytes(digest, "little") % (_FIRST_SESSION - 1)


def encode_abort(session: int) -> bytes:
    """The body of an abort."""
    return b'{"session_id":%d}' % session


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How a server is asked: its route, the fields that it reads, its model's name, and whether it shall stream.

    `eos_ids` end a turn: LMDeploy forgets those of its template where a request brings stop tokens of its own.
    """

    route: Route
    fields: frozenset[str]
    model: str
    eos_ids: tuple[int, ...]
    streams: bool
    replays: bool


def encode_request(request: GenerateRequest, wanted: Wanted) -> bytes:
    """The body of a request. Raises InvalidRequest, naming the field, for what this server would pass over."""
    fields = dict(_fields(request.params, wanted))
    fields |= {"session_id": session_of(request.request_id), "stream": wanted.streams, "return_logprob": True}
    if wanted.route is Route.CHAT:
        fields |= {"model": wanted.model, "messages": [], "return_token_ids": True}
        if wanted.streams:
            fields["stream_options"] = {"include_usage": True}
    if wanted.replays:
        fields["return_routed_experts"] = True
    return as_json(fields)[:-1] + b',"input_ids":[' + prompt_ids(request.prompt) + b"]}"


def _fields(params: SamplingParams, wanted: Wanted) -> Iterator[tuple[str, object]]:
    """Every parameter by name. Greedy is said by `top_k`: a temperature of 0 is not the same in all versions."""
    _refuse(params)
    is_greedy = params.temperature == 0.0
    yield "temperature", 1.0 if is_greedy else params.temperature
    yield "top_k", 1 if is_greedy else params.top_k
    yield "top_p", params.top_p
    yield "min_p", params.min_p
    yield "repetition_penalty", params.repetition_penalty
    yield "ignore_eos", params.ignore_eos
    yield "max_tokens", params.max_tokens  # left out, it would be 128 in some versions
    yield "skip_special_tokens", False
    yield "spaces_between_special_tokens", False
    yield "include_stop_str_in_output", True  # else the stop token is left out of the ids
    if params.stop_token_ids:
        yield _known("stop_token_ids", "stop_token_ids", wanted), (*params.stop_token_ids, *wanted.eos_ids)
    if params.seed is not None:
        yield _known("seed", "seed", wanted), params.seed
    if params.num_top_logprobs:
        yield _known("top_logprobs_num", "top_logprobs", wanted), params.num_top_logprobs
    if params.grammar is not None:
        yield _known("response_format", "response_format", wanted), _response_format(params.grammar)


def _known(field: str, param: str, wanted: Wanted) -> str:
    """The field, if the server reads it."""
    if field not in wanted.fields:
        raise InvalidRequest(
            f"This LMDeploy server has no {field} on {wanted.route.value}.",
            param=None if param == "response_format" else f"/{param}",
        )
    return field


def _refuse(params: SamplingParams) -> None:
    """Raise InvalidRequest for what no LMDeploy does, or does not do exactly."""
    for name, is_asked, why in (
        ("stop", bool(params.stop), "it stops at strings of one token only, and ignores others: use stop_token_ids"),
        ("presence_penalty", params.presence_penalty != 0.0, "it has repetition_penalty alone"),
        ("frequency_penalty", params.frequency_penalty != 0.0, "it has repetition_penalty alone"),
        ("logit_bias", bool(params.logit_bias), "one of its two backends ignores it"),
        ("temperature", params.temperature > MAX_TEMPERATURE, f"it takes none above {MAX_TEMPERATURE:g}"),
        ("ignore_eos", params.ignore_eos and bool(params.stop_token_ids), "it then ignores stop_token_ids as well"),
    ):
        if is_asked:
            raise InvalidRequest(f"LMDeploy does not take this {name}: {why}.", param=f"/{name}")


def _response_format(grammar: Grammar) -> object:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_object"}
        case GrammarKind.JSON_SCHEMA:
            schema = msgspec.Raw(grammar.source.encode())
            return {"type": "json_schema", "json_schema": {"name": "schema", "strict": True, "schema": schema}}
        case GrammarKind.REGEX:
            return {"type": "regex_schema", "regex_schema": grammar.source}
        case GrammarKind.CHOICE | GrammarKind.EBNF | GrammarKind.LARK:
            raise InvalidRequest(f"LMDeploy takes no grammar of the kind {grammar.kind.value!r}.")


# -- the reply

Experts = list[list[list[Natural]]] | str | None


class _Finish(msgspec.Struct):
    type: str


class _Told(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Meta(msgspec.Struct):
    completion_tokens: Natural
    prompt_tokens: Natural | None = None
    finish_reason: _Finish | None = None
    output_token_logprobs: list[Row] | None = None
    output_top_logprobs: list[list[TopRow]] | None = None
    routed_experts: Experts = None


class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None
    output_ids: list[Natural] | None = None
    text: str = ""
    error: _Told | str | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    output_ids: list[Natural] | None = None
    output_token_logprobs: list[Row] | None = None
    routed_experts: Experts = None
    message: _Message | None = None
    delta: _Message | None = None


class _CachedDetails(msgspec.Struct):
    cached_tokens: Natural | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Natural
    completion_tokens: Natural
    prompt_tokens_details: _CachedDetails | None = None


class _Chat(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Told | str | None = None


_GENERATED = msgspec.json.Decoder(_Generated)
_CHAT = msgspec.json.Decoder(_Chat)
_LAWS = [*META_LAWS, *laws((r"\.usage", "has_usage"), (r"\.choices`$", "one_choice"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a reply, or an event, of either route says. `num_drawn` None: that is told in the end."""

    rows: Sequence[Row] | None
    tops: Sequence[Sequence[TopRow] | None] | None
    output_ids: Sequence[int] | None
    num_drawn: int | None
    num_prompt: int | None
    finish: str | None
    experts: Experts
    text: str


class LMDeployReading:
    """The reader of one reply of either route.

    Its methods raise UpstreamInvalid, or the error that the engine tells within a 200.
    """

    def __init__(self, *, route: Route, vocab_size: int, num_prompt: int, stop_ids: Collection[int]) -> None:
        """`stop_ids` are the model's own and the request's: one of them is the last id of a reply that stopped."""
        self._route = route
        self._vocab_size = vocab_size
        self._num_prompt = num_prompt
        self._stop_ids = frozenset(stop_ids)
        self._drawn = DrawnTokens(vocab_size=vocab_size, num_prompt=num_prompt)
        self._held: Chunk | None = None
        self._usage: _Usage | None = None

    def __repr__(self) -> str:
        return f"<LMDeployReading {self._route} {self._drawn!r}>"

    def whole_body(self, body: bytes) -> Sequence[Chunk]:
        """The chunks of a reply that came at once."""
        chunks = (*self.event(body), *self.end())
        self._held = None
        if not chunks or chunks[-1].finish is None:
            raise UpstreamInvalid("finish_reason", "there is none")
        return chunks

    def event(self, data: bytes) -> Sequence[Chunk]:
        """The chunks that a part brings; the one that ends the generation is held until `end`."""
        part = self._generated(data) if self._route is Route.GENERATE else self._chat(data)
        if part is None:
            return ()
        if self._held is not None:
            raise UpstreamInvalid("finish_is_last", "the engine went on after the part that ended the generation")
        chunk = self._chunk(part)
        if chunk.finish is None:
            return (chunk,) if chunk.ids else ()
        self._held = chunk
        return ()

    def end(self) -> Sequence[Chunk]:
        """The chunk that ends the generation, if it came. Raises UpstreamInvalid if the usage disagrees with it."""
        if self._held is None:
            return ()
        if self._route is Route.CHAT:
            self._check_usage()
        details = None if self._usage is None else self._usage.prompt_tokens_details
        cached = (details.cached_tokens if details is not None else None) or 0
        held = self._held
        return (
            Chunk(
                ids=held.ids,
                logprobs=held.logprobs,
                top_logprobs=held.top_logprobs,
                finish=held.finish,
                num_cached_tokens=cached,
                replay=held.replay,
            ),
        )

    def _generated(self, data: bytes) -> _Part:
        told = decoded(_GENERATED, data, _LAWS)
        if told.error is not None:
            raise _error_within(told.error, data)
        meta = told.meta_info
        if meta is None:
            raise UpstreamInvalid("has_meta_info", "there is no meta_info")
        return _Part(
            rows=meta.output_token_logprobs,
            tops=meta.output_top_logprobs,
            output_ids=told.output_ids,
            num_drawn=meta.completion_tokens,
            num_prompt=meta.prompt_tokens,
            finish=None if meta.finish_reason is None else meta.finish_reason.type,
            experts=meta.routed_experts,
            text=told.text,
        )

    def _chat(self, data: bytes) -> _Part | None:
        told = decoded(_CHAT, data, _LAWS)
        if told.error is not None:
            raise _error_within(told.error, data)
        self._usage = told.usage or self._usage
        if not told.choices and told.usage is not None:
            return None
        if not told.choices or len(told.choices) != 1:
            raise UpstreamInvalid("one_choice", f"one choice was asked for, {len(told.choices or ())} came")
        choice = told.choices[0]
        message = choice.message or choice.delta or _Message()
        return _Part(
            rows=choice.output_token_logprobs,
            tops=None,
            output_ids=choice.output_ids,
            num_drawn=None,
            num_prompt=None,
            finish=choice.finish_reason,
            experts=choice.routed_experts,
            text=message.content or "",
        )

    def _chunk(self, part: _Part) -> Chunk:
        reason = None if part.finish is None else self._reason(part)
        if part.rows is None and part.output_ids:
            raise UpstreamInvalid("has_logprobs", f"{len(part.output_ids)} tokens came without their logprobs")
        num_before, num_new = len(self._drawn.ids), len(part.rows or ())
        num_drawn = num_before + num_new if part.num_drawn is None else part.num_drawn
        if reason is FinishReason.LENGTH and num_drawn == 0:
            raise InvalidRequest(f"The prompt's {self._num_prompt} tokens leave no room in the engine's context.")
        if num_drawn != num_before + num_new:
            detail = f"{short(num_drawn)} completion tokens, but {num_before} came before and {num_new} now"
            raise UpstreamInvalid("count_agrees", detail)
        ids, logprobs = self._drawn.take(part.rows or (), num_drawn=num_drawn, reason=reason)
        if part.output_ids is not None and list(part.output_ids) != ids.tolist():
            raise UpstreamInvalid("ids_agree", "output_ids are not the ids of the tokens' rows")
        self._drawn.check_prompt(part.num_prompt)
        return Chunk(
            ids=ids,
            logprobs=logprobs,
            top_logprobs=alternatives(part.tops, num_drawn=num_drawn, num_new=num_new, vocab_size=self._vocab_size),
            finish=None if reason is None else self._finish(reason),
            replay=None if reason is None else self._replay(part.experts, num_drawn),
        )

    def _reason(self, part: _Part) -> FinishReason:
        if part.finish == "error":
            raise UpstreamInvalid("no_failure", f"the engine failed: {part.text[:200] or 'it does not say how'}")
        return reason_of(part.finish or "")

    def _finish(self, reason: FinishReason) -> Finish:
        """The stop token is the last id, where that is one: LMDeploy does not say what it stopped at."""
        last = self._drawn.ids[-1] if self._drawn.ids else None
        matched = last if reason is FinishReason.STOP and last in self._stop_ids else None
        return Finish(reason=reason, matched=matched)

    def _check_usage(self) -> None:
        if self._usage is None:
            raise UpstreamInvalid("has_usage", "the reply does not count its tokens")
        if self._usage.completion_tokens != len(self._drawn.ids):
            detail = f"{short(self._usage.completion_tokens)} completion tokens, but {len(self._drawn.ids)} rows"
            raise UpstreamInvalid("count_agrees", detail)
        self._drawn.check_prompt(self._usage.prompt_tokens)

    def _replay(self, experts: Experts, num_drawn: int) -> Replay | None:
        """Experts of each token but the last, as the int32 that they stand for."""
        if experts is None:
            return None
        if isinstance(experts, str):
            raise UpstreamInvalid("replay_shape", "routed_experts are a reference into the engine's own cluster")
        sizes = {(len(layers), *(len(chosen) for chosen in layers)) for layers in experts}
        is_even = len(sizes) <= 1 and all(len(set(size[1:])) <= 1 for size in sizes)
        if not is_even or len(experts) != self._num_prompt + num_drawn - 1:
            raise UpstreamInvalid(
                "replay_shape",
                f"routed_experts of {len(experts)} tokens came for a sequence of {self._num_prompt + num_drawn}",
            )
        try:
            flat = array("i", (expert for layers in experts for chosen in layers for expert in chosen))
        except OverflowError as error:
            raise UpstreamInvalid("replay_shape", "an expert's number is no int32") from error
        return Replay(routed_experts=base64.b64encode(flat.tobytes()).decode())


def _error_within(told: _Told | str, data: bytes) -> StenographError:
    """An error as an event; outside of a stream, the same has a status of its own."""
    error = _Told(message=told) if isinstance(told, str) else told
    status = error.code if isinstance(error.code, int) else 400
    if not 400 <= status <= 599:
        return UpstreamInvalid("error_status", f"an error within a reply has the status {short(status)}")
    return UpstreamRefused(status=status, content_type=JSON_TYPE, headers=(), body=data)
