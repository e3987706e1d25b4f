"""OpenAI completions, requests: bytes to `CompletionRequest`. Pure.

Every field is honoured, recorded or refused; nothing is accepted and ignored (docs/http-api.md and docs/parameters.md,
compared by tests). Whether an id is one of the model's is not known here. Replies are completions_reply.py's.
"""

import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw

from stenograph.core.chat import CompletionRequest
from stenograph.core.errors import InvalidJson, InvalidRequest
from stenograph.core.json_shape import num_elements
from stenograph.core.types import token_ids
from stenograph.dialects.common.json_bodies import decode_part
from stenograph.dialects.common.sampling import (
    decode_fields,
    other_names,
    reply_options,
    routing_hints,
    sampling_params,
    sent_sampling,
    text_view,
    truncation,
)
from stenograph.dialects.common.sampling_fields import NumTop, One, Unread, WirePromptSampling, field_rules, in_schema
from stenograph.dialects.openai.spelling import COMPLETIONS, OpenAISpelling
from stenograph.dialects.settings import UnknownFields

OnlyFalse = Annotated[bool, in_schema(const=False)]


class WireCompletionRequest(WirePromptSampling, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI completions request. `null` means absent.

    At most one field asks for a grammar: `response_format`, `structured_outputs`, `regex`, `ebnf`, `json_schema`,
    `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`.

    The server also checks what this schema cannot say:

    - `stream_options` needs `stream`, and `truncation_side` needs `truncate_prompt_tokens`.
    - These pairs do not disagree: `seed` and `sampling_seed`, `min_tokens` and `min_new_tokens`,
      `include_stop_str_in_output` and `no_stop_trim`.
    - `min_tokens` is at most `max_tokens`.
    - Guided decoding supports the grammar, and the engine supports the sampling fields.
    - A linear session takes one prompt, and the prompt does not end with a reply that the session generated.
    - The request fits the model's context.

    A field that docs/parameters.md lists as refused may have a value that asks for nothing, such as null; this schema
    leaves such values out.
    """

    prompt: Raw  # bytes at first: many ids are read some at a time
    logprobs: NumTop | None = None
    echo: OnlyFalse | None = None
    suffix: Annotated[str, in_schema(maxLength=0)] | None = None
    best_of: One | None = None
    add_special_tokens: OnlyFalse | None = None

    prompt_embeds: Unread = UNSET


COMPLETION_FIELDS = field_rules(
    WireCompletionRequest,
    refused={"prompt_embeds": "a prompt is text or ids"},
)

_REQUEST = msgspec.json.Decoder(WireCompletionRequest)
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_LISTS = msgspec.json.Decoder(list[Raw])
_IDS = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, lt=2**31)]])
_LIST_OF = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)

MAX_PROMPTS = 32 * 1024
"""Prompts of one request, whatever `--max-in-flight` allows."""

PIECE_BYTES = 64 * 1024
"""Ids are decoded so much at a time, in half a millisecond each: a decoder holds the GIL."""


def decode_completion(body: bytes, *, unknown_fields: UnknownFields = UnknownFields.REFUSE) -> CompletionRequest:
    """Read a request. Raises InvalidJson or InvalidRequest, with a JSON pointer."""
    *_, request = completion_steps(body, unknown_fields=unknown_fields)
    assert request is not None, "the last step gives the request"
    return request


def completion_steps(
    body: bytes, *, unknown_fields: UnknownFields = UnknownFields.REFUSE
) -> Iterator[CompletionRequest | None]:
    """Read a request in steps. Each holds the GIL for about a millisecond, but for the first: it scans the body.

    Gives None after each step but the last, and the request then. Raises as `decode_completion`.
    """
    wire, recorded = decode_fields(body, _REQUEST, COMPLETION_FIELDS, unknown_fields)
    yield None
    _check_unsupported(wire)
    prompts: list[str | array[int]] = []
    whole = bytes(wire.prompt)
    if len(whole) > PIECE_BYTES and (first := _LIST_OF.match(whole)) is not None and first[1] in b'"[':
        for num in num_elements(whole):
            if num > MAX_PROMPTS:
                raise InvalidRequest(f"At most {MAX_PROMPTS} prompts, got {num} or more.", param="/prompt")
            yield None
    texts, is_list = _split(whole)
    for text, at in texts:
        if isinstance(text, str):
            prompts.append(text)
            continue
        ids = token_ids()
        for piece in _id_pieces(text, at):
            ids.extend(piece)
            yield None
        prompts.append(ids)
    yield _request(wire, tuple(prompts), is_list, recorded)


def _request(
    wire: WireCompletionRequest, prompts: tuple["str | array[int]", ...], is_list: bool, recorded: dict[str, str]
) -> CompletionRequest:
    params, said, constraint = sampling_params(
        wire,
        max_tokens=wire.max_tokens,
        max_tokens_name="max_tokens",
        num_top_logprobs=wire.logprobs or 0,
        top_logprobs_name="logprobs",
    )
    if not prompts:
        raise InvalidRequest("prompt is empty: a completion has at least one prompt.", param="/prompt")
    return CompletionRequest(
        prompts=prompts,
        truncation=truncation(wire),
        model=wire.model,
        params=params,
        spelling=OpenAISpelling(
            dialect=COMPLETIONS,
            id_prefix="cmpl-",
            prompt="prompt",
            has_prompts=is_list,
            grammar=constraint.param,
            other_names=other_names(wire),
        ),
        routing=routing_hints(wire),
        text=text_view(wire),
        reply=reply_options(wire, logprobs=wire.logprobs is not None),
        recorded=recorded,
        sent=sent_sampling(wire),
        said=said,
    )


def _check_unsupported(wire: WireCompletionRequest) -> None:
    if wire.echo:
        raise InvalidRequest("echo is not supported: a reply holds what was sampled.", param="/echo")
    if wire.suffix:
        raise InvalidRequest("suffix is not supported: a prompt is continued at its end.", param="/suffix")
    if wire.best_of not in (None, 1):
        raise InvalidRequest(f"best_of must be 1, got {wire.best_of}: one reply is sampled.", param="/best_of")
    if wire.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is not supported: a prompt is taken as it is. Write them into it.",
            param="/add_special_tokens",
        )


def _split(text: bytes) -> tuple[list[tuple[str | bytes, str]], bool]:
    """Prompts in any of their four spellings: texts, or the JSON text of ids, each with its pointer; and whether they
    are a list of prompts."""
    at = "/prompt"
    if text.startswith(b'"'):
        return [(decode_part(text, _TEXT, at=at), at)], False
    first = _LIST_OF.match(text)
    if first is None:
        raise InvalidRequest(
            "prompt must be a text, a list of texts, a list of ids, or a list of lists of ids.", param=at
        )
    match first[1]:
        case b'"':
            texts = decode_part(text, _TEXTS, at=at)
            return [(one, f"{at}/{index}") for index, one in enumerate(texts)], True
        case b"[":
            lists = decode_part(text, _LISTS, at=at)
            return [(bytes(ids), f"{at}/{index}") for index, ids in enumerate(lists)], True
        case _:
            return [(text, at)], False


def _id_pieces(text: bytes, at: str) -> Iterator["array[int]"]:
    """A list of ids, some at a time. Raises InvalidRequest for anything but a list of whole numbers in [0, 2^31)."""
    if len(text) > PIECE_BYTES:
        with suppress(InvalidJson):  # it was cut within something that is no id: reading the whole finds it
            yield from _cut(text, at)
            return
    whole = decode_part(text, _IDS, at=at)
    yield token_ids(whole)


def _cut(text: bytes, at: str) -> Iterator["array[int]"]:
    """The same, cut at commas. Raises InvalidJson too, where a comma stands within an element."""
    start, end, num_ids = 1, len(text) - 1, 0
    while start < end:
        comma = text.find(b",", start + PIECE_BYTES, end)
        stop = end if comma < 0 else comma
        ids = decode_part(b"[" + text[start:stop] + b"]", _IDS, at=at, first=num_ids)
        yield token_ids(ids)
        start, num_ids = stop + 1, num_ids + len(ids)
