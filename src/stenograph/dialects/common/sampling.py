"""Reads the request fields common to several protocols. Pure.

Owns sampling parameters, grammars, and the recording and refusal of fields. Knows neither messages nor prompts.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Raw

from stenograph.core.chat import ReplyOptions, TextView, Truncation
from stenograph.core.errors import InvalidRequest
from stenograph.core.routing import Routing
from stenograph.core.types import Grammar, GrammarKind, ParamOutOfRange, SamplingParams
from stenograph.dialects.common.json_bodies import decode_json, type_at
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.common.sampling_fields import (
    HOST,
    NEUTRAL,
    NEUTRAL_OF,
    FieldRules,
    WirePromptSampling,
    WireResponseFormat,
    WireSampling,
    WireStructuredOutputs,
)
from stenograph.dialects.common.template_input import check_depth
from stenograph.dialects.settings import UnknownFields

S = TypeVar("S", bound=msgspec.Struct)
W = TypeVar("W", bound=WireSampling)

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_SCHEMA = msgspec.json.Decoder(dict[str, object])
_EBNF_RULE = re.compile(r"^\s*[\w<>-]+\s*::=", re.MULTILINE)
_TYPES = {"response_format": ("text", "json_object", "json_schema"), "tool_choice": ("function",)}
"""Fields with objects of several types, and the known types."""
_HOW_TO_RECORD = "A server that is started with --unknown-fields record takes such fields and only records them."
_LONGEST_NEUTRAL = 32
_OTHER_NAMES = {
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "routed_dp_rank": "data_parallel_rank",
}
"""Fields with a name of its own in each engine; the second may be sent in the place of the first."""
_ONE_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_TWO_NAMES = ("seed", "min_tokens")
"""Sampling parameters under their names here."""
NOT_SAMPLING = frozenset(
    {
        *(
            "model",
            "system",
            "messages",
            "prompt",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "chat_template_kwargs",
        ),
        *("stream", "stream_options", "return_token_ids", "truncate_prompt_tokens", "truncation_side"),
        *("input", "instructions", "previous_response_id", "include"),
    }
)
"""Honoured fields without a say in how a reply is sampled, or with another place in a record."""
_ROUTING = (
    *("priority", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)
_HOST = re.compile(HOST)
_MAX_STOPS = 64
_MAX_STOP_IDS = 1024
_MAX_BIASES = 10_000


def decode_fields(
    body: bytes, decoder: "msgspec.json.Decoder[W]", rules: FieldRules, unknown_fields: UnknownFields
) -> tuple[W, dict[str, str]]:
    """Read a body and its recorded fields, as JSON text by name.

    Raises InvalidJson or InvalidRequest, with a JSON pointer: another shape, or a refused field.
    """
    wire, recorded = decode_by_rules(body, decoder, rules, unknown_fields, blame_type=_blame_type)
    if wire.n not in (None, 1):
        raise InvalidRequest(f"n must be 1, got {wire.n}: a turn has one reply.", param="/n")
    for name in _ROUTING:  # not every engine goes by them
        if (value := getattr(wire, name, None)) is not None:
            recorded[name] = msgspec.json.encode(value).decode()
    recorded.update(_recorded_of_stream(wire))
    return wire, recorded


def decode_by_rules(
    body: bytes,
    decoder: "msgspec.json.Decoder[S]",
    rules: FieldRules,
    unknown_fields: UnknownFields,
    *,
    blame_type: Callable[[bytes, InvalidRequest], None],
) -> tuple[S, dict[str, str]]:
    """Read a body of any dialect and its recorded fields, as JSON text by name.

    `blame_type` raises if an error points into an object of an unknown type: then the type is the fault. Raises
    InvalidJson or InvalidRequest, with a JSON pointer: another shape, or a refused field.
    """
    extra: dict[str, str] = {}
    if unknown_fields is UnknownFields.RECORD:
        body, extra = _without_unknown(body, rules)
    try:
        wire = decode_json(body, decoder, known=rules.accepted)
    except InvalidRequest as error:
        blame_type(body, error)
        if error.param is not None and error.param[1:] not in rules.names and "/" not in error.param[1:]:
            raise InvalidRequest(f"{error} {_HOW_TO_RECORD}", param=error.param) from error
        raise
    for name, why in rules.refused.items():
        value = getattr(wire, name)
        if value is not UNSET and is_given(value) and not _is_neutral(name, value):
            raise InvalidRequest(f"Field {name!r} is refused: {why}.", param=f"/{name}")
    values = {name: value for name in rules.recorded if (value := getattr(wire, name)) is not UNSET}
    recorded = {name: bytes(value).decode() for name, value in values.items() if is_given(value)}
    return wire, {**recorded, **extra}


def _is_neutral(name: str, value: Raw) -> bool:
    """Whether the value of a refused field asks for nothing."""
    text = bytes(value)
    if len(text) > _LONGEST_NEUTRAL:
        return False
    try:
        said: object = msgspec.json.decode(text)
    except msgspec.DecodeError:  # no field of ours is so written
        return False
    return any(type(said) is type(one) and said == one for one in NEUTRAL_OF.get(name, NEUTRAL))


def _blame_type(body: bytes, error: InvalidRequest) -> None:
    """Raise InvalidRequest if the error points into an object of an unknown type: it has fields of its own, and they
    are not the fault."""
    field = (error.param or "/").split("/")[1]
    known = _TYPES.get(field)
    if known is None:
        return
    kind = type_at(body, (field,))
    if kind is not None and kind not in known:
        raise unknown_type(field, kind) from error


def unknown_type(field: str, kind: str) -> InvalidRequest:
    """The error for an unknown type, in a field with objects told apart by their type."""
    *others, last = map(repr, _TYPES[field])
    named = f"{', '.join(others)} or {last}" if others else last
    return InvalidRequest(f"{field}.type must be {named}, got {shown(kind)}.", param=f"/{field}/type")


def _recorded_of_stream(wire: WireSampling) -> dict[str, str]:
    """Fields of `stream_options` to record; they change nothing."""
    padding = None if wire.stream_options is None else wire.stream_options.include_obfuscation
    if padding is None:
        return {}
    return {"stream_options": msgspec.json.encode({"include_obfuscation": padding}).decode()}


def _without_unknown(body: bytes, rules: FieldRules) -> tuple[bytes, dict[str, str]]:
    fields = decode_json(body, _OBJECT)
    known = {name: raw for name, raw in fields.items() if name in rules.names}
    extra = {name: bytes(raw).decode() for name, raw in fields.items() if name not in rules.names}
    return (msgspec.json.encode(known), extra) if extra else (body, extra)


def is_given(value: object) -> bool:
    """Whether an uninspected field was sent; `null` means absent."""
    return value is not UNSET and not (isinstance(value, Raw) and bytes(value) == b"null")


def sent_sampling(wire: msgspec.Struct) -> dict[str, str]:
    """The client's sampling fields, as JSON text by the client's names; `null` means absent."""
    values = {name: getattr(wire, name) for name in wire.__struct_fields__ if name not in NOT_SAMPLING}
    return {
        name: msgspec.json.encode(value).decode()
        for name, value in values.items()
        if value is not None and not isinstance(value, Raw | msgspec.UnsetType)
    }


def request_json(path: str, model: str | None, recorded: Mapping[str, str], sent: Mapping[str, str]) -> bytes:
    """The record of a request to `path` as it came, as a JSON object; `sent` are its sampling fields."""
    kept: dict[str, object] = {
        "path": path,
        "model": model,
        "recorded": {name: Raw(text.encode()) for name, text in recorded.items()},
        "sent": {name: Raw(text.encode()) for name, text in sent.items()},
    }
    return msgspec.json.encode(kept)


class Constraint(NamedTuple):
    """A requested grammar, and the field it came from."""

    grammar: Grammar | None
    param: str


class ReadSampling(NamedTuple):
    """Sampling parameters, the ones given by the client, and the source of their grammar."""

    params: SamplingParams
    said: frozenset[str]
    constraint: Constraint


def sampling_params(
    wire: WireSampling,
    *,
    max_tokens: int | None,
    max_tokens_name: str,
    num_top_logprobs: int,
    top_logprobs_name: str,
    constraint: Constraint | None = None,
) -> ReadSampling:
    """The sampling parameters of a request. Raises InvalidRequest with a JSON pointer.

    Parameters with other names in the routes are passed in, with the client's names for them. `constraint` is a grammar
    from a field of the route's own.
    """
    given: dict[str, object] = {name: value for name in _ONE_NAME if (value := getattr(wire, name)) is not None}
    given |= {name: value for name in _TWO_NAMES if (value := _either(wire, name)) is not None}
    if wire.top_k == -1:
        given["top_k"] = 0
    if len(wire.stop_token_ids or ()) > _MAX_STOP_IDS:
        raise InvalidRequest(
            f"At most {_MAX_STOP_IDS} stop ids, got {len(wire.stop_token_ids or ())}.", param="/stop_token_ids"
        )
    constraint = _constraint(wire, constraint)
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if wire.stop is not None:
        given["stop"] = _stop(wire.stop)
    if wire.logit_bias is not None:
        given["logit_bias"] = _logit_bias(wire.logit_bias)
    try:
        params = SamplingParams(
            **given,  # type: ignore[arg-type]  # typed by the wire struct, under the same names
            stop_token_ids=tuple(wire.stop_token_ids or ()),
            grammar=constraint.grammar,
            num_top_logprobs=num_top_logprobs,
        )
    except ParamOutOfRange as error:
        given_names = {**other_names(wire), "max_tokens": max_tokens_name, "top_logprobs": top_logprobs_name}
        name = given_names.get(error.name, error.name)
        raise InvalidRequest(f"{str(error).replace(error.name, name, 1)}.", param=f"/{name}") from error
    return ReadSampling(params, frozenset(given), constraint)


def _either(wire: WireSampling, name: str) -> object:
    """A field's value under either of its names; None if it is absent. Raises InvalidRequest if they differ."""
    value: object = getattr(wire, name)
    other = _OTHER_NAMES[name]
    meant: object = getattr(wire, other)
    if value is not None and meant is not None and value != meant:
        raise InvalidRequest(f"{name} and {other} disagree; send one.", param=f"/{other}")
    return meant if value is None else value


def other_names(wire: WireSampling) -> dict[str, str]:
    """The names under which the client gave a field with several, by its first one."""
    return {
        name: other
        for name, other in _OTHER_NAMES.items()
        if getattr(wire, name) is None and getattr(wire, other) is not None
    }


def text_view(wire: WireSampling, *, separates_reasoning: bool = True) -> TextView:
    """The request's text view. Raises InvalidRequest: spaces without a token."""
    skips_special = wire.skip_special_tokens is not False
    if wire.spaces_between_special_tokens and not skips_special:
        raise InvalidRequest(
            "spaces_between_special_tokens must be false beside skip_special_tokens: false: the text is that of the"
            " tokens, and nothing is put between them.",
            param="/spaces_between_special_tokens",
        )
    return TextView(
        skips_special=skips_special,
        keeps_stop=bool(_either(wire, "include_stop_str_in_output")),
        separates_reasoning=separates_reasoning,
    )


def truncation(wire: WireSampling) -> Truncation | None:
    """The request's truncation of the prompt; None keeps all ids. Raises InvalidRequest."""
    num = wire.truncate_prompt_tokens
    if num == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, got 0.", param="/truncate_prompt_tokens")
    if num is None:
        if wire.truncation_side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens.", param="/truncation_side")
        return None
    return Truncation(num_tokens=None if num == -1 else num, keeps_end=wire.truncation_side != "right")


def routing_hints(wire: WireSampling) -> Routing | None:
    """The request's routing hints; None where it gives none. Raises InvalidRequest."""
    if all(getattr(wire, name, None) is None for name in _ROUTING):
        return None
    prefill = wire if isinstance(wire, WirePromptSampling) else WirePromptSampling()
    host = prefill.bootstrap_host
    if host is not None and not _HOST.fullmatch(host):
        raise InvalidRequest(
            f"bootstrap_host must be a name or an address of a host, got {shown(host)}.", param="/bootstrap_host"
        )
    _either(wire, "routed_dp_rank")
    return Routing(
        priority=wire.priority,
        dp_rank=wire.data_parallel_rank if wire.routed_dp_rank is None else wire.routed_dp_rank,
        prefill_dp_rank=prefill.disagg_prefill_dp_rank,
        bootstrap_host=host,
        bootstrap_port=prefill.bootstrap_port,
        bootstrap_room=prefill.bootstrap_room,
    )


def _stop(wire: str | list[str]) -> tuple[str, ...]:
    stops = (wire,) if isinstance(wire, str) else tuple(wire)
    if len(stops) > _MAX_STOPS:
        raise InvalidRequest(f"At most {_MAX_STOPS} stop strings, got {len(stops)}.", param="/stop")
    if not all(stops):
        raise InvalidRequest("A stop string is empty: it must have at least one character.", param="/stop")
    return stops


def _logit_bias(wire: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(wire) > _MAX_BIASES:
        raise InvalidRequest(f"At most {_MAX_BIASES} biases, got {len(wire)}.", param="/logit_bias")
    pairs: list[tuple[int, float]] = []
    for key, bias in wire.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise InvalidRequest(f"A key of logit_bias must be a token id, got {shown(key)}.", param="/logit_bias")
        pairs.append((int(key), bias))
    return tuple(sorted(pairs))


def reply_options(wire: WireSampling, *, logprobs: bool) -> ReplyOptions:
    """The client's options for the reply. Raises InvalidRequest: `stream_options` without a stream."""
    options = wire.stream_options
    if options is not None and not wire.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="/stream_options")
    return ReplyOptions(
        stream=bool(wire.stream),
        include_usage=options is not None and bool(options.include_usage),
        logprobs=logprobs,
        return_token_ids=bool(wire.return_token_ids),
        tokens_as_ids=bool(wire.return_tokens_as_token_ids),
    )


# --- grammars -------------------------------------------------------------------------------------------------------


def _constraint(wire: WireSampling, own: Constraint | None) -> Constraint:
    """The one grammar of a request, in whichever way it asks for one. Raises InvalidRequest for more than one."""
    found = [*(() if own is None else (own,)), *_constraints(wire)]
    if len(found) > 1:
        names = [one.param.split("/")[1] for one in found[:2]]
        what = "and".join(f" {name!r} " for name in names).strip()
        raise InvalidRequest(f"{what} each ask for a grammar; send one.", param=f"/{names[1]}")
    return found[0] if found else Constraint(None, "/response_format")


def _constraints(wire: WireSampling) -> Iterator[Constraint]:
    if wire.response_format is not None and (grammar := _of_response_format(wire.response_format)) is not None:
        yield Constraint(grammar, "/response_format")
    if wire.structured_outputs is not None:
        yield _of_structured_outputs(wire.structured_outputs)
    if wire.regex is not None:
        yield _regex(wire.regex, "/regex")
    if wire.ebnf is not None:
        yield _text(GrammarKind.EBNF, wire.ebnf, "/ebnf")
    if wire.json_schema is not None:
        yield _schema(wire.json_schema, "/json_schema")
    if wire.guided_json is not None:
        yield _schema(wire.guided_json, "/guided_json")
    if wire.guided_regex is not None:
        yield _regex(wire.guided_regex, "/guided_regex")
    if wire.guided_choice is not None:
        yield _choice(wire.guided_choice, "/guided_choice")
    if wire.guided_grammar is not None:
        yield _any_grammar(wire.guided_grammar, "/guided_grammar")


def _of_response_format(wire: WireResponseFormat) -> Grammar | None:
    if wire.type not in _TYPES["response_format"]:
        raise unknown_type("response_format", wire.type)
    at = "/response_format/json_schema"
    if wire.type != "json_schema":
        if wire.json_schema is not None:
            raise InvalidRequest(f"A response_format of type {wire.type!r} has no json_schema.", param=at)
        return Grammar(kind=GrammarKind.JSON_OBJECT) if wire.type == "json_object" else None
    if wire.json_schema is None:
        raise InvalidRequest("response_format needs its json_schema.", param=at)
    return schema_grammar(wire.json_schema.schema, f"{at}/schema")


def _of_structured_outputs(wire: WireStructuredOutputs) -> Constraint:
    at = "/structured_outputs"
    found: list[Constraint] = []
    if wire.json is not None:
        found.append(_schema(wire.json, f"{at}/json"))
    if wire.regex is not None:
        found.append(_regex(wire.regex, f"{at}/regex"))
    if wire.choice is not None:
        found.append(_choice(wire.choice, f"{at}/choice"))
    if wire.grammar is not None:
        found.append(_any_grammar(wire.grammar, f"{at}/grammar"))
    if wire.json_object:
        found.append(Constraint(Grammar(kind=GrammarKind.JSON_OBJECT), f"{at}/json_object"))
    if len(found) != 1:
        raise InvalidRequest(
            f"structured_outputs must have one of json, regex, choice, grammar, json_object; got {len(found)}.",
            param=at,
        )
    return found[0]


def _schema(wire: Mapping[str, object] | str, at: str) -> Constraint:
    """A JSON Schema, as an object or as its text."""
    if isinstance(wire, str):
        try:
            wire = _SCHEMA.decode(wire)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest("A JSON Schema must be a JSON object, or the text of one.", param=at) from error
    return Constraint(schema_grammar(wire, at), at)


def schema_grammar(schema: Mapping[str, object], at: str) -> Grammar:
    """The grammar of a JSON Schema. Raises InvalidRequest for one nested too deeply."""
    check_depth(schema, at=at)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=msgspec.json.encode(schema).decode())


def _regex(wire: str, at: str) -> Constraint:
    return _text(GrammarKind.REGEX, wire, at)


def _any_grammar(wire: str, at: str) -> Constraint:
    """A grammar in either notation; only EBNF writes `name ::=`."""
    return _text(GrammarKind.EBNF if _EBNF_RULE.search(wire) else GrammarKind.LARK, wire, at)


def _text(kind: GrammarKind, wire: str, at: str) -> Constraint:
    if not wire.strip():
        raise InvalidRequest(f"{at.removeprefix('/').replace('/', '.')} is empty.", param=at)
    return Constraint(Grammar(kind=kind, source=wire), at)


def _choice(wire: list[str], at: str) -> Constraint:
    if not wire or not all(wire):
        raise InvalidRequest("There must be at least one choice, and none may be empty.", param=at)
    return Constraint(Grammar(kind=GrammarKind.CHOICE, source=msgspec.json.encode(wire).decode()), at)
