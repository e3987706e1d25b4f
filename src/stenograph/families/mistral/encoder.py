"""Mistral's instruct formats of the Tekken tokenizers, versions 3, 7, 11 and 13: conversations to text.

Owns the published frames. Two differences, to be append-only: the tool list stands before the first user's message,
not before the last (version 13 has it so by itself), and version 3 says the system messages in the first user's
message, not in the last. Users' messages in a row are one; assistants' are not, because a reply is never written anew.
Client strings come sealed and are copied. Knows nothing of tokens.

Source: the encoders in the package mistral-common.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import UnrenderableMessage
from stenograph.families.mistral.calls import ARGS, ID_MARK, TOOL_CALLS
from stenograph.model.tekken import BOS, EOS

THINK, THINK_END = "[THINK]", "[/THINK]"

_JOINED = "\n\n"
_UNSAFE_ESCAPES = ("\\u", "\\/")
"""With these JSON can spell a control token without looking like it."""

_Dict = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralEncoder:
    """A Template. `version` is the tokenizer's; `thinks`: it has tokens for reasoning; else reasoning is not shown."""

    version: int
    thinks: bool = False
    names: frozenset[str] = frozenset()

    def render(
        self, messages: Sequence[_Dict], tools: Sequence[object] | None, add_generation_prompt: bool, kwargs: _Dict
    ) -> str:
        """The conversation's text; nothing more asks for a reply.

        Raises UnrenderableMessage: a tool that is no function, or tools and no user.
        """
        del add_generation_prompt, kwargs
        system = ""
        if self.version == 3:
            system = "".join(
                f"{_content(one)}{_JOINED}" for one in messages if one["role"] == "system" and one["content"]
            )
            messages = [one for one in messages if one["role"] != "system"]
            if not messages or messages[0]["role"] != "user":
                messages = [{"role": "user", "content": ""}, *messages]
        users = [one for one in messages if one["role"] == "user"]
        if tools and not users:
            raise UnrenderableMessage(
                "The model's format has its tools beside a user's message; send one.", blame=Blame(RequestPart.TOOLS)
            )
        opening = f"[AVAILABLE_TOOLS]{_tool_list(tools)}[/AVAILABLE_TOOLS]" if tools else ""
        pieces = [BOS]
        calls: Sequence[_Dict] = ()
        for role, group in groupby(messages, key=lambda one: one["role"]):
            run = list(group)
            if role == "user":
                content = _JOINED.join(text for one in run if (text := _content(one)))
                pieces.append(f"{opening}[INST]{system}{content}[/INST]")
                opening = system = ""
            elif role == "assistant":
                pieces += map(self._reply, run)
                calls = [call for one in run for call in _calls(one)]
            elif role == "tool":
                pieces += map(self._result, self._in_order(run, calls))
            else:
                pieces += [f"[SYSTEM_PROMPT]{_content(one)}[/SYSTEM_PROMPT]" for one in run]
        return "".join(pieces)

    def _reply(self, message: _Dict) -> str:
        content, calls = _content(message), _calls(message)
        reasoning = message.get("reasoning_content")
        content = f"{THINK}{reasoning}{THINK_END}{content}" if self.thinks and reasoning else content.rstrip(" ")
        if not calls:
            return content + EOS
        if self.version < 11:
            listed = json.dumps([_call_object(call) for call in calls], ensure_ascii=False)
            return f"{content}{TOOL_CALLS}{listed}{EOS}"
        return content + "".join(map(self._named_call, calls)) + EOS

    def _named_call(self, call: _Dict) -> str:
        function = _dict(call["function"])
        call_id = f"{ID_MARK}{call['id']}" if self.version == 11 and call["id"] else ""
        return f"{TOOL_CALLS}{function['name']}{call_id}{ARGS}{json.dumps(_arguments(function), ensure_ascii=False)}"

    def _result(self, message: _Dict) -> str:
        content, call_id = _content(message), str(message.get("tool_call_id") or "")
        if self.version == 3:
            content = f'{{"content": {_json_of(content)}, "call_id": {json.dumps(call_id, ensure_ascii=False)}}}'
        elif self.version < 13:
            content = f"{call_id}[TOOL_CONTENT]{content}"
        return f"[TOOL_RESULTS]{content}[/TOOL_RESULTS]"

    def _in_order(self, results: Sequence[_Dict], calls: Sequence[_Dict]) -> Sequence[_Dict]:
        """Results in the order of the calls from version 11 on; those that answer no call last."""
        if self.version < 11:
            return results
        places = {call["id"]: place for place, call in enumerate(calls)}
        return sorted(results, key=lambda one: places.get(one.get("tool_call_id"), len(places)))


def _tool_list(tools: Sequence[object]) -> str:
    return json.dumps([{"type": "function", "function": _function(tool)} for tool in tools], ensure_ascii=False)


def _function(tool: object) -> _Dict:
    function = _dict(_dict(tool).get("function"))
    if not isinstance(function.get("name"), str):
        raise UnrenderableMessage(
            "A tool of this model must be a function with a name.", blame=Blame(RequestPart.TOOLS)
        )
    described = {"name": function["name"], "description": function.get("description") or ""}
    return {**described, "parameters": function.get("parameters") or {}}


def _call_object(call: _Dict) -> _Dict:
    function = _dict(call["function"])
    call_id = {"id": call["id"]} if call["id"] else {}
    return {"name": function["name"], "arguments": _arguments(function), **call_id}


def _arguments(function: _Dict) -> object:
    return function["arguments"] or {}


def _json_of(content: str) -> str:
    """A JSON result is shown as JSON, any other as a string; an empty one as an empty object."""
    if not content:
        return "{}"
    try:
        value: object = json.loads(content)
    except (RecursionError, ValueError):
        value = content
    else:
        if any(escape in content for escape in _UNSAFE_ESCAPES):
            return content
    return json.dumps(value, ensure_ascii=False)


def _content(message: _Dict) -> str:
    return str(message["content"] or "")


def _calls(message: _Dict) -> Sequence[_Dict]:
    return cast("Sequence[_Dict]", message.get("tool_calls") or ())


def _dict(value: object) -> _Dict:
    return cast("_Dict", value) if isinstance(value, Mapping) else {}
