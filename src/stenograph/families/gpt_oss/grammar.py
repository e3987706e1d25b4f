"""Grammars of harmony: one that makes a model call a function, and the frame around an answer.

Reasoning may come before either; one call a reply.

Source: the harmony response format as OpenAI publishes it, which has a call end the reply.
"""

from collections.abc import Sequence

from stenograph.families.gpt_oss.reply import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    START,
)
from stenograph.text.call_syntax import ForcedTool, Marker
from stenograph.text.grammar.held import BeforeAnswer
from stenograph.text.grammar.lark import json_value, quoted

_THOUGHT = "THOUGHT: /(?s:.)+/"


class HarmonyCallGrammar:
    """Grammar of harmony's calls; the model may choose either place that the format has for a recipient."""

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Marker) -> str:
        """One call, as llguidance's Lark; `parallel` makes no more of it."""
        del parallel
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        channel, message = marker(CHANNEL), marker(MESSAGE)
        lines = [f"start: ({_thought(marker)})? ({names})", _THOUGHT]
        for tool in tools:
            to, number = f" to={FUNCTIONS}{tool.name}", tool.number
            early = f"{quoted(to)} {channel} {quoted(f'{COMMENTARY} ')}"
            late = f"{channel} {quoted(f'{COMMENTARY}{to} ')}"
            body = f"{marker(CONSTRAIN)} {quoted('json')} {message} arguments_{number} {marker(CALL)}"
            lines.append(f"call_{number}: ({early} | {late}) {body}")
            lines.append(f"arguments_{number}: {json_value(tool.schema)}")
        return "\n".join(lines) + "\n"


def before_answer(marker: Marker) -> BeforeAnswer:
    """A reply up to its answer: reasoning, if the model wants any, and the header of the final channel."""
    header = f"{marker(CHANNEL)} {quoted(FINAL)} {marker(MESSAGE)}"
    return BeforeAnswer(rules=(f"start: ({_thought(marker)})? {header} answer", _THOUGHT))


def _thought(marker: Marker) -> str:
    """Reasoning, and the beginning of the next message."""
    return (
        f"{marker(CHANNEL)} {quoted(ANALYSIS)} {marker(MESSAGE)} THOUGHT? {marker(END)} {marker(START)}"
        f" {quoted('assistant')}"
    )
