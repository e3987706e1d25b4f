"""SGLang's chat route as bytes: a `GenerateRequest` to a body, a body to a checked reply. Pure.

Owns the names of SGLang's fields and the laws that a reply must keep. An engine's word is not trusted: `decode_reply`
returns what is true, or raises `UpstreamInvalid` with the law that was broken, for any bytes at all. The laws:

    utf8                    the whole body is UTF-8, also where nobody reads it
    json                    it is JSON, with nothing after it
    shape                   its fields have the types that SGLang gives them
    one_choice              there is exactly one choice
    content_is_text         the message's content is there, and a string; null only where nothing was drawn
    tool_calls_shape        a tool call has an id, a name, and its arguments as a string
    has_meta_info, has_logprobs, has_completion_tokens     what was sampled is there
    row_shape               a sampled token is [logprob, id] or [logprob, id, text or null]
    logprob_is_finite       a logprob is a finite number
    id_in_vocab             a token's id is an integer in [0, vocabulary)
    count_agrees            there are `completion_tokens` tokens
    prompt_agrees           `prompt_tokens`, where it is told, is the number of ids that were sent
    has_tokens              no token means that the generation was aborted
    finish_reason           the reason is one of stop, tool_calls, length, abort, and told once
    replay_is_base64        a replay payload is a string of the size of base64 of int32

Field names: SGLang's `entrypoints/openai/protocol.py` and `serving_chat.py`.
"""

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from stenograph.core.chat import ChatRequest, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest, UpstreamInvalid
from stenograph.core.ids_json import encode_ids
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.core.settings import ReplayKind
from stenograph.core.types import (
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    Replay,
    SamplingParams,
    TopLogprob,
    token_ids,
)
from stenograph.engine.base import GenerateRequest

NATURAL = msgspec.Meta(ge=0)
GRAMMARS = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA, GrammarKind.REGEX})
"""What SGLang takes. Its `ebnf` is another dialect than llguidance's Lark."""
REPLAY_FIELDS = ("routed_experts", "indexer_topk")
_NO_MESSAGES = b'[{"role":"user","content":""}]'
"""SGLang refuses an empty list, even beside `input_ids`."""

# -- the request


def encode_request(request: GenerateRequest, *, model: str, replay: ReplayKind) -> bytes:
    """The body of a chat request. Raises InvalidRequest for a grammar that SGLang does not take.

    The long parts, messages and ids, are joined as they are, never parsed or encoded again.
    """
    parts = [b'{"model":', _json(model)]
    parts += _chat_parts(request.chat)
    parts += [b',"rid":', _json(request.request_id)]
    parts.append(b',"logprobs":true,"return_meta_info":true,"no_stop_trim":false,"stream":false')
    if replay in (ReplayKind.ROUTED_EXPERTS, ReplayKind.ALL):
        parts.append(b',"return_routed_experts":true')
    if replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        parts.append(b',"return_indexer_topk":true')
    for name, value in _sampling_fields(request.params):
        parts += [b',"', name.encode(), b'":', _json(value)]
    if request.params.grammar is not None:
        parts += _grammar_parts(request.params.grammar)
    parts += [b',"input_ids":[', _prompt_ids(request.prompt), b"]}"]
    return b"".join(parts)


def _prompt_ids(prompt: Prompt) -> bytes:
    return encode_ids(prompt.ids) if prompt.ids_json is None else prompt.ids_json


def encode_abort(request_id: str) -> bytes:
    """The body of an abort."""
    return b'{"rid":' + _json(request_id) + b"}"


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _chat_parts(chat: ChatRequest | None) -> list[bytes]:
    """What SGLang parses the reply by. Which tokens its model sees, `input_ids` alone says."""
    if chat is None:
        return [b',"messages":', _NO_MESSAGES]
    has_messages = chat.messages_json.strip(b"[] \t\r\n")
    parts = [b',"messages":', chat.messages_json if has_messages else _NO_MESSAGES]
    if chat.tools:
        parts += [b',"tools":[', b",".join(tool.json.encode() for tool in chat.tools), b"]"]
        parts += [b',"tool_choice":', _json(_tool_choice(chat.tool_choice))]
        parts += [b',"parallel_tool_calls":', _json(chat.parallel_tool_calls)]
    if chat.template_kwargs:
        parts += [b',"chat_template_kwargs":', _json(dict(chat.template_kwargs))]
    return parts


def _tool_choice(choice: ToolChoice) -> object:
    if choice.mode is ToolMode.NAMED:
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode.value


def _sampling_fields(params: SamplingParams) -> Iterator[tuple[str, object]]:
    """Every parameter by name: an engine's own defaults, which may come from its model's files, never apply."""
    yield "temperature", params.temperature
    yield "top_p", params.top_p
    yield "top_k", params.top_k or -1
    yield "min_p", params.min_p
    yield "presence_penalty", params.presence_penalty
    yield "frequency_penalty", params.frequency_penalty
    yield "repetition_penalty", params.repetition_penalty
    yield "ignore_eos", params.ignore_eos
    if params.seed is not None:
        yield "seed", params.seed
    if params.max_tokens is not None:
        yield "max_tokens", params.max_tokens
    if params.stop:
        yield "stop", params.stop
    if params.stop_token_ids:
        yield "stop_token_ids", params.stop_token_ids
    if params.logit_bias:
        yield "logit_bias", {str(id_): bias for id_, bias in params.logit_bias}
    if params.num_top_logprobs:
        yield "top_logprobs", params.num_top_logprobs


def _grammar_parts(grammar: Grammar) -> list[bytes]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return [b',"response_format":{"type":"json_object"}']
        case GrammarKind.JSON_SCHEMA:
            named = b',"response_format":{"type":"json_schema","json_schema":{"name":"schema","strict":true,"schema":'
            return [named, grammar.source.encode(), b"}}"]
        case GrammarKind.REGEX:
            return [b',"regex":', _json(grammar.source)]
        case GrammarKind.CHOICE | GrammarKind.LARK | GrammarKind.EBNF:
            raise InvalidRequest(f"SGLang takes no grammar of the kind {grammar.kind.value!r}.")


# -- the reply


class _Row(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """`[logprob, id]` or `[logprob, id, text]`; as an array-like struct, half the cost of a tuple (measured)."""

    logprob: float
    id: Annotated[int, NATURAL]
    text: str | None = None


class _TopRow(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """As `_Row`; a token that the grammar rules out has the logprob null."""

    logprob: float | None
    id: Annotated[int, NATURAL]
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _MetaFinish(msgspec.Struct):
    type: str
    matched: int | str | None = None


class _MetaInfo(msgspec.Struct):
    completion_tokens: Annotated[int, NATURAL]
    prompt_tokens: Annotated[int, NATURAL] | None = None
    output_token_logprobs: list[_Row] | None = None
    output_top_logprobs: list[list[_TopRow] | None] | None = None
    cached_tokens: Annotated[int, NATURAL] | None = None
    weight_version: str | int | None = None
    finish_reason: _MetaFinish | str | None = None
    routed_experts: str | None = None
    indexer_topk: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    meta_info: _MetaInfo
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _Metadata(msgspec.Struct):
    weight_version: str | int | None = None


class _Completion(msgspec.Struct):
    id: str
    choices: list[_Choice]
    metadata: _Metadata | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)

_LAWS = [
    (re.compile(pattern), law)
    for pattern, law in (
        (r"output_token_logprobs\[\d+\]\[0\]`$", "logprob_is_finite"),
        (r"output_token_logprobs\[\d+\]\[1\]`$", "id_in_vocab"),
        (r"output_token_logprobs\[\d+\]|^Expected `array` of at most", "row_shape"),
        (r"output_token_logprobs", "has_logprobs"),
        (r"completion_tokens", "has_completion_tokens"),
        (r"routed_experts|indexer_topk", "replay_is_base64"),
        (r"finish_reason", "finish_reason"),
        (r"meta_info` - at|\.meta_info`$", "has_meta_info"),
        (r"tool_calls", "tool_calls_shape"),
        (r"`content` - at|\.message\.content`$", "content_is_text"),
        (r"`choices`|\$\.choices`$", "one_choice"),
    )
]
"""Where msgspec found a wrong type, in its own words, to the law that says so."""

_REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangReply:
    """A reply that keeps every law. `logprobs[i]` is ln p(ids[i]) in nats."""

    id: str
    message: Message
    finish: Finish
    ids: "array[int]"
    logprobs: "array[float]"
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None
    num_cached_tokens: int
    weight_version: str | None
    replay: Replay | None


def decode_reply(body: bytes, *, vocab_size: int, num_prompt: int | None = None) -> SGLangReply:
    """Read a reply's body, once. `num_prompt` is how many ids were sent; None does not ask.

    Raises UpstreamInvalid, naming the law that it breaks, and nothing else.
    """
    completion = _decode(body)
    if len(completion.choices) != 1:
        raise UpstreamInvalid("one_choice", f"one choice was asked for, {len(completion.choices)} came")
    choice = completion.choices[0]
    meta = choice.meta_info
    finish = _finish(choice)
    ids, logprobs = _tokens(meta, finish, vocab_size)
    if num_prompt is not None and meta.prompt_tokens not in (None, num_prompt):
        raise UpstreamInvalid(
            "prompt_agrees",
            f"{num_prompt} ids were sent, but the engine tells of {_short(meta.prompt_tokens or 0)} prompt tokens:"
            " it does not know input_ids, or made a prompt of its own",
        )
    version = meta.weight_version
    if version is None and completion.metadata is not None:
        version = completion.metadata.weight_version
    return SGLangReply(
        id=completion.id,
        message=_message(choice.message, drew_nothing=not ids),
        finish=finish,
        ids=ids,
        logprobs=logprobs,
        top_logprobs=_top_logprobs(meta, vocab_size),
        num_cached_tokens=meta.cached_tokens or 0,
        weight_version=None if version is None else str(version),
        replay=_replay(meta),
    )


def _decode(body: bytes) -> _Completion:
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look into strings that it skips, and they go out unchanged
        return _COMPLETION.decode(body)
    except UnicodeDecodeError as error:
        raise UpstreamInvalid("utf8", f"{error.reason} at byte {error.start}") from error
    except msgspec.ValidationError as error:
        text = str(error)
        law = next((law for pattern, law in _LAWS if pattern.search(text)), "shape")
        raise UpstreamInvalid(law, text) from error
    except msgspec.DecodeError as error:
        raise UpstreamInvalid("json", f"{error}; the reply begins {body[:80]!r}") from error
    except RecursionError as error:
        raise UpstreamInvalid("shape", "the reply is nested too deeply") from error


def _finish(choice: _Choice) -> Finish:
    """The choice's reason and the one in its meta_info, which must agree; an abort that one of them tells is one."""
    meta = choice.meta_info.finish_reason
    matched: int | str | None = choice.matched_stop
    if isinstance(meta, _MetaFinish):
        matched = meta.matched if matched is None else matched
        meta = meta.type
    told = [reason for reason in (choice.finish_reason, meta) if reason is not None]
    for reason in told:
        if reason not in _REASONS:
            raise UpstreamInvalid("finish_reason", f"{reason[:80]!r} is none that we know")
    reasons = {_REASONS[reason] for reason in told}
    if FinishReason.ABORT in reasons:
        return Finish(reason=FinishReason.ABORT)
    if len(reasons) != 1:
        raise UpstreamInvalid("finish_reason", f"the reply tells {' and '.join(told)}" if told else "there is none")
    reason = reasons.pop()
    return Finish(reason=reason, matched=matched if reason is FinishReason.STOP else None)


def _tokens(meta: _MetaInfo, finish: Finish, vocab_size: int) -> tuple["array[int]", "array[float]"]:
    rows = meta.output_token_logprobs
    if rows is None:
        # SGLang leaves the list out where a generation was aborted before it ran.
        if finish.reason is not FinishReason.ABORT or meta.completion_tokens:
            raise UpstreamInvalid("has_logprobs", "meta_info has no output_token_logprobs")
        rows = []
    if len(rows) != meta.completion_tokens:
        detail = f"{meta.completion_tokens} completion tokens, but {len(rows)} in output_token_logprobs"
        raise UpstreamInvalid("count_agrees", detail)
    if not rows and finish.reason is not FinishReason.ABORT:
        raise UpstreamInvalid("has_tokens", "the engine drew no token, and does not say that it was aborted")
    ids = [row.id for row in rows]
    _check_ids(ids, vocab_size)
    return token_ids(ids), array("d", [row.logprob for row in rows])


def _check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """The decoder has seen to it that they are integers, and none below 0; JSON has no NaN and no infinity."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise UpstreamInvalid("id_in_vocab", f"{_short(largest)} is no token id of a vocabulary of {vocab_size}")


def _short(number: int) -> str:
    """Numbers of any length in an error message; `str` refuses those of thousands of digits."""
    return str(number) if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"


def _top_logprobs(meta: _MetaInfo, vocab_size: int) -> tuple[tuple[TopLogprob, ...], ...] | None:
    positions = meta.output_top_logprobs
    if not positions:
        return None
    if len(positions) != meta.completion_tokens:
        detail = f"{meta.completion_tokens} completion tokens, but {len(positions)} in output_top_logprobs"
        raise UpstreamInvalid("count_agrees", detail)
    _check_ids((row.id for rows in positions for row in rows or ()), vocab_size)
    return tuple(
        tuple(TopLogprob(id=row.id, logprob=row.logprob) for row in rows or () if row.logprob is not None)
        for rows in positions
    )


def _message(message: _Message, *, drew_nothing: bool) -> Message:
    if message.content is None and not drew_nothing:
        raise UpstreamInvalid(
            "content_is_text",
            "the message's content is null, which a client would send back as another message; SGLang has to write"
            ' "" beside tool calls (docs/engines.md)',
        )
    calls = (
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    return Message(
        role=Role.ASSISTANT,
        content=message.content or "",
        reasoning=message.reasoning_content,
        tool_calls=tuple(calls),
    )


def _replay(meta: _MetaInfo) -> Replay | None:
    if meta.routed_experts is None and meta.indexer_topk is None:
        return None
    for name in REPLAY_FIELDS:
        payload: str | None = getattr(meta, name)
        if payload is not None and not _is_sized_as_base64(payload):
            raise UpstreamInvalid("replay_is_base64", f"{name} has {len(payload)} characters: no int32 as base64")
    return Replay(routed_experts=meta.routed_experts, indexer_topk=meta.indexer_topk)


def _is_sized_as_base64(payload: str) -> bool:
    """Whether it can be int32 as base64, by its size; its megabytes are looked into when they are used."""
    num_bytes = len(payload) // 4 * 3 - payload[-2:].count("=")
    return payload.isascii() and len(payload) % 4 == 0 and num_bytes % 4 == 0


# -- the client's copy

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def cut_replay(body: bytes) -> bytes:
    """A reply's body without `routed_experts` and `indexer_topk`; every other value is spelled as it came.

    SGLang writes them into each choice's `meta_info` and, in some versions, once more into `sglext`. A body that has
    neither is returned as the same object. Takes bodies that `decode_reply` has taken.
    """
    reply = _OBJECT.decode(body)
    choices = _LIST.decode(reply["choices"])
    cut = [_cut_within(choice, "meta_info") for choice in choices]
    sglext = _without_replay(reply["sglext"]) if "sglext" in reply else None
    if sglext is not None:
        reply["sglext"] = sglext
    elif all(choice is None for choice in cut):
        return body
    reply["choices"] = msgspec.Raw(
        msgspec.json.encode([old if new is None else new for old, new in zip(choices, cut, strict=True)])
    )
    return msgspec.json.encode(reply)


def _cut_within(raw: msgspec.Raw, name: str) -> msgspec.Raw | None:
    """The object without replay fields in its member `name`; None if there are none."""
    members = _OBJECT.decode(raw)
    cut = _without_replay(members[name])
    return None if cut is None else msgspec.Raw(msgspec.json.encode({**members, name: cut}))


def _without_replay(raw: msgspec.Raw) -> msgspec.Raw | None:
    if bytes(memoryview(raw)[:1]) != b"{":
        return None
    members = _OBJECT.decode(raw)
    kept = {name: value for name, value in members.items() if name not in REPLAY_FIELDS}
    return None if len(kept) == len(members) else msgspec.Raw(msgspec.json.encode(kept))
