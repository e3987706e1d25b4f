"""A family's tool calls as a table: markers, and how a template writes calls; each form of arguments reads its own.

A block is the text from an opening marker to where it closes; it holds one call or several. The grammar that forces
calls follows from the table. Knows nothing of tokens, and nothing of a block's place in a reply, but for the rules of a
syntax itself.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParseProblem
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.text.grammar.lark import json_value, quoted

NAME, QUOTED_NAME, CALL_ID = "{name}", "{quoted name}", "{id}"
"""Places in a spelling: a call's name, its name as JSON, an id of the model's choice."""

Marker = Callable[[str], str]
"""A marker's text to its form in a grammar, with one model's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A call's name and its arguments: the text of a JSON object, as the model spelled it where it spells JSON.

    `call_id` only where the syntax has the model write one.
    """

    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedTool:
    """A tool for a grammar to call. `number` is unique in the grammar, `schema` the JSON Schema of its arguments."""

    number: int
    name: str
    schema: Mapping[str, object]


class BlockScanner(Protocol):
    """Finds where one block closes, in a growing text."""

    def find(self, text: str) -> tuple[int, int] | None:
        """The closing marker [start, end) in `text`, the text of the previous `find` and more; None: not yet.

        `text` begins after the opening marker. The text before `start` is the block's body.
        """
        ...


class CallGrammar(Protocol):
    """Grammar to make a family's model call. Stateless."""

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Marker) -> str:
        """One call, or with `parallel` one or more, as llguidance's Lark. It begins with `start:`, a rule named by no
        other: reasoning may be put before it (`held`).

        `marker` writes a marker as the grammar has to. Raises InvalidRequest: calls in this syntax cannot be forced.
        """
        ...


def unforceable(why: str) -> InvalidRequest:
    """The refusal of a call that a syntax cannot keep."""
    reason = f"tool_choice asks for a call that cannot be forced in the syntax of the model's calls: {why}"
    return InvalidRequest(reason, blame=Blame(RequestPart.TOOL_CHOICE))


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """Names allowed in a call: a regular expression of them, and the place."""

    like: str = "(?s:.*)"
    where: str = "in a call"

    def checked(self, name: str) -> str:
        """The name. Raises InvalidRequest: it cannot stand there."""
        if not re.fullmatch(self.like, name):
            raise unforceable(f"the name {name!r} cannot stand {self.where}")
        return name


PLAIN_NAME = NameRule(like=r"[^\s<>{}\"']+", where="between tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpelling:
    """Calls as a template writes them, with the places above.

    `begin` and `end` stand around all of a reply's calls, `between` two of them; `head` and `tail` around one call's
    arguments. With `is_in_lines`, `between` stands before the first call and after the last, too: as a literal of its
    own, for a grammar's lexer takes the longest fitting literal. `call_id` is a regular expression of ids.
    """

    head: str
    tail: str = ""
    begin: str = ""
    between: str = ""
    is_in_lines: bool = False
    end: str = ""
    call_id: str = ""
    names: NameRule = NameRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax(ABC):
    """A family's spelling of calls. Stateless; its methods never raise, whatever a model wrote.

    `openers` begin a block; with `only_at_start`, openers outside `markers` do so only after white space alone in the
    content. `lead` is the template's text between content and a block. `markers` are the spellings to be seen even
    where they are control tokens.
    """

    openers: tuple[str, ...]
    markers: tuple[str, ...]
    spelling: CallSpelling
    lead: str = ""
    only_at_start: bool = False

    @abstractmethod
    def scanner(self, opener: str) -> BlockScanner:
        """A scanner for a block begun by `opener`."""

    @abstractmethod
    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The calls of a closed block, or its problem. No calls: the block is text, and nothing is wrong."""

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The same of a block in which the reply ended: TOOL_CALL_UNCLOSED, unless the syntax needs no end."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Marker) -> str:
        """As `CallGrammar` has it, with the white space of the family's template."""
        spelling = self.spelling
        between = self.items(spelling.between, marker)
        one_call = "one_call" if not parallel else f"one_call ({between} one_call)*" if between else "one_call+"
        around = between if spelling.is_in_lines else ""
        begin, end = self.items(spelling.begin, marker), self.items(spelling.end, marker)
        start = _joined(begin, around, one_call, around, end)
        lines = [f"start: {start}", "one_call: " + " | ".join(f"call_{tool.number}" for tool in tools)]
        for tool in tools:
            arguments, rules = self.arguments(tool, marker)
            head = self.items(spelling.head, marker, spelling.names.checked(tool.name))
            lines.append(f"call_{tool.number}: {_joined(head, arguments, self.items(spelling.tail, marker))}")
            lines += rules
        return "\n".join([*lines, *self.shared_rules(marker)]) + "\n"

    def arguments(self, tool: ForcedTool, marker: Marker) -> tuple[str, Sequence[str]]:
        """The grammar's items of a call's arguments, and their rules: the JSON of an object, unless a form differs."""
        del marker
        return f"arguments_{tool.number}", (f"arguments_{tool.number}: {json_value(tool.schema)}",)

    def shared_rules(self, marker: Marker) -> Sequence[str]:
        """Rules named by the arguments of all tools."""
        del marker
        return ()

    def items(self, spelled: str, marker: Marker, name: str = "") -> str:
        """A spelled text as a grammar has it: each marker by itself, an id as its expression, else literals."""
        pieces = re.split(f"({'|'.join(map(re.escape, (*self.markers, CALL_ID)))})", spelled)
        return _joined(*(self._item(piece, marker, name) for piece in pieces if piece))

    def _item(self, piece: str, marker: Marker, name: str) -> str:
        if piece in self.markers:
            return marker(piece)
        if piece == CALL_ID:
            return f"/{self.spelling.call_id}/"
        return quoted(piece.replace(NAME, name) if NAME in piece else piece.replace(QUOTED_NAME, quoted(name)))


def _joined(*items: str) -> str:
    return " ".join(filter(None, items))
