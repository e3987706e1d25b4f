"""The spelling of reasoning and tool calls in a family's replies, as data."""

from dataclasses import dataclass

from stenograph.core.types import PromptEnd
from stenograph.text.call_syntax import CallSyntax
from stenograph.text.json_calls import HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarks:
    """Marks around reasoning, found only at the very start of a reply, or opened by the prompt.

    `lead` may come before `open`; of `after_open`, `before_close` and `after_close` as much as the model writes is
    taken for the frame, not for text. All but the markers themselves may be empty. `closes_bare`: a reply without
    reasoning may begin with `close` alone.
    """

    open: str = "<think>"
    close: str = "</think>"
    lead: str = ""
    after_open: str = "\n"
    before_close: str = "\n"
    after_close: str = "\n\n"
    closes_bare: bool = False

    def end_of(self, prompt: str) -> PromptEnd:
        """State of the reasoning after a prompt that ends with this text."""
        text = prompt.rstrip()
        if prompt.endswith(self.open):
            return PromptEnd.OPENS
        if prompt.endswith(self.close):
            return PromptEnd.CLOSES
        if text.endswith(self.open):
            return PromptEnd.OPENED
        return PromptEnd.CLOSED if text.endswith(self.close) else PromptEnd.SILENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySyntax:
    """Parts of a reply. None: the family has no reasoning, or no tool calls."""

    reasoning: ReasoningMarks | None = ReasoningMarks()
    calls: CallSyntax | None = HERMES

    def prompt_end(self, prompt: str) -> PromptEnd:
        """State of the reply's reasoning after a prompt that ends with this text."""
        return PromptEnd.SILENT if self.reasoning is None else self.reasoning.end_of(prompt)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts to be seen in a reply even where they are control tokens."""
        marks = self.reasoning
        return (
            *(() if marks is None else (marks.open, marks.close)),
            *(() if self.calls is None else self.calls.markers),
        )
