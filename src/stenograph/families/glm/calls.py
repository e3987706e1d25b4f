"""GLM's calls: a name, then keys and values in tags, `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…`.

A value is bare text, typed by the tool's schema. GLM-4.5 and 4.6 write each piece on a line of its own, later models
write none.

Source: the chat templates of GLM-4.5V, GLM-4.6V, GLM-4.7-Flash and GLM-5.
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

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE, VALUE_CLOSE = "<arg_value>", "</arg_value>"

_TAGS = ValueTags(
    head=VALUE, max_head_chars=len(VALUE), close=VALUE_CLOSE, followers=((KEY,), (CLOSE,)), block_close=CLOSE
)
_NAME = re.compile(r"[^\s<>{}\"']+")
_ARGUMENT = re.compile(rf"\s*{KEY}([^<>\n]+){KEY_CLOSE}\s*{VALUE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmCalls:
    """The syntax. `gap` is what the template writes between content and a block, and between a block's pieces."""

    gap: str = ""
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker that begins a call."""
        return (OPEN,)

    @property
    def lead(self) -> str:
        """Before a block the template writes what it writes within one."""
        return self.gap

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them are tokens of their own."""
        return (OPEN, CLOSE, KEY, KEY_CLOSE, VALUE, VALUE_CLOSE)

    def scanner(self, opener: str) -> TaggedScanner:
        """Looks past values."""
        del opener
        return TaggedScanner(_TAGS)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The one call of a block, its arguments as the tool's schema types them."""
        del opener
        text = f"{body}{CLOSE}\n"
        at = body.index(KEY) if KEY in body else len(body)
        name = body[:at].strip()
        arguments: list[tuple[str, str]] = []
        while opened := _ARGUMENT.match(text, at):
            ended = ValueSearch(_TAGS, opened.end()).find(text)
            if ended is None:
                return ParseProblem.TOOL_CALL_WRONG_SHAPE
            arguments.append((opened[1], text[opened.end() : ended.start()]))
            at = ended.end()
        if not _NAME.fullmatch(name) or text[at:].strip() != CLOSE:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        return (CallText(name=name, arguments=arguments_json(arguments, tools.get(name))),)

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A call that is not closed does not count."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """Calls with the white space of the family's template."""
        gap = quoted(self.gap) if self.gap else ""
        frame = ArgumentFrame(
            head=lambda name: f"{marker(KEY)} {quoted(name)} {marker(KEY_CLOSE)} {gap} {marker(VALUE)}",
            tags=_TAGS,
            close_item=marker(VALUE_CLOSE),
            after=self.gap,
        )
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        lines = ["start: one_call" + (f" ({gap} one_call)*" if parallel else ""), f"one_call: {names}"]
        for tool in tools:
            items, rules = argument_rules(tool, frame)
            name = quoted(plain_name(tool.name) + self.gap)
            lines.append(f"call_{tool.number}: {marker(OPEN)} {name} {items} {marker(CLOSE)}")
            lines += rules
        return "\n".join([*lines, *frame.shared_rules()]) + "\n"
