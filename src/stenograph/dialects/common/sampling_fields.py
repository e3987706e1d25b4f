"""Request fields common to several protocols: the structs, and the rule of each field."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType


def in_schema(**schema: object) -> Meta:
    """Constraints in a field's schema besides its type. They are checked after decoding, with a better message."""
    return Meta(extra_json_schema=dict(schema))


def list_of(struct: str) -> Meta:
    """The schema of a list kept as bytes, which is decoded in portions: at least one of this struct."""
    return in_schema(type="array", minItems=1, items={"$ref": f"#/components/schemas/{struct}"})


Unread = Raw | UnsetType
"""A dropped or refused field; its value is not looked at."""
Recorded = Annotated[Unread, in_schema(description="Recorded; it has no effect.")]
"""A field kept in the record as it came."""

NotBlank = Annotated[str, in_schema(pattern=r"\S")]
Choices = Annotated[list[Annotated[str, in_schema(minLength=1)]], in_schema(minItems=1)]
Stop = Annotated[str, in_schema(minLength=1)]
AtLeastOne = Annotated[int, in_schema(minimum=1, exclusiveMaximum=2**31)]
NotNegative = Annotated[int, in_schema(minimum=0, exclusiveMaximum=2**31)]
Seed = Annotated[int, in_schema(minimum=-(2**63), exclusiveMaximum=2**64)]
Penalty = Annotated[float, in_schema(minimum=-2, maximum=2)]
NumTop = Annotated[int, in_schema(minimum=0, maximum=20)]
One = Annotated[int, in_schema(minimum=1, maximum=1)]
Rank = Annotated[int, Meta(ge=0, lt=2**31)]
HOST = r"^[A-Za-z0-9._:%\[\]-]{1,255}$"
Host = Annotated[str, in_schema(pattern=HOST)]
Biases = Annotated[
    dict[str, Annotated[float, in_schema(minimum=-100, maximum=100)]],
    in_schema(propertyNames={"pattern": "^[0-9]{1,9}$"}),
]


class Rule(enum.StrEnum):
    """Treatment of a request's field."""

    HONOURED = "honoured"
    RECORDED = "recorded"
    REFUSED = "refused"


class WireJsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. `name`, `description` and `strict` have no effect: the schema always holds."""

    schema: dict[str, object]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class WireResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: Annotated[str, in_schema(enum=["text", "json_object", "json_schema"])]
    json_schema: WireJsonSchema | None = None


class WireStructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs`, as vLLM has it: exactly one of its fields."""

    json: dict[str, object] | str | None = None
    regex: NotBlank | None = None
    choice: Choices | None = None
    grammar: NotBlank | None = None
    json_object: bool | None = None


class WireStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`. `include_obfuscation`, OpenAI's padding of events, is recorded and has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class WireSamplingValues(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The sampling fields that a session may set too. `null` means absent."""

    temperature: Annotated[float, in_schema(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, in_schema(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, in_schema(minimum=-1, exclusiveMaximum=2**31)] | None = None
    min_p: Annotated[float, in_schema(minimum=0, maximum=1)] | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, in_schema(minimum=0.01, maximum=100)] | None = None
    logit_bias: Biases | None = None
    max_tokens: AtLeastOne | None = None
    stop: Stop | Annotated[list[Stop], in_schema(maxItems=64)] | None = None


class WireSampling(WireSamplingValues, forbid_unknown_fields=True, kw_only=True):
    """The fields that both routes have. Honoured ones are typed, the others are only noticed."""

    model: str | None = None
    sampling_seed: Seed | None = None
    stop_token_ids: list[NotNegative] | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    min_new_tokens: NotNegative | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31), in_schema(**{"not": {"const": 0}})] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    routed_dp_rank: Rank | None = None
    data_parallel_rank: Rank | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    response_format: WireResponseFormat | None = None
    structured_outputs: WireStructuredOutputs | None = None
    regex: NotBlank | None = None
    ebnf: NotBlank | None = None
    json_schema: dict[str, object] | str | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: NotBlank | None = None
    guided_choice: Choices | None = None
    guided_grammar: NotBlank | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    n: One | None = None

    user: Recorded = UNSET
    metadata: Recorded = UNSET
    session_id: Recorded = UNSET
    store: Recorded = UNSET
    service_tier: Recorded = UNSET
    prompt_cache_key: Recorded = UNSET
    prompt_cache_retention: Recorded = UNSET
    safety_identifier: Recorded = UNSET

    input_ids: Unread = UNSET
    prompt_token_ids: Unread = UNSET
    return_meta_info: Unread = UNSET
    return_hidden_states: Unread = UNSET
    return_routed_experts: Unread = UNSET
    rid: Unread = UNSET
    request_id: Unread = UNSET
    use_beam_search: Unread = UNSET
    length_penalty: Unread = UNSET
    early_stopping: Unread = UNSET
    lora_path: Unread = UNSET
    session_params: Unread = UNSET
    custom_logit_processor: Unread = UNSET
    custom_params: Unread = UNSET
    logits_processors: Unread = UNSET
    stop_regex: Unread = UNSET
    bad_words: Unread = UNSET
    allowed_token_ids: Unread = UNSET
    prompt_logprobs: Unread = UNSET
    stream_reasoning: Unread = UNSET


class WirePromptSampling(WireSampling, forbid_unknown_fields=True, kw_only=True):
    """The same of chats and completions, with hints for prefilling apart, which SGLang's Responses have not."""

    disagg_prefill_dp_rank: Rank | None = None
    bootstrap_host: Host | None = None
    bootstrap_port: Annotated[int, Meta(ge=1, lt=2**16)] | None = None
    bootstrap_room: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


REFUSED: dict[str, str] = {
    "input_ids": "the server alone decides which ids go to the engine",
    "prompt_token_ids": "the server alone decides which ids go to the engine",
    "return_meta_info": "the server alone sets it",
    "return_hidden_states": "not supported",
    "return_routed_experts": "the server alone sets it",
    "rid": "the server alone chooses request ids",
    "request_id": "the server alone chooses request ids",
    "use_beam_search": "tokens are sampled; beams have no rollout",
    "length_penalty": "tokens are sampled; beams have no rollout",
    "early_stopping": "tokens are sampled; beams have no rollout",
    "lora_path": "a session's `policy` names its LoRA",
    "session_params": "a session is named by its path or its header, and its ids are kept here",
    "custom_logit_processor": "a request brings no code",
    "custom_params": "a request brings no code",
    "logits_processors": "a request brings no code",
    "stop_regex": "stop strings are no patterns; send 'stop'",
    "bad_words": "not supported; send 'logit_bias'",
    "allowed_token_ids": "not supported; send a grammar or 'logit_bias'",
    "prompt_logprobs": "only what is sampled has logprobs",
    "stream_reasoning": "a stream has the reasoning as it comes",
}

NEUTRAL: tuple[object, ...] = (False,)
"""Values beside null with which a refused field asks for nothing; fields for which these ask for something are in
`NEUTRAL_OF`."""

NEUTRAL_OF: dict[str, tuple[object, ...]] = {
    "length_penalty": (1, 1.0),
    "lora_path": ("",),
    "session_params": ({},),
    "custom_params": ({},),
    "logits_processors": ([],),
    "stop_regex": ("", []),
    "bad_words": ([],),
    "stream_reasoning": (True,),
    "modalities": (["text"],),
    "best_of": (1,),
    "functions": ([],),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "truncation": ("disabled",),
    "context_management": ([],),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """The top-level fields of one route's requests, in order, and the treatment of each; `refused` has the reasons.

    `accepted` are the names open to a request.
    """

    names: tuple[str, ...]
    recorded: tuple[str, ...]
    refused: Mapping[str, str]
    accepted: tuple[str, ...]

    def rule_of(self, name: str) -> Rule:
        """The rule of a known field."""
        if name in self.refused:
            return Rule.REFUSED
        return Rule.RECORDED if name in self.recorded else Rule.HONOURED


def field_rules(
    struct: type[msgspec.Struct], *, refused: Mapping[str, str], as_all: Mapping[str, str] = REFUSED
) -> FieldRules:
    """The rules of a route: its struct's fields as a client names them, and the reasons for its refusals, those of
    `as_all` and its own."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    all_refused = {**as_all, **refused}
    return FieldRules(
        names=tuple(types),
        recorded=tuple(name for name, type_ in types.items() if type_ == Recorded),
        refused=all_refused,
        accepted=tuple(name for name in types if name not in all_refused),
    )
