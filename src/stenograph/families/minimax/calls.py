"""MiniMax-M2's calls: one `<minimax:tool_call>` block of all calls, each an `<invoke name="…">` with its parameters.

A parameter is bare text, typed by the tool's schema. Only the block's two markers are tokens of their own.

Source: the chat template of MiniMax-M2.7.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import CallText, ForcedTool
from stenograph.text.grammar.argument_grammar import ArgumentFrame, argument_rules, plain_name
from stenograph.text.grammar.lark import quoted
from stenograph.text.tagged_values import TaggedScanner, ValueSearch, ValueTags
from stenograph.text.typed_arguments import arguments_json

_LINE = "\n"
OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"

_INVOKE, _INVOKE_CLOSE = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_CLOSE = "<parameter name=", "</parameter>"
_MAX_NAME_CHARS = 256
_HEAD = rf'{_PARAMETER}"([^<>\n]{{1,{_MAX_NAME_CHARS}}})">'
_TAGS = ValueTags(
    head=_HEAD,
    max_head_chars=len(f'{_PARAMETER}"">') + _MAX_NAME_CHARS,
    close=_PARAMETER_CLOSE,
    followers=((_PARAMETER,), (_INVOKE_CLOSE, _INVOKE), (_INVOKE_CLOSE, CLOSE)),
    block_close=CLOSE,
)
_CALL = re.compile(rf'\s*{_INVOKE}"([^"<>\n]+)">')
_CALL_END = re.compile(rf"\s*{_INVOKE_CLOSE}\s*")
_ARGUMENT = re.compile(rf"\s*{_HEAD}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxCalls:
    """The syntax. `lead` is what the template writes between content and the block."""

    lead: str = "\n"
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker that begins a block."""
        return (OPEN,)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of the block; all within it is plain text."""
        return (OPEN, CLOSE)

    def scanner(self, opener: str) -> TaggedScanner:
        """Looks past values."""
        del opener
        return TaggedScanner(_TAGS)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or none of them, if one is malformed; arguments as the tools' schemas type them."""
        del opener
        text, at = f"{body}{CLOSE}\n", 0
        calls: list[CallText] = []
        while head := _CALL.match(text, at):
            found = _read_arguments(text, head.end())
            if found is None:
                return ParseProblem.TOOL_CALL_WRONG_SHAPE
            arguments, at = found
            calls.append(CallText(name=head[1], arguments=arguments_json(arguments, tools.get(head[1]))))
        return tuple(calls) if calls and text[at:].strip() == CLOSE else ParseProblem.TOOL_CALL_WRONG_SHAPE

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A block that is not closed has no calls."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """A block with the white space of the template, which has a line break before it too."""
        frame = ArgumentFrame(
            head=lambda name: quoted(f'{_PARAMETER}"{name}">'),
            tags=_TAGS,
            close_item=quoted(_PARAMETER_CLOSE),
            after=_LINE,
        )
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        opening = f"{quoted(self.lead)} {marker(OPEN)} {quoted(_LINE)}"
        lines = [
            f"start: {opening} one_call{'+' if parallel else ''} {marker(CLOSE)}",
            f"one_call: {names}",
        ]
        for tool in tools:
            items, rules = argument_rules(tool, frame)
            head, tail = quoted(f'{_INVOKE}"{plain_name(tool.name)}">{_LINE}'), quoted(_INVOKE_CLOSE + _LINE)
            lines.append(f"call_{tool.number}: {head} {items} {tail}")
            lines += rules
        return "\n".join([*lines, *frame.shared_rules()]) + "\n"


def _read_arguments(text: str, at: int) -> tuple[list[tuple[str, str]], int] | None:
    """A call's arguments, as name and text, and where its own end ends. None: it is not well formed."""
    arguments: list[tuple[str, str]] = []
    while opened := _ARGUMENT.match(text, at):
        ended = ValueSearch(_TAGS, opened.end()).find(text)
        if ended is None:
            return None
        arguments.append((opened[1], text[opened.end() : ended.start()]))
        at = ended.end()
    closed = _CALL_END.match(text, at)
    return (arguments, closed.end()) if closed else None
