"""How a reply spells reasoning and tool calls, as data."""

from dataclasses import dataclass

from stenograph.render.parsers.call_syntax import CallSyntax
from stenograph.render.parsers.hermes import HermesCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """What stands around reasoning, which is only at the very start of a reply, or was opened by the prompt.

    `lead` may come before `open`; of `after_open`, `before_close` and `after_close` as much as the model writes is
    taken for the frame, not for text. All but the markers themselves may be empty.
    """

    open: str = "<think>"
    close: str = "</think>"
    lead: str = ""
    after_open: str = "\n"
    before_close: str = "\n"
    after_close: str = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySyntax:
    """What a reply is made of. None: the family has no reasoning, or no tool calls."""

    reasoning: ReasoningMarks | None = ReasoningMarks()
    calls: CallSyntax | None = HermesCalls()

    @property
    def markers(self) -> tuple[str, ...]:
        """What has to be seen in a reply even where it is a control token."""
        marks = self.reasoning
        return (
            *(() if marks is None else (marks.open, marks.close)),
            *(() if self.calls is None else self.calls.markers),
        )
