"""A hint names a field only where it is what was meant, and only one that would be accepted."""

import json
import re

import pytest

from stenograph.core.errors import InvalidRequest
from stenograph.dialects.common.pointers import nearest
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.openai.chat_fields import CHAT_FIELDS
from stenograph.dialects.openai.completions import COMPLETION_FIELDS, decode_completion
from stenograph.dialects.settings import UnknownFields

MESSAGES = [{"role": "user", "content": "hi"}]

NO_NAME_OF_OURS = (
    "session", "sessions", "conversation_id", "thread_id", "chat_id", "extra_body", "extra_headers",
    "timeout", "provider", "route", "models", "transforms", "plugins", "reasoning", "thinking", "enable_thinking",
    "thinking_budget", "verbose", "top_a", "top_n", "top_n_sigma", "min_k", "min_tokens_to_keep", "typical_p", "tfs",
    "mirostat", "mirostat_tau", "mode", "name", "names", "num_ctx", "num_keep", "keep_alive", "format", "raw", "images",
    "prefix", "text", "texts", "input", "inputs", "system", "system_prompt", "instructions", "include", "truncation",
    "background", "max_tool_calls", "grammar", "cache_prompt", "cache_salt", "id_slot", "n_probs", "n_keep",
    "dry_multiplier", "xtc_probability", "samplers", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "sampling_params", "image_data", "extra_key", "bootstrap_pair_key",
    "kv_transfer_params", "vllm_xargs", "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag",
    "add_bos_token", "request", "weight_version", "return_tokens", "repeat_last_n", "penalty_alpha", "do_sample",
    "num_beams", "use_cache", "token_healing", "watermark", "best", "details", "functions_call", "tool", "web_search",
    "safe_prompt", "safety_settings", "generation_config", "candidate_count", "top_logits", "score", "speed",
)  # fmt: skip
"""Fields of other servers and clients that are no slip of one of ours, but for those in `MEANT`."""

MEANT = {
    "tool": "tools", "models": "model", "temprature": "temperature", "temperture": "temperature",
    "Temperature": "temperature",
    "topP": "top_p", "top-k": "top_k", "maxTokens": "max_tokens", "max_token": "max_tokens", "min_token": "min_tokens",
    "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stops": "stop", "stop_sequences": "stop",
    "stop_token_id": "stop_token_ids", "logprob": "logprobs", "top_logprob": "top_logprobs", "seeds": "seed",
    "frequency_penality": "frequency_penalty", "repetition_penalities": None, "tool_choices": "tool_choice",
    "skip_special_token": "skip_special_tokens", "chat_template_kwarg": "chat_template_kwargs", "mesages": "messages",
    "respones_format": "response_format", "stoer": "store", "streem": "stream",
}  # fmt: skip


def hint_in(message: str) -> str | None:
    found = re.search(r"Did you mean '([^']+)'", message)
    return None if found is None else found[1]


def hint_of(name: str) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(json.dumps({"messages": MESSAGES, name: "x"}).encode())
    return hint_in(caught.value.message)


@pytest.mark.parametrize("name", NO_NAME_OF_OURS)
def test_a_field_of_another_server_is_no_slip_of_ours(name: str) -> None:
    assert hint_of(name) == MEANT.get(name)


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
def test_a_slip_of_the_pen_is_understood(name: str, meant: str | None) -> None:
    assert hint_of(name) == meant


def test_no_known_name_is_taken_for_a_slip_of_another() -> None:
    for rules in (CHAT_FIELDS, COMPLETION_FIELDS):
        for name in rules.names:
            assert nearest(name, [one for one in rules.accepted if one != name]) == "", name


def test_a_hint_names_only_what_would_be_accepted() -> None:
    for rules, prompt in ((CHAT_FIELDS, {"messages": MESSAGES}), (COMPLETION_FIELDS, {"prompt": "x"})):
        decode = decode_chat if rules is CHAT_FIELDS else decode_completion
        for name in rules.names:
            for slip in (f"{name}s", name.removesuffix("s"), f"{name[:-2]}{name[:-3:-1]}"):
                if slip in rules.names:
                    continue
                with pytest.raises(InvalidRequest) as caught:
                    decode(json.dumps({**prompt, slip: "x"}).encode())
                hint = hint_in(caught.value.message)
                assert hint is None or hint in rules.accepted, (slip, hint)


def test_an_unknown_field_is_refused_with_the_flag_that_takes_it() -> None:
    for decode, prompt in ((decode_chat, {"messages": MESSAGES}), (decode_completion, {"prompt": "x"})):
        raw = json.dumps({**prompt, "extra_key": 1}).encode()
        with pytest.raises(InvalidRequest, match="--unknown-fields record") as caught:
            decode(raw)
        assert caught.value.param == "/extra_key"
        assert decode(raw, unknown_fields=UnknownFields.RECORD).recorded == {"extra_key": "1"}
    inside = {"messages": [{"role": "user", "content": "x", "contents": "y"}]}
    with pytest.raises(InvalidRequest) as caught:  # which the flag does not take
        decode_chat(json.dumps(inside).encode())
    assert "--unknown-fields" not in caught.value.message
    assert hint_in(caught.value.message) == "content"


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ({"role": "user", "content": [{"type": "text", "txet": "x"}]}, "text"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "argument": "{}"}}]}, "arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "content": "x", "function": {"name": "f"}}]}, None),
        ({"role": "user", "content": "x", "image": []}, None),
        ({"role": "user", "content": "x", "argument": "x"}, None),
    ],
)
def test_a_hint_inside_of_a_message_is_of_the_object_that_it_stands_in(
    message: dict[str, object], meant: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(json.dumps({"messages": [message]}).encode())
    assert hint_in(caught.value.message) == meant
