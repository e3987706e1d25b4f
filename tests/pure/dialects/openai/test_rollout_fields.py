"""Fields that clients of SGLang and vLLM send, on both routes: what they mean, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, CompletionRequest, TextView, Truncation
from stenograph.core.errors import InvalidRequest
from stenograph.core.types import SamplingParams
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.completions import decode_completion

Decode = Callable[..., ChatRequest | CompletionRequest]


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"prompt": "hi", **fields}).encode())


ROUTES = pytest.mark.parametrize("decode", [chat, completion])


@ROUTES
@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"min_tokens": 3}, SamplingParams(min_tokens=3)),
        ({"min_new_tokens": 3}, SamplingParams(min_tokens=3)),
        ({"min_new_tokens": 3, "min_tokens": 3, "max_tokens": 3}, SamplingParams(min_tokens=3, max_tokens=3)),
        ({"sampling_seed": 7}, SamplingParams(seed=7)),
        ({"sampling_seed": 7, "seed": 7}, SamplingParams(seed=7)),
        ({"sampling_seed": None, "min_new_tokens": None, "seed": None, "min_tokens": None}, SamplingParams()),
    ],
)
def test_a_field_may_have_either_of_its_names(decode: Decode, fields: dict[str, Any], params: SamplingParams) -> None:
    assert decode(**fields).params == params


@ROUTES
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 3, "min_new_tokens": 4}, "/min_new_tokens"),
        ({"seed": 1, "sampling_seed": 2}, "/sampling_seed"),
        ({"include_stop_str_in_output": False, "no_stop_trim": True}, "/no_stop_trim"),
        ({"min_tokens": 4, "max_tokens": 3}, "/min_tokens"),
        ({"min_new_tokens": 4, "max_tokens": 3}, "/min_new_tokens"),
        ({"min_tokens": -1}, "/min_tokens"),
        ({"sampling_seed": 2**64}, "/sampling_seed"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "/spaces_between_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "/truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "/truncation_side"),
        ({"priority": "high"}, "/priority"),
        ({"return_tokens_as_token_ids": "yes"}, "/return_tokens_as_token_ids"),
        ({"lora_path": "adapter"}, "/lora_path"),
        ({"stop_regex": "a+"}, "/stop_regex"),
        ({"return_hidden_states": True}, "/return_hidden_states"),
    ],
)
def test_what_does_not_go_together_is_blamed_on_the_name_that_was_sent(
    decode: Decode, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(**fields)
    assert caught.value.param == param
    assert param[1:] in caught.value.message or caught.value.message.startswith("Expected ")


@ROUTES
@pytest.mark.parametrize(
    ("fields", "view"),
    [
        ({}, TextView()),
        ({"skip_special_tokens": None, "no_stop_trim": None}, TextView()),
        ({"skip_special_tokens": True, "spaces_between_special_tokens": True}, TextView()),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, TextView(skips_special=False)),
        ({"no_stop_trim": True}, TextView(keeps_stop=True)),
        ({"include_stop_str_in_output": True, "no_stop_trim": True}, TextView(keeps_stop=True)),
    ],
)
def test_how_the_text_is_shown(decode: Decode, fields: dict[str, Any], view: TextView) -> None:
    assert decode(**fields).text == view


def test_a_chat_s_own() -> None:
    assert chat(separate_reasoning=False).text == TextView(separates_reasoning=False)
    assert chat(separate_reasoning=True).text == chat(separate_reasoning=None).text == TextView()
    assert chat(truncate_prompt_tokens=5).truncation == Truncation(num_tokens=5)
    assert chat(truncate_prompt_tokens=None).truncation is None


@ROUTES
def test_a_priority_is_kept_and_recorded(decode: Decode) -> None:
    assert (decode(priority=3).priority, decode(priority=3).recorded) == (3, {"priority": "3"})
    assert (decode(priority=None).priority, decode(priority=None).recorded) == (None, {})


@ROUTES
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lora_path", (None, "")),
        ("return_hidden_states", (None, False)),
        ("return_routed_experts", (None, False)),
        ("use_beam_search", (None, False)),
        ("length_penalty", (None, 1, 1.0)),
        ("bad_words", (None, [])),
        ("custom_params", (None, {})),
        ("stream_reasoning", (None, True)),
        ("rid", (None,)),
    ],
)
def test_a_refused_field_that_asks_for_nothing_changes_nothing(
    decode: Decode, name: str, values: tuple[object, ...]
) -> None:
    for value in values:
        request = decode(**{name: value})
        assert (request.params, request.recorded) == (SamplingParams(), {})


def test_a_chat_s_refused_fields_that_ask_for_nothing_change_nothing() -> None:
    neutral = {
        "add_generation_prompt": True, "continue_final_message": False, "echo": False, "best_of": 1,
        "modalities": ["text"], "functions": [], "add_special_tokens": False, "include_reasoning": True,
    }  # fmt: skip
    for name, value in neutral.items():
        assert chat(**{name: value}).recorded == {}
    for name, value in {**neutral, "add_generation_prompt": False, "best_of": 2, "include_reasoning": False}.items():
        if neutral[name] == value:
            continue
        with pytest.raises(InvalidRequest):
            chat(**{name: value})


def test_a_part_is_pointed_at_by_the_name_that_the_client_gave_it() -> None:
    pointer = chat(min_new_tokens=1, no_stop_trim=True, seed=1).spelling.pointer
    assert pointer(Blame(RequestPart.SAMPLING, path=("min_tokens",))) == "/min_new_tokens"
    assert pointer(Blame(RequestPart.TEXT_VIEW, path=("keeps_stop",))) == "/no_stop_trim"
    assert pointer(Blame(RequestPart.SAMPLING, path=("seed",))) == "/seed"
