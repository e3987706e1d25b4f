"""Fields that clients of SGLang and vLLM send, on both routes: what they mean, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, CompletionRequest, TextView, Truncation
from stenograph.core.errors import InvalidRequest
from stenograph.core.routing import Routing
from stenograph.core.types import SamplingParams
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.completions import decode_completion
from stenograph.engine.sglang.request import routing_parts

Decode = Callable[..., ChatRequest | CompletionRequest]


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"prompt": "hi", **fields}).encode())


HINTS = (
    *("priority", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)
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
        ({"routed_dp_rank": -1}, "/routed_dp_rank"),
        ({"routed_dp_rank": 1, "data_parallel_rank": 2}, "/data_parallel_rank"),
        ({"data_parallel_rank": True}, "/data_parallel_rank"),
        ({"disagg_prefill_dp_rank": 2**31}, "/disagg_prefill_dp_rank"),
        ({"bootstrap_host": "a host"}, "/bootstrap_host"),
        ({"bootstrap_host": "host\n"}, "/bootstrap_host"),
        ({"bootstrap_host": ["host"]}, "/bootstrap_host"),
        ({"bootstrap_port": 0}, "/bootstrap_port"),
        ({"bootstrap_room": 2**63}, "/bootstrap_room"),
        ({"bootstrap_room": -1}, "/bootstrap_room"),
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
@pytest.mark.parametrize(
    ("fields", "routing"),
    [
        ({"priority": 3}, Routing(priority=3)),
        ({"priority": 0}, Routing(priority=0)),
        ({"routed_dp_rank": 0}, Routing(dp_rank=0)),
        ({"data_parallel_rank": 2}, Routing(dp_rank=2)),
        ({"routed_dp_rank": 2, "data_parallel_rank": 2}, Routing(dp_rank=2)),
        ({"routed_dp_rank": 2**31 - 1, "disagg_prefill_dp_rank": 1}, Routing(dp_rank=2**31 - 1, prefill_dp_rank=1)),
        (
            {"bootstrap_host": "prefill-0.pool", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1},
            Routing(bootstrap_host="prefill-0.pool", bootstrap_port=8998, bootstrap_room=2**63 - 1),
        ),
        (
            {"bootstrap_host": "[::1]", "bootstrap_room": 0},
            Routing(bootstrap_host="[::1]", bootstrap_room=0),
        ),
    ],
)
def test_routing_hints_are_kept_and_recorded(decode: Decode, fields: dict[str, Any], routing: Routing) -> None:
    request = decode(**fields)
    assert (request.routing, {name: json.loads(text) for name, text in request.recorded.items()}) == (routing, fields)


@ROUTES
def test_hints_that_are_null_are_none(decode: Decode) -> None:
    assert (decode(**dict.fromkeys(HINTS)).routing, decode(**dict.fromkeys(HINTS)).recorded) == (None, {})


@ROUTES
@given(data=st.data())
def test_a_hint_of_any_value_is_refused_or_sent_as_it_came(decode: Decode, data: st.DataObject) -> None:
    hosts = st.text("abz09.-_:[]% \n\u00e9", max_size=8)
    values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | hosts
    fields = data.draw(st.dictionaries(st.sampled_from(HINTS), values | st.integers(-2, 2**16), max_size=3))
    try:
        routing = decode(**fields).routing or Routing()
    except InvalidRequest as error:
        blamed = str(error.param)[1:]
    else:
        blamed = ""
        sent = json.loads(b"{" + b"".join(routing_parts(routing))[1:] + b"}")
        assert repr({name: sent.get(name) for name in fields}) == repr(fields)
        assert not set("\n\u00e9 ") & set(sent.get("bootstrap_host", ""))
    assert blamed == "" or blamed in fields


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
