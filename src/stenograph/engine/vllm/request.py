"""Requests to vLLM: a `GenerateRequest` to the body of one of its two routes for token ids, and the others. Pure.

Owns the names of vLLM's request fields. Source: its `entrypoints/scale_out/token_in_token_out/protocol.py`,
`entrypoints/openai/completion/protocol.py` and `sampling_params.py`, version 0.32.
"""

import enum
from collections.abc import Iterator, Sequence

import msgspec

from stenograph.core.errors import InvalidRequest
from stenograph.core.ids_json import prompt_json
from stenograph.core.routing import Routing
from stenograph.core.types import Grammar, GrammarKind, PromptMedia, SamplingParams
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import Headers

GRAMMARS = frozenset(GrammarKind)
MAX_TOP_LOGPROBS = 20
"""vLLM's limit where it is started without `--max-logprobs`."""
EMPTY_GENERATION = b'{"token_ids":[],"sampling_params":{}}'
"""A generation refused before any work for it: it shows whether its route is there."""


class VLLMRoute(enum.Enum):
    """A route of vLLM for a prompt as ids; its value is the path."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


def encode_request(
    request: GenerateRequest, *, route: VLLMRoute, model: str, streams: bool, wants_experts: bool = False
) -> bytes:
    """The body of a generation. Raises InvalidRequest for anything vLLM cannot be asked for.

    The ids are joined as they are, never parsed or encoded again. `wants_experts`: of routed experts only the rows
    missing from the line are asked for; whether there are any is the server's setting.
    """
    parts = [b'{"model":', _json(model), b',"request_id":', _json(request.request_id)]
    if request.routing is not None and request.routing.priority is not None:
        parts.append(b',"priority":%d' % request.routing.priority)
    parts += salt_parts(request.cache_salt)
    if streams:
        parts.append(b',"stream":true,"stream_options":{"include_usage":true}')
    sampling = b"".join(_sampling_parts(request.params))
    if wants_experts and request.prompt.first_new_row:
        sampling += b',"routed_experts_prompt_start":%d' % request.prompt.first_new_row
    if route is VLLMRoute.GENERATE:
        if request.params.grammar is not None:
            # With a reasoning parser vLLM would hold the grammar back until the model has ended its reasoning.
            parts.append(b',"reasoning_ended":true')
        if request.prompt.media:
            parts += media_parts(request.prompt.media)
        parts += [b',"sampling_params":{', sampling, b'},"token_ids":[', *prompt_json(request.prompt), b"]}"]
    else:
        parts += [b',"return_token_ids":true,"return_tokens_as_token_ids":true,', sampling]
        parts += [b',"prompt":[', *prompt_json(request.prompt), b"]}"]
    return b"".join(parts)


def media_parts(media: Sequence[PromptMedia]) -> Iterator[bytes]:
    """Members for the media, in order of their placeholders. vLLM puts the expansions in their place, reports them, and
    knows an image that it has seen by its hash; base64 text is in need of no escapes."""
    yield b',"return_token_ids":true,"content_parts":['
    for number, one in enumerate(media):
        ref = one.item.ref
        head = _json(f"data:{ref.media_type};base64,")[:-1]
        yield b'%b{"type":"image_url","uuid":"%b","url":%b' % (b"," if number else b"", ref.sha256.encode(), head)
        yield one.item.base64
        yield b'"}'
    yield b"]"


def request_headers(request_id: str, routing: Routing | None) -> Headers:
    """Headers of a request under this id. vLLM takes its id before that of the body, and a proxy may set it where it is
    not there. Its data-parallel rank it takes here alone."""
    headers = (("x-request-id", request_id),)
    if routing is None or routing.dp_rank is None:
        return headers
    return (*headers, ("x-data-parallel-rank", str(routing.dp_rank)))


def salt_parts(salt: str | None) -> Iterator[bytes]:
    """The member to keep the cache apart by a salt, with a comma before it."""
    if salt is not None:
        yield b',"cache_salt":' + _json(salt)


def abort_ids(request_id: str, route: VLLMRoute) -> Sequence[str]:
    """vLLM's ids for a generation requested as `request_id`. It takes other forms for ids, and does nothing.

    A completion has an id for each of its prompts; the second form is of versions without one.
    """
    if route is VLLMRoute.GENERATE:
        return (f"generate-tokens-{request_id}",)
    return (f"cmpl-{request_id}-0", f"cmpl-{request_id}")


def encode_abort(request_id: str, route: VLLMRoute) -> bytes:
    """The body of an abort."""
    return b'{"request_ids":' + _json(abort_ids(request_id, route)) + b"}"


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _sampling_parts(params: SamplingParams) -> Iterator[bytes]:
    """Members of an object. Every parameter by name: no default of vLLM's or of its model's files ever applies."""
    yield b'"logprobs":%d' % num_logprobs(params.num_top_logprobs)
    for name, value in _sampling_fields(params):
        yield b',"%b":%b' % (name.encode(), _json(value))
    if params.grammar is not None:
        yield b',"structured_outputs":{%b}' % _grammar_member(params.grammar)


def num_logprobs(num_top: int) -> int:
    """The number to ask for: one more than wanted, since a sampled token outside the best takes a place."""
    return min(num_top + 1, MAX_TOP_LOGPROBS) if num_top else 0


def _sampling_fields(params: SamplingParams) -> Iterator[tuple[str, object]]:
    yield "temperature", params.temperature
    yield "top_p", params.top_p
    yield "top_k", params.top_k
    yield "min_p", params.min_p
    yield "presence_penalty", params.presence_penalty
    yield "frequency_penalty", params.frequency_penalty
    yield "repetition_penalty", params.repetition_penalty
    yield "ignore_eos", params.ignore_eos
    if params.seed is not None:
        yield "seed", params.seed % 2**63  # -1 means no seed there, and 64 bits are too many
    if params.max_tokens is not None:
        yield "max_tokens", params.max_tokens
    if params.min_tokens:
        yield "min_tokens", params.min_tokens
    if params.stop:
        yield "stop", params.stop
    if params.stop_token_ids:
        yield "stop_token_ids", params.stop_token_ids
    if params.logit_bias:
        yield "logit_bias", {str(id_): bias for id_, bias in params.logit_bias}


def _grammar_member(grammar: Grammar) -> bytes:
    """vLLM's member for a grammar. The old `guided_…` names are not among them: vLLM ignores them silently."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return b'"json_object":true'
        case GrammarKind.JSON_SCHEMA:
            if not grammar.source.lstrip().startswith("{"):
                raise InvalidRequest("vLLM takes a JSON Schema that is an object, not true or false.")
            return b'"json":' + grammar.source.encode()
        case GrammarKind.REGEX:
            return b'"regex":' + _json(grammar.source)
        case GrammarKind.CHOICE:
            return b'"choice":' + grammar.source.encode()
        case GrammarKind.EBNF:
            return b'"grammar":' + _json(grammar.source)
        case GrammarKind.LARK:
            if "::=" in grammar.source:
                raise InvalidRequest('vLLM takes a Lark grammar with "::=" in it, a schema\'s text included, for EBNF.')
            return b'"grammar":' + _json(grammar.source)
