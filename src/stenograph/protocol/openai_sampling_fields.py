"""What the requests of OpenAI's chat and completions routes have in common: the structs, and the rule of each field."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType

Recorded = Raw | UnsetType
"""A field that is kept in the record as it came, or that is refused; its value is not looked at."""


class Rule(enum.StrEnum):
    """What is done with a field of a request."""

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

    type: str
    json_schema: WireJsonSchema | None = None


class WireStructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs`, as vLLM has it; one of its fields."""

    json: dict[str, object] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class WireStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`. `include_obfuscation` is OpenAI's padding of events, which we never send: it is recorded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class WireSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that both routes have. Honoured ones are typed, the others are only noticed."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: WireStreamOptions | None = None
    response_format: WireResponseFormat | None = None
    structured_outputs: WireStructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, object] | str | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    n: int | None = None

    user: Recorded = UNSET
    metadata: Recorded = UNSET
    session_id: Recorded = UNSET
    store: Recorded = UNSET
    service_tier: Recorded = UNSET
    prompt_cache_key: Recorded = UNSET
    prompt_cache_retention: Recorded = UNSET
    safety_identifier: Recorded = UNSET

    input_ids: Recorded = UNSET
    prompt_token_ids: Recorded = UNSET
    return_meta_info: Recorded = UNSET
    return_hidden_states: Recorded = UNSET
    return_routed_experts: Recorded = UNSET
    rid: Recorded = UNSET
    request_id: Recorded = UNSET
    use_beam_search: Recorded = UNSET


RECORDED: tuple[str, ...] = (
    "user",
    "metadata",
    "session_id",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)

REFUSED: dict[str, str] = {
    "input_ids": "the server alone decides which ids go to the engine",
    "prompt_token_ids": "the server alone decides which ids go to the engine",
    "return_meta_info": "the server alone sets it",
    "return_hidden_states": "not supported",
    "return_routed_experts": "the server alone sets it",
    "rid": "the server alone chooses request ids",
    "request_id": "the server alone chooses request ids",
    "use_beam_search": "tokens are sampled; beams have no rollout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """The top-level fields of one route's requests, in order, and what is done with each; `refused` says why."""

    names: tuple[str, ...]
    recorded: tuple[str, ...]
    refused: Mapping[str, str]

    def rule_of(self, name: str) -> Rule:
        """The rule of a known field."""
        if name in self.refused:
            return Rule.REFUSED
        return Rule.RECORDED if name in self.recorded else Rule.HONOURED


def field_rules(
    struct: type[WireSampling], *, recorded: tuple[str, ...] = (), refused: Mapping[str, str]
) -> FieldRules:
    """The rules of a route, from those that both have and its own."""
    names = tuple(field.name for field in msgspec.structs.fields(struct))
    return FieldRules(names=names, recorded=(*RECORDED, *recorded), refused={**REFUSED, **refused})
