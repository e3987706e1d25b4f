"""Every parameter of the official SDKs, what becomes of it here, and a value of each to send.

The names are the SDKs' own, read from their types; what becomes of them is read from the dialects' tables, and the
words of a refusal come from the dialects. `python -m tests.parameters` writes docs/parameters.md: the recorded and the
refused fields of every request, an SDK's or not.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from stenograph.core.errors import StenographError
from stenograph.dialects.anthropic.dialect import CountTokensDialect, MessagesDialect
from stenograph.dialects.anthropic.fields import MESSAGES_FIELDS
from stenograph.dialects.base import CountDialect, Dialect, Incoming
from stenograph.dialects.common.sampling_fields import FieldRules, Rule
from stenograph.dialects.gemini.fields import CONFIG_FIELDS, GEMINI_FIELDS
from stenograph.dialects.openai.chat_fields import CHAT_FIELDS
from stenograph.dialects.openai.completions import COMPLETION_FIELDS
from stenograph.dialects.openai.dialect import ChatDialect, CompletionDialect
from stenograph.dialects.responses.dialect import ResponsesDialect
from stenograph.dialects.responses.fields import RESPONSES_FIELDS
from stenograph.dialects.settings import UnknownFields

PAGE = Path(__file__).parents[1] / "docs" / "parameters.md"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USER = [{"role": "user", "content": "Hello."}]
FUNCTION = {"name": "bash", "description": "Run.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FLAT_TOOL = {"type": "function", **FUNCTION}
CUSTOM_TOOL = {"name": "bash", "description": "Run.", "input_schema": SCHEMA}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@dataclass(frozen=True, kw_only=True)
class Route:
    """One call of an SDK: its parameters by name, each with a value to send. `base` is a request without any of them.

    `others` are values of honoured parameters that are refused; `company` is what a parameter needs beside it.
    """

    call: str
    path: str
    types: tuple[type, ...]
    rules: FieldRules
    base: Mapping[str, Any]
    values: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)
    company: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Every parameter that the SDK's types name."""
        return sorted({name for one in self.types for name in one.__annotations__})

    def body(self, name: str, value: Any) -> dict[str, Any]:
        """A request with one parameter."""
        return {**self.base, **self.company.get(name, {}), name: value}


SAMPLING = {"temperature": 0.5, "top_p": 0.5}
OPENAI = {
    **SAMPLING,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"7": 1.0},
    "seed": 7,
    "stop": ["x"],
    "max_tokens": 5,
    "model": "m",
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "u",
}
RECORDED = {
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "moderation": {"model": "omni-moderation-latest"},
}
CHAT = Route(
    call="chat.completions.create",
    path="/v1/chat/completions",
    types=(chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming),
    rules=CHAT_FIELDS,
    base={"messages": USER},
    values={
        **OPENAI,
        **RECORDED,
        "messages": USER,
        "audio": {"voice": "alloy", "format": "wav"},
        "function_call": "auto",
        "functions": [FUNCTION],
        "logprobs": True,
        "max_completion_tokens": 5,
        "modalities": ["text", "audio"],
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low",
        "response_format": OF_SCHEMA,
        "tool_choice": "none",
        "tools": [TOOL],
        "top_logprobs": 2,
        "verbosity": "low",
        "web_search_options": {"search_context_size": "low"},
    },
    others={"n": 2, "tools": [{"type": "custom", "custom": {"name": "x"}}]},
    company={
        "top_logprobs": {"logprobs": True},
        "stream_options": {"stream": True},
        "tool_choice": {"tools": [TOOL]},
        "parallel_tool_calls": {"tools": [TOOL]},
    },
)
TEXT = Route(
    call="completions.create",
    path="/v1/completions",
    types=(text_create_params.CompletionCreateParamsBase, text_create_params.CompletionCreateParamsStreaming),
    rules=COMPLETION_FIELDS,
    base={"prompt": "Hello."},
    values={**OPENAI, "prompt": "Hello.", "best_of": 1, "echo": False, "logprobs": 2, "suffix": ""},
    others={"n": 2, "best_of": 2, "echo": True, "suffix": "x"},
    company={"stream_options": {"stream": True}},
)
RESPONSES = Route(
    call="responses.create",
    path="/v1/responses",
    types=(response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming),
    rules=RESPONSES_FIELDS,
    base={"input": "Hello."},
    values={
        **SAMPLING,
        **RECORDED,
        "input": "Hello.",
        "model": "m",
        "stream": True,
        "user": "u",
        "access_programs": {"cyber": "standard"},
        "background": True,
        "background_options": {"completion_window": "soonest"},
        "context_management": [{"type": "compaction"}],
        "conversation": "conv_1",
        "image": {"context_compression": "disabled"},
        "include": ["reasoning.encrypted_content"],
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "max_tool_calls": 2,
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "prompt": {"id": "pmpt_1"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": [FLAT_TOOL],
        "top_logprobs": 2,
        "truncation": "auto",
    },
    others={
        "previous_response_id": "resp_1",
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
        "input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}],
    },
    company={
        "stream_options": {"stream": True},
        "tool_choice": {"tools": [FLAT_TOOL]},
        "parallel_tool_calls": {"tools": [FLAT_TOOL]},
    },
)
OF_MESSAGES: dict[str, Any] = {
    "messages": USER,
    "model": "m",
    "cache_control": {"type": "ephemeral"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "speed": "standard",
    "system": "Be brief.",
    "thinking": {"type": "disabled"},
    "tool_choice": {"type": "none"},
    "tools": [CUSTOM_TOOL],
    "user_profile_id": "p",
    "workspace_id": "w",
}
OTHER_MESSAGES = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
WITH_TOOL = {"tool_choice": {"tools": [CUSTOM_TOOL]}}
MESSAGES = Route(
    call="messages.create",
    path="/v1/messages",
    types=(message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming),
    rules=MESSAGES_FIELDS,
    base={"messages": USER, "max_tokens": 9, "model": "m"},
    values={
        **OF_MESSAGES,
        "container": "c",
        "diagnostics": {"previous_message_id": "msg_1"},
        "inference_geo": "eu",
        "max_tokens": 5,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "stop_sequences": ["x"],
        "stream": True,
    },
    others=OTHER_MESSAGES,
    company=WITH_TOOL,
)
BETA = Route(
    call="beta.messages.create",
    path="/v1/messages",
    types=(beta_create_params.MessageCreateParamsBase, beta_create_params.MessageCreateParamsStreaming),
    rules=MESSAGES_FIELDS,
    base=MESSAGES.base,
    values={
        **MESSAGES.values,
        "betas": ["b"],
        "billing_policy": "standard",
        "compaction": {"type": "auto"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "fallback_credit_token": "t",
        "fallbacks": [{"model": "other"}],
        "mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}],
        "thread": {"id": "t"},
    },
    others={**OTHER_MESSAGES, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    company=WITH_TOOL,
)
COUNT = Route(
    call="messages.count_tokens",
    path="/v1/messages/count_tokens",
    types=(message_count_tokens_params.MessageCountTokensParams,),
    rules=MESSAGES_FIELDS,
    base={"messages": USER, "model": "m"},
    values=OF_MESSAGES,
    others=OTHER_MESSAGES,
    company=WITH_TOOL,
)
ROUTES = (CHAT, TEXT, RESPONSES, MESSAGES, BETA, COUNT)


def _dialects() -> dict[str, Dialect | CountDialect]:
    refuse = UnknownFields.REFUSE
    return {
        CHAT.path: ChatDialect(token_text=str, model="m", unknown_fields=refuse),
        TEXT.path: CompletionDialect(token_text=str, model="m", unknown_fields=refuse),
        RESPONSES.path: ResponsesDialect(token_text=str, model="m", unknown_fields=refuse),
        MESSAGES.path: MessagesDialect(model="m", unknown_fields=refuse),
        COUNT.path: CountTokensDialect(unknown_fields=refuse),
    }


def words(route: Route, name: str, value: Any) -> str | None:
    """The message of the refusal of a request with one parameter; None if the dialect takes it."""
    dialect = _dialects()[route.path]
    try:
        dialect.decode(Incoming(body=json.dumps(route.body(name, value)).encode()))
    except StenographError as error:
        return str(json.loads(dialect.refusal(error, None).content)["error"]["message"])
    return None


KINDS = {
    "chats": (CHAT_FIELDS,),
    "completions": (COMPLETION_FIELDS,),
    "Messages": (MESSAGES_FIELDS,),
    "Responses": (RESPONSES_FIELDS,),
    "Gemini": (GEMINI_FIELDS, CONFIG_FIELDS),
}
"""The rules of each kind of request."""
ALL_BUT_GEMINI = [kind for kind in KINDS if kind != "Gemini"]


def page() -> str:
    """docs/parameters.md."""
    sdks = ", ".join(f"{name} {version(name)}" for name in ("openai", "anthropic"))
    return "\n".join(
        [
            "# Recorded and refused fields\n",
            "Any other field of a request is [honoured](http-api.md#fields-of-a-chat-request). Written by `python -m"
            " tests.parameters` from the dialects' tables.\n",
            f"Tests send each parameter that the types of {sdks} name, and hold its answer to this page.\n",
            "## Recorded\n",
            "Kept in the turn's record (`request.parameters.recorded`); of no effect.\n",
            _table("request", "fields", (f"| {kind} | {_listed(_recorded(kind))} |" for kind in KINDS)),
            "## Refused\n",
            "400 with these words, and the field's JSON pointer in `param`.\n",
            _table("request", "fields", "why", _refused_rows()),
            "## Refused values of honoured parameters\n",
            _table("SDK", "value", "words", map(_other_row, _others())),
        ]
    )


def _table(*columns_and_rows: Any) -> str:
    *columns, rows = columns_and_rows
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows, ""])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _recorded(kind: str) -> list[str]:
    return [name for fields in KINDS[kind] for name in fields.names if fields.rule_of(name) is Rule.RECORDED]


def _refused_rows() -> Iterator[str]:
    """A row for each reason, with the kinds of requests that share it: all, or some."""
    kinds_of: dict[tuple[str, str], list[str]] = {}
    for kind, tables in KINDS.items():
        for fields in tables:
            for name in fields.names:
                if name in fields.refused:
                    kinds_of.setdefault((fields.refused[name], name), []).append(kind)
    rows: dict[tuple[str, str], list[str]] = {}
    for (why, name), kinds in kinds_of.items():
        shown = "all but Gemini" if kinds == ALL_BUT_GEMINI else ", ".join(kinds)
        rows.setdefault((why, shown), []).append(name)
    return (f"| {kinds} | {_listed(names)} | {why} |" for (why, kinds), names in rows.items())


def _others() -> Iterator[tuple[Route, str]]:
    """Each refused value once, though two calls share a route's words."""
    seen: set[str] = set()
    for route in ROUTES:
        for name in route.others:
            said = words(route, name, route.others[name]) or ""
            if said not in seen:
                seen.add(said)
                yield route, name


def _other_row(other: tuple[Route, str]) -> str:
    route, name = other
    value = route.others[name]
    said = (words(route, name, value) or "").replace("|", "\\|")
    return f"| `{route.call}` | `{name}={json.dumps(value)}` | {said} |"


if __name__ == "__main__":
    PAGE.write_text(page())
