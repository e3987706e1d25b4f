"""Kimi's calls: a section of calls between control tokens, each with an id that has its name, and JSON arguments.

An id is `functions.NAME:NUMBER`, where the model counts; what comes after the name may be anything.

Source: the published chat templates of Kimi K2 Thinking and K2.5.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParseProblem
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import CallText, ForcedTool, is_json_object
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.hermes import JsonScanner

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_NAME = r"[^\s:<>]{1,256}"
_HEAD = re.compile(rf"\s*{re.escape(CALL)}\s*((?:functions\.)?+({_NAME}):[^\s<>]{{1,256}})\s*{re.escape(ARGUMENTS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiCalls:
    """The syntax. Nothing stands between content and a section."""

    lead: str = ""
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker that begins a section."""
        return (OPEN,)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of the section, and of each call in it."""
        return (OPEN, CALL, ARGUMENTS, CALL_CLOSE, CLOSE)

    def scanner(self, opener: str) -> JsonScanner:
        """Looks past JSON strings."""
        del opener
        return JsonScanner(CLOSE)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a section, or none of them, if one is malformed."""
        del opener, tools
        found = tuple(_calls(body))
        problem = next((one for one in found if isinstance(one, ParseProblem)), None)
        calls = tuple(one for one in found if isinstance(one, CallText))
        return problem or calls or ParseProblem.TOOL_CALL_WRONG_SHAPE

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A section that is not closed has no calls."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """A section without white space, as the templates write it.

        Raises InvalidRequest: a name that cannot stand in an id.
        """
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        lines = [
            f"start: {marker(OPEN)} one_call{'+' if parallel else ''} {marker(CLOSE)}",
            f"one_call: {marker(CALL)} ({names}) {marker(CALL_CLOSE)}",
        ]
        for tool in tools:
            if not re.fullmatch(_NAME, tool.name):
                reason = f"tool_choice asks for a call, but the name {tool.name!r} cannot stand in an id"
                raise InvalidRequest(reason, blame=Blame(RequestPart.TOOL_CHOICE))
            head = f"{quoted(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {marker(ARGUMENTS)}"
            lines.append(f"call_{tool.number}: {head} arguments_{tool.number}")
            lines.append(f"arguments_{tool.number}: {json_value(tool.schema)}")
        return "\n".join(lines) + "\n"


def _calls(body: str) -> Iterator[CallText | ParseProblem]:
    """The calls of a section's body in order, up to the first that is malformed."""
    rest = body
    while rest.strip():
        head = _HEAD.match(rest)
        rest = rest[head.end() :] if head else ""
        end = JsonScanner(CALL_CLOSE).find(rest)
        if head is None or end is None:
            yield ParseProblem.TOOL_CALL_WRONG_SHAPE
            return
        arguments = rest[: end[0]].strip()
        if not is_json_object(arguments):
            yield ParseProblem.TOOL_CALL_NOT_JSON
            return
        yield CallText(name=head[2], arguments=arguments, call_id=head[1])
        rest = rest[end[1] :]
