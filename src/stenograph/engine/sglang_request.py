"""What a request to SGLang says whatever its route: the prompt's ids, how to draw, what to replay, a grammar. Pure.

Owns those of SGLang's names that its routes share. Source: SGLang's `sampling/sampling_params.py`.
"""

import re
from collections.abc import Iterator

import msgspec

from stenograph.core.errors import InvalidRequest
from stenograph.core.ids_json import encode_ids
from stenograph.core.settings import ReplayKind
from stenograph.core.types import Grammar, GrammarKind, Prompt, SamplingParams

GRAMMARS = frozenset(GrammarKind) - {GrammarKind.LARK}
"""What SGLang takes. Its `ebnf` is GBNF's dialect, not llguidance's Lark."""
_CHOICES = msgspec.json.Decoder(list[str])
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')


def as_json(value: object) -> bytes:
    """A value as JSON text."""
    return msgspec.json.encode(value)


def prompt_ids(prompt: Prompt) -> bytes:
    """The prompt's ids as JSON without brackets: those that are at hand as text are not written again."""
    return encode_ids(prompt.ids) if prompt.ids_json is None else prompt.ids_json


def sampling_fields(params: SamplingParams) -> Iterator[tuple[str, object]]:
    """Every parameter by name: an engine's own defaults, which may come from its model's files, never apply."""
    yield "temperature", params.temperature
    yield "top_p", params.top_p
    yield "top_k", params.top_k or -1
    yield "min_p", params.min_p
    yield "presence_penalty", params.presence_penalty
    yield "frequency_penalty", params.frequency_penalty
    yield "repetition_penalty", params.repetition_penalty
    yield "ignore_eos", params.ignore_eos
    if params.stop:
        yield "stop", params.stop
    if params.stop_token_ids:
        yield "stop_token_ids", params.stop_token_ids
    if params.logit_bias:
        yield "logit_bias", {str(id_): bias for id_, bias in params.logit_bias}


def replay_parts(replay: ReplayKind) -> Iterator[bytes]:
    """Members that ask for what trainers replay, each with a comma before it."""
    if replay in (ReplayKind.ROUTED_EXPERTS, ReplayKind.ALL):
        yield b',"return_routed_experts":true'
    if replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
        yield b',"return_indexer_topk":true'


def pattern_field(grammar: Grammar) -> tuple[str, str]:
    """The field, and its value, of a grammar that is no JSON Schema. Raises InvalidRequest for one it cannot take."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return "regex", grammar.source
        case GrammarKind.EBNF:
            return "ebnf", grammar.source
        case GrammarKind.CHOICE:
            return "ebnf", choice_as_ebnf(grammar.source)
        case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA | GrammarKind.LARK:
            raise InvalidRequest(f"SGLang takes no grammar of the kind {grammar.kind.value!r}.")


def choice_as_ebnf(source: str) -> str:
    """A JSON list of strings as the grammar of just those strings. Raises InvalidRequest if it is no such list."""
    try:
        choices = _CHOICES.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest("A choice is a JSON list of strings.") from error
    if not choices:
        raise InvalidRequest("A choice has at least one string.")
    return "root ::= " + " | ".join(f'"{_ESCAPED.sub(_escape, choice)}"' for choice in choices)


def _escape(found: "re.Match[str]") -> str:
    """GBNF's spelling, in a string, of a character that cannot stand for itself."""
    char = found[0]
    return f"\\{char}" if char in '"\\' else f"\\x{ord(char):02x}"


def encode_abort(request_id: str) -> bytes:
    """The body of an abort."""
    return b'{"rid":' + as_json(request_id) + b"}"
