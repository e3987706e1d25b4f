"""What a model family is: facts about its template and its replies, without behaviour."""

from dataclasses import dataclass

from stenograph.core.messages import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySyntax:
    """How a reply spells reasoning and tool calls. Reasoning only at the very start of a reply."""

    reasoning_open: str = "<think>"
    reasoning_close: str = "</think>"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A declaration. `template_source` None: the model's own template is used.

    `roles` are those that the template has a frame for; `shows_tools`: it writes out a tool list and calls;
    `tools_before_turns`: the tool list stands before the first turn and changes nothing after it, so a bridge
    need not render it. What closes a turn is not declared: it is read off the template. `opening_stops` are tokens
    that end a reply and also open the next message (GLM's `<|user|>` and `<|observation|>`).
    """

    name: str
    template_source: str | None
    roles: frozenset[Role]
    shows_tools: bool
    tools_before_turns: bool
    syntax: ReplySyntax = ReplySyntax()
    opening_stops: tuple[str, ...] = ()
