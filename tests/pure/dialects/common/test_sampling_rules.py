"""Rules are read with the chat route's names, checks and messages; a pointer says which value is wrong."""

import json
from typing import Any

import pytest

from stenograph.core.errors import InvalidJson, InvalidRequest
from stenograph.core.sampling_rules import RULED, SamplingRules
from stenograph.dialects.common.sampling_fields import WireSamplingValues
from stenograph.dialects.common.sampling_rules import decode_rules
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.completions import decode_completion
from stenograph.dialects.sessions import decode_create

BAD: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", 101), ("temperature", "hot"), ("temperature", True), ("top_p", 0),
    ("top_p", 1.5), ("top_k", -2), ("top_k", 0.5), ("min_p", 2), ("seed", 2**64), ("seed", "1"),
    ("frequency_penalty", 3), ("presence_penalty", -3), ("repetition_penalty", 0), ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("logit_bias", {str(i): 1 for i in range(10_001)}),
    ("max_tokens", 0), ("max_tokens", 2**31), ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 65), ("stop", 7),
]  # fmt: skip


def refused(rules: Any, *, prefix: str = "") -> InvalidRequest:
    """The error of rules: those of a session, or with no prefix those of a file."""
    decode, value = (decode_create, {"sampling": rules}) if prefix else (decode_rules, rules)
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(value).encode())
    return caught.value


def test_the_names_are_the_fields_that_rules_may_set() -> None:
    assert sorted(WireSamplingValues.__struct_fields__) == sorted(RULED)


def test_values_are_those_that_a_chat_would_have() -> None:
    fields = {"temperature": 0, "top_k": -1, "stop": "x", "logit_bias": {"7": 1, "3": -1}, "max_tokens": 5}
    chat = decode_chat(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode())
    rules = decode_rules(json.dumps({"default": None, "force": {**fields, "seed": None}}).encode())
    assert rules == SamplingRules(force={name: getattr(chat.params, name) for name in fields})


@pytest.mark.parametrize("body", [b"{}", b'{"sampling": null}', b""])
def test_a_session_without_rules_has_none(body: bytes) -> None:
    assert decode_create(body)[1] is None


@pytest.mark.parametrize(("name", "value"), BAD)
@pytest.mark.parametrize("part", ["default", "force"])
@pytest.mark.parametrize("prefix", ["", "/sampling"])
def test_a_value_is_refused_as_the_chat_route_refuses_it(prefix: str, part: str, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(json.dumps({"messages": [{"role": "user", "content": "a"}], name: value}).encode())
    error = refused({part: {name: value}}, prefix=prefix)
    assert (error.message, error.param) == (caught.value.message, f"{prefix}/{part}{caught.value.param}")


@pytest.mark.parametrize("name", ["min_tokens", "max_completion_tokens", "stop_token_ids", "response_format", "model"])
@pytest.mark.parametrize("part", ["default", "force"])
@pytest.mark.parametrize("prefix", ["", "/sampling"])
def test_another_name_is_refused_with_those_that_there_are(prefix: str, part: str, name: str) -> None:
    error = refused({part: {name: 1}}, prefix=prefix)
    assert error.param == f"{prefix}/{part}/{name}"
    assert all(known in error.message for known in RULED)


def test_a_slip_of_the_pen_gets_a_hint() -> None:
    assert "Did you mean 'temperature'?" in refused({"force": {"temprature": 1}}).message
    assert "Did you mean 'max_tokens'?" in refused({"force": {"max_new_tokens": 1}}).message


@pytest.mark.parametrize("prefix", ["", "/sampling"])
def test_a_part_is_a_default_or_forced(prefix: str) -> None:
    error = refused({"defaults": {}}, prefix=prefix)
    assert (error.param, error.message) == (
        f"{prefix}/defaults",
        "Unknown field 'defaults': sampling sets default, force. Did you mean 'default'?",
    )
    assert refused({"force": []}, prefix=prefix).param == f"{prefix}/force"
    assert refused([], prefix=prefix).param == (prefix or None)


def test_an_unknown_option_beside_the_rules_is_refused_as_before() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_create(b'{"samplings": {}}')
    assert (caught.value.param, caught.value.message) == (
        "/samplings",
        "Unknown field 'samplings'. Did you mean 'sampling'?",
    )


@pytest.mark.parametrize("text", [b"", b"{", b"\xff"])
def test_text_that_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidJson):
        decode_rules(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, set()),
        (dict.fromkeys(RULED), set()),
        ({"temperature": 1, "top_p": 1, "stop": [], "logit_bias": {}}, {"temperature", "top_p", "stop", "logit_bias"}),
        ({"max_tokens": 3, "sampling_seed": 4}, {"max_tokens", "seed"}),
    ],
)
def test_a_request_names_what_its_client_gave_also_neutral_values_and_other_names(
    fields: dict[str, Any], said: set[str]
) -> None:
    chat = decode_chat(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode())
    assert chat.said == decode_completion(json.dumps({"prompt": "a", **fields}).encode()).said == said


def test_a_chat_s_max_completion_tokens_is_its_max_tokens() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 3}
    assert decode_chat(json.dumps(body).encode()).said == {"max_tokens"}
