"""LMDeploy's abilities and requests: a `GenerateRequest` to the body of one of its two routes. Pure.

Owns LMDeploy's request fields, for `/generate` and for `/v1/chat/completions` with `input_ids`. LMDeploy passes over
unknown fields, so only the fields listed by this server (in its `/openapi.json`) are sent.

Sources: LMDeploy's `serve/openai/protocol.py` (`GenerateReqInput`, `ChatCompletionRequest`).
"""

import enum
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest, UpstreamInvalid
from stenograph.core.ids_json import prompt_json
from stenograph.core.types import Grammar, GrammarKind, RequestId, SamplingParams
from stenograph.engine.base import GenerateRequest
from stenograph.engine.rows import decoded
from stenograph.engine.sglang.request import as_json

JSON_TYPE = "application/json"
MAX_TEMPERATURE = 2.0
_FIRST_SESSION = 2**52
"""Above a server's own ids, and below the integers rounded by JSON readers."""


class LMDeployRoute(enum.StrEnum):
    """The ways in for ids, by path."""

    GENERATE = "/generate"
    CHAT = "/v1/chat/completions"


NEEDED: dict[LMDeployRoute, frozenset[str]] = {
    LMDeployRoute.GENERATE: frozenset({"input_ids", "return_logprob", "include_stop_str_in_output", "session_id"}),
    LMDeployRoute.CHAT: frozenset(
        {"input_ids", "return_logprob", "return_token_ids", "include_stop_str_in_output", "session_id"}
    ),
}
"""Fields needed by a route to report the sampled tokens."""
OLDEST: dict[LMDeployRoute, frozenset[str]] = {
    LMDeployRoute.GENERATE: NEEDED[LMDeployRoute.GENERATE] | {"stop_token_ids"},
    LMDeployRoute.CHAT: NEEDED[LMDeployRoute.CHAT] | {"seed", "response_format"},
}
"""Fields taken for known at a server without a list of its own."""
GRAMMARS = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA, GrammarKind.REGEX})
"""Grammars that any version can enforce; a server's fields say which of them it can."""

# -- what a server has


class _Ref(msgspec.Struct, frozen=True):
    ref: str = msgspec.field(name="$ref", default="")


class _Media(msgspec.Struct, frozen=True):
    schema: _Ref = _Ref()


class _Body(msgspec.Struct, frozen=True):
    content: dict[str, _Media] = {}


class _OpenApiPost(msgspec.Struct, frozen=True):
    requestBody: _Body = _Body()  # noqa: N815 - as OpenAPI spells it


class _Path(msgspec.Struct, frozen=True):
    post: _OpenApiPost | None = None


class _Schema(msgspec.Struct, frozen=True):
    properties: dict[str, msgspec.Raw] = {}


class _Components(msgspec.Struct, frozen=True):
    schemas: dict[str, _Schema] = {}


class _Document(msgspec.Struct, frozen=True):
    paths: dict[str, _Path]
    components: _Components = _Components()


_DOCUMENT = msgspec.json.Decoder(_Document)


def fields_by_route(openapi: bytes) -> dict[LMDeployRoute, frozenset[str]]:
    """The fields read by each of a server's routes for ids. Raises UpstreamInvalid for no document."""
    document = decoded(_DOCUMENT, openapi, ())
    found: dict[LMDeployRoute, frozenset[str]] = {}
    for route in LMDeployRoute:
        post = document.paths.get(route, _Path()).post
        media = None if post is None else post.requestBody.content.get(JSON_TYPE)
        if media is not None:
            schema = document.components.schemas.get(media.schema.ref.rsplit("/", 1)[-1], _Schema())
            if NEEDED[route] <= schema.properties.keys():
                found[route] = frozenset(schema.properties)
    return found


class _LMDeployCard(msgspec.Struct):
    id: str


class _LMDeployModels(msgspec.Struct):
    data: list[_LMDeployCard]


_MODELS = msgspec.json.Decoder(_LMDeployModels)


def served_model(body: bytes, *, wanted: str) -> str:
    """The model's name there: `wanted` if the server has it, else its first. Raises UpstreamInvalid if it has none."""
    names = [card.id for card in decoded(_MODELS, body, ()).data]
    if not names:
        raise UpstreamInvalid("has_model", "the engine serves no model")
    return wanted if wanted in names else names[0]


def grammars_of(fields: Collection[str]) -> frozenset[GrammarKind]:
    """Grammars enforceable by a route with these fields."""
    return GRAMMARS if "response_format" in fields else frozenset()


# -- the request


def session_of(request_id: RequestId) -> int:
    """The number for aborting a generation; LMDeploy's ids are numbers."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return _FIRST_SESSION + int.from_bytes(digest, "little") % (_FIRST_SESSION - 1)


def encode_abort(session: int) -> bytes:
    """The body of an abort."""
    return b'{"session_id":%d}' % session


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The form of requests to a server: its route, the fields it reads, its model's name, and whether to stream.

    `eos_ids` end a turn: LMDeploy forgets those of its template where a request brings stop tokens of its own.
    """

    route: LMDeployRoute
    fields: frozenset[str]
    model: str
    eos_ids: tuple[int, ...]
    streams: bool
    replays: bool


def encode_request(request: GenerateRequest, wanted: Wanted) -> bytes:
    """The body of a request. Raises InvalidRequest, naming the field, for a field this server would pass over."""
    fields = dict(_fields(request.params, wanted))
    fields |= {"session_id": session_of(request.request_id), "stream": wanted.streams, "return_logprob": True}
    if wanted.route is LMDeployRoute.CHAT:
        fields |= {"model": wanted.model, "messages": [], "return_token_ids": True}
        if wanted.streams:
            fields["stream_options"] = {"include_usage": True}
    if wanted.replays:
        fields["return_routed_experts"] = True
    return as_json(fields)[:-1] + b',"input_ids":[' + b"".join(prompt_json(request.prompt)) + b"]}"


def _fields(params: SamplingParams, wanted: Wanted) -> Iterator[tuple[str, object]]:
    """Every parameter by name. `top_k` asks for greedy: a temperature of 0 is not the same in all versions."""
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
        yield _known("top_logprobs_num", "num_top_logprobs", wanted), params.num_top_logprobs
    if params.grammar is not None:
        yield _known("response_format", None, wanted), _response_format(params.grammar)


def _known(field: str, name: str | None, wanted: Wanted) -> str:
    """The field, if the server reads it; it comes from the sampling parameter `name`, None for the grammar."""
    if field not in wanted.fields:
        raise InvalidRequest(
            f"This LMDeploy server has no {field} on {wanted.route.value}.",
            blame=None if name is None else Blame(RequestPart.SAMPLING, path=(name,)),
        )
    return field


def _refuse(params: SamplingParams) -> None:
    """Raise InvalidRequest for an option that LMDeploy lacks or applies inexactly."""
    for name, is_asked, why in (
        ("stop", bool(params.stop), "it stops at strings of one token only, and ignores others: use stop_token_ids"),
        ("presence_penalty", params.presence_penalty != 0.0, "it has repetition_penalty alone"),
        ("frequency_penalty", params.frequency_penalty != 0.0, "it has repetition_penalty alone"),
        ("logit_bias", bool(params.logit_bias), "one of its two backends ignores it"),
        ("min_tokens", params.min_tokens > 0, "one of its two backends holds back the end token alone, no stop token"),
        ("temperature", params.temperature > MAX_TEMPERATURE, f"it takes none above {MAX_TEMPERATURE:g}"),
        ("ignore_eos", params.ignore_eos and bool(params.stop_token_ids), "it then ignores stop_token_ids as well"),
    ):
        if is_asked:
            blame = Blame(RequestPart.SAMPLING, path=(name,))
            raise InvalidRequest(f"LMDeploy does not take this {name}: {why}.", blame=blame)


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
