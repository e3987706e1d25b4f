"""The interface of a family's tool calls: each syntax fills it, for reading calls and for forcing them.

A block is the text from an opening marker to where it closes; it holds one call or several. Knows nothing of tokens,
and nothing of where in a reply a block may stand, but for what a syntax says of itself here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool


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
    """A tool that a grammar may call. `number` is unique in the grammar, `schema` the JSON Schema of its arguments."""

    number: int
    name: str
    schema: Mapping[str, object]


class BlockScanner(Protocol):
    """Finds where one block closes, in a growing text."""

    def find(self, text: str) -> tuple[int, int] | None:
        """The closing marker [start, end) in `text`, which continues the text of the call before; None: not yet.

        `text` begins after the opening marker. What lies before `start` is the block's body.
        """
        ...


class CallGrammar(Protocol):
    """Grammar that makes a family's model call. Stateless."""

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """One call, or with `parallel` one or more, as llguidance's Lark. It begins with `start:`, a rule that no other
        rule names: reasoning may be put before it (`held`).

        `marker` writes a marker as the grammar has to. Raises InvalidRequest: calls in this syntax cannot be forced.
        """
        ...


class CallSyntax(CallGrammar, Protocol):
    """A family's spelling of calls. Stateless; its methods never raise on what a model wrote.

    `openers` begin a block; with `only_at_start`, those that are no `markers` only where nothing but white space of the
    content comes before. `lead` is what the template writes between content and a block. `markers` are the spellings
    that have to be seen even where they are control tokens.
    """

    @property
    def openers(self) -> tuple[str, ...]: ...
    @property
    def only_at_start(self) -> bool: ...
    @property
    def lead(self) -> str: ...
    @property
    def markers(self) -> tuple[str, ...]: ...

    def scanner(self, opener: str) -> BlockScanner:
        """A scanner for a block that `opener` began."""
        ...

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The calls of a closed block, or what is wrong with it. No calls: the block is text, and nothing is wrong."""
        ...

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The same of a block in which the reply ended: TOOL_CALL_UNCLOSED, unless the syntax needs no end."""
        ...


def is_json_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
