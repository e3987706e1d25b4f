"""SGLang's chat route as bytes: a `GenerateRequest` to a body, a body to a checked reply. Pure.

Owns the names of SGLang's fields and the laws of a reply. An engine's word is not trusted: `decode_reply` returns the
truth, or raises `UpstreamInvalid` with the broken law, for any bytes at all. The laws:

    one_choice              there is exactly one choice
    content_is_text         the message's content is there, and a string; null only where nothing was sampled
    tool_calls_shape        a tool call has an id, a name, and its arguments as a string
    has_meta_info           there is a meta_info
    finish_reason           the reason is one of stop, tool_calls, length, abort, and reported once

and those of `engine/rows.py`, the reader of sampled tokens.

Field names: SGLang's `entrypoints/openai/protocol.py` and `serving_chat.py`.
"""

from array import array
from functools import lru_cache

import msgspec
from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest, UpstreamInvalid
from stenograph.core.ids_json import prompt_json
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.replay import Replay
from stenograph.core.types import (
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    SupportPiece,
    TopLogprob,
    WeightSpan,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.reported import ReportedSupport, alternatives, payload_apart, replay_of, weight_spans
from stenograph.engine.rows import (
    LARGE_PAYLOAD_BYTES,
    META_LAWS,
    MetaFinish,
    MetaInfo,
    SampledTokens,
    check_request,
    decoded,
    decoded_apart,
    laws,
    reason_of,
)
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.grammar import pattern_field
from stenograph.engine.sglang.request import (
    as_json,
    policy_parts,
    replay_parts,
    routing_parts,
    salt_parts,
    sampling_fields,
    support_parts,
)

_NO_MESSAGES = b'[{"role":"user","content":""}]'
"""SGLang refuses an empty list, even beside `input_ids`."""

# -- the request


def encode_request(
    request: GenerateRequest, *, model: str, replay: ReplayKind, form: bytes = b',"return_meta_info":true'
) -> bytes:
    """The body of a chat request. `form` are the members to ask for a whole reply, or for a stream.

    Raises InvalidRequest for a grammar not taken by SGLang.

    The long parts, messages and ids, are joined as they are, never parsed or encoded again.
    """
    parts: list[bytes | memoryview] = [b'{"model":', as_json(model)]
    parts += _chat_parts(request.chat)
    parts += [b',"rid":', as_json(request.request_id)]
    parts += [b',"logprobs":true', form, b',"no_stop_trim":false']
    if request.routing is not None:
        parts += routing_parts(request.routing)
    if request.cache_salt is not None:
        parts += salt_parts(request.cache_salt)
    if request.policy is not None:
        parts += policy_parts(request.policy)
    if request.affinity_key is not None:
        parts += [b',"session_id":', as_json(request.affinity_key)]
    if replay is not ReplayKind.NONE:
        parts += replay_parts(replay, request.prompt.first_new_row)
    if request.params.support:
        parts += support_parts(request.params)
    # The members of sampling: those of most turns are as they were, and few; what may be long is written anew.
    sampling_json = _sampling_json if request.params.grammar or request.params.logit_bias else _kept_sampling
    parts += [b",", sampling_json(request.params)]
    if request.params.grammar is not None:
        parts += _grammar_parts(request.params.grammar)
    parts += [b',"input_ids":[', *prompt_json(request.prompt), b"]}"]
    return b"".join(parts)


def _chat_parts(chat: ChatRequest | None) -> list[bytes | memoryview]:
    """The fields by which SGLang parses the reply. `input_ids` alone decides the tokens its model sees.

    The messages go along only with tools: some of its parsers number a call by those before it. Raises InvalidRequest
    for a view of the reply's text ruled out by our own fields.
    """
    if chat is None:
        return [b',"messages":', _NO_MESSAGES]
    if chat.text.keeps_stop:
        raise InvalidRequest(
            "include_stop_str_in_output (no_stop_trim) must be false here: SGLang's chat replies go out unchanged, and"
            " with it SGLang leaves its end token in the message. The reply's ids have the stop string.",
            blame=Blame(RequestPart.TEXT_VIEW, path=("keeps_stop",)),
        )
    if chat.reply.tokens_as_ids and chat.reply.logprobs and not chat.reply.stream:
        raise InvalidRequest(
            "return_tokens_as_token_ids must be false here: SGLang's chat replies go out unchanged, with its tokens as"
            " text. return_token_ids adds the ids to them.",
            blame=Blame(RequestPart.REPLY_OPTIONS, path=("tokens_as_ids",)),
        )
    tools = chat.tools + chat.late_tools
    parts: list[bytes | memoryview] = [b',"messages":', chat.messages_json if tools else _NO_MESSAGES]
    if tools:
        parts += [b',"tools":[', b",".join(tool.json.encode() for tool in tools), b"]"]
        parts += [b',"tool_choice":', as_json(_tool_choice(chat.tool_choice))]
        parts += [b',"parallel_tool_calls":', as_json(chat.parallel_tool_calls)]
    if not chat.text.skips_special:
        parts.append(b',"skip_special_tokens":false,"spaces_between_special_tokens":false')
    if not chat.text.separates_reasoning:
        parts.append(b',"separate_reasoning":false')
    if chat.template_kwargs:
        parts += [b',"chat_template_kwargs":', as_json(dict(chat.template_kwargs))]
    return parts


def _tool_choice(choice: ToolChoice) -> object:
    if choice.mode is ToolMode.NAMED:
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode.value


def _sampling_json(params: SamplingParams) -> bytes:
    fields = sampling_fields(params)
    if params.seed is not None:
        fields["seed"] = params.seed
    if params.max_tokens is not None:
        fields["max_tokens"] = params.max_tokens
    if params.min_tokens:
        fields["min_tokens"] = params.min_tokens
    if params.num_top_logprobs:
        fields["top_logprobs"] = params.num_top_logprobs
    return as_json(fields)[1:-1]


_kept_sampling = lru_cache(maxsize=256)(_sampling_json)


def _grammar_parts(grammar: Grammar) -> list[bytes]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return [b',"response_format":{"type":"json_object"}']
        case GrammarKind.JSON_SCHEMA:
            named = b',"response_format":{"type":"json_schema","json_schema":{"name":"schema","strict":true,"schema":'
            return [named, grammar.source.encode(), b"}}"]
        case _:
            name, source = pattern_field(grammar)
            return [b',"', name.encode(), b'":', as_json(source)]


# -- the reply


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _SGLangMessage(msgspec.Struct):
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _SGLangChoice(msgspec.Struct):
    message: _SGLangMessage
    meta_info: MetaInfo
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _Metadata(msgspec.Struct):
    weight_version: str | int | None = None


class _SGLangCompletion(msgspec.Struct):
    id: str
    choices: list[_SGLangChoice]
    metadata: _Metadata | None = None


_COMPLETION = msgspec.json.Decoder(_SGLangCompletion)

_LAWS = [
    *META_LAWS,
    *laws(
        (r"meta_info` - at|\.meta_info`$", "has_meta_info"),
        (r"tool_calls", "tool_calls_shape"),
        (r"`content` - at|\.message\.content`$|got `null` - at \S*\.message`$", "content_is_text"),
        (r"`choices`|\$\.choices`$", "one_choice"),
    ),
]


class SGLangReply(Struct, frozen=True, kw_only=True, gc=False):
    """A reply that keeps every law. `logprobs[i]` is ln p(ids[i]) in nats.

    `weights` covers the ids, where SGLang reports spans; `weight_version` names the weights when it wrote the reply.
    """

    id: str
    message: Message
    finish: Finish
    ids: "array[int]"
    logprobs: "array[float]"
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None
    num_cached_tokens: int
    weight_version: str | None
    weights: tuple[WeightSpan, ...] | None
    replay: Replay | None
    unasked_replay: tuple[str, ...]
    sampling_logprobs: "array[float] | None" = None
    support: SupportPiece | None = None


def decode_reply(
    body: bytes,
    *,
    vocab_size: int,
    request_id: str | None = None,
    num_prompt: int | None = None,
    replay: ReplayKind = ReplayKind.NONE,
    first_row: int = 0,
    row_size: int = 0,
    wants_support: bool = False,
) -> SGLangReply:
    """Read a reply's body, once. `num_prompt` is how many ids were sent, under `request_id`; None does not ask.

    Routed experts, of `row_size` numbers a row, were asked for from `first_row` on (`replay_of`). Replay payloads
    beyond `replay` are left out, and named in `unasked_replay`. `wants_support`: each token has to have its support.
    Raises UpstreamInvalid, naming the broken law, and nothing else.
    """
    payload = columns = None
    if len(body) > LARGE_PAYLOAD_BYTES:
        text, payload = payload_apart(body)
        completion, columns = decoded_apart(_COMPLETION, text, _LAWS, _meta_of)
    else:
        completion = decoded(_COMPLETION, body, _LAWS)
    if len(completion.choices) != 1:
        raise UpstreamInvalid("one_choice", f"one choice was asked for, {len(completion.choices)} came")
    choice = completion.choices[0]
    meta = choice.meta_info
    if request_id is not None:
        check_request(completion.id, request_id)
        check_request(completion.id if meta.id is None else meta.id, request_id)
    finish = _finish(choice)
    rows = meta.output_token_logprobs if columns is None else columns
    sampled = SampledTokens(vocab_size=vocab_size, num_prompt=num_prompt)
    ids, logprobs = sampled.take(
        rows, num_sampled=meta.completion_tokens, reason=finish.reason, num_prompt=meta.prompt_tokens
    )
    version = meta.weight_version
    if version is None and completion.metadata is not None:
        version = completion.metadata.weight_version
    top = None
    if meta.output_top_logprobs is not None:
        top = alternatives(meta.output_top_logprobs, num_sampled=len(ids), num_new=len(ids), vocab_size=vocab_size)
    num_rows = (num_prompt or 0) + len(ids) - 1
    kept: Replay | None = None
    unasked: tuple[str, ...] = ()
    if meta.has_replay:
        kept, unasked = replay_of(
            meta, replay, num_rows=num_rows, first_row=first_row, row_size=row_size, apart=payload
        )
    support = ReportedSupport(vocab_size) if wants_support and ids else None
    if support is not None:
        support.take(meta, num_new=len(ids), num_sampled=len(ids))
    return SGLangReply(
        id=completion.id,
        message=_message(choice.message, drew_nothing=not ids),
        finish=finish,
        ids=ids,
        logprobs=logprobs,
        top_logprobs=top,
        num_cached_tokens=meta.cached_tokens or 0,
        weight_version=None if version is None else str(version),
        weights=weight_spans(meta, num_sampled=len(ids)) or None if meta.weight_versions else None,
        replay=kept,
        unasked_replay=unasked,
        sampling_logprobs=None if support is None else support.logprobs(),
        support=None if support is None else support.piece(ids),
    )


def _meta_of(completion: _SGLangCompletion) -> MetaInfo | None:
    return completion.choices[0].meta_info if len(completion.choices) == 1 else None


def _finish(choice: _SGLangChoice) -> Finish:
    """The choice's reason and the one in its meta_info must agree; an abort in either counts as one."""
    meta = choice.meta_info.finish_reason
    matched: int | str | None = choice.matched_stop
    if isinstance(meta, MetaFinish):
        matched = meta.matched if matched is None else matched
        meta = meta.type
    if meta == choice.finish_reason == "stop":
        return Finish(reason=FinishReason.STOP, matched=matched)
    told = [reason for reason in (choice.finish_reason, meta) if reason is not None]
    reasons = {reason_of(reason) for reason in told}
    if FinishReason.ABORT in reasons:
        return Finish(reason=FinishReason.ABORT)
    if len(reasons) != 1:
        raise UpstreamInvalid("finish_reason", f"the reply reports {' and '.join(told)}" if told else "there is none")
    reason = reasons.pop()
    return Finish(reason=reason, matched=matched if reason is FinishReason.STOP else None)


def _message(message: _SGLangMessage, *, drew_nothing: bool) -> Message:
    if message.content is None and not drew_nothing:
        raise UpstreamInvalid(
            "content_is_text",
            "the message's content is null, which a client would send back as another message; SGLang has to write"
            ' "" beside tool calls (docs/engines.md)',
        )
    calls: list[ToolCall] = []
    for call in message.tool_calls or ():
        calls.append(ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments))
    return Message(
        role=Role.ASSISTANT,
        content=message.content or "",
        reasoning=message.reasoning_content,
        tool_calls=tuple(calls),
    )
