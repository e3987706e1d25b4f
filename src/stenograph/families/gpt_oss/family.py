"""gpt-oss: harmony, written by an encoder of ours whether the files bring a template or not.

The format would leave the reasoning of answered turns out of later prompts; here it stays, because a line's ids are
never written again. Two stop tokens end a reply: `<|return|>`, replaced by `<|end|>` in a later prompt, and `<|call|>`,
kept there. Source: the harmony response format as OpenAI publishes it.

Grammars of harmony: one to force a call, and the frame around an answer.

Reasoning may come before either; one call a reply.
"""

from collections.abc import Sequence

from stenograph.core.messages import Role
from stenograph.families.gpt_oss.harmony import HarmonyEncoder
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
    RETURN,
    START,
    HarmonyParser,
)
from stenograph.text.call_syntax import ForcedTool, Marker
from stenograph.text.family import Family, Signs
from stenograph.text.grammar.held import BeforeAnswer
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

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


GPT_OSS = Family(
    name="gpt-oss",
    summary="gpt-oss-20b and gpt-oss-120b",
    signs=Signs(tokens=(CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN), any_template=True),
    encoder=HarmonyEncoder(),
    roles=frozenset(Role),
    early_roles=frozenset(),
    shows_tools=True,
    tools_before_turns=True,
    syntax=ReplySyntax(
        reasoning=ReasoningMarks(
            open=f"{CHANNEL}{ANALYSIS}{MESSAGE}", close=END, after_open="", before_close="", after_close=""
        ),
        calls=None,
    ),
    forced_calls=HarmonyCallGrammar(),
    before_answer=before_answer,
    keeps_reasoning_apart=True,
    reply_stops=(RETURN, CALL, END),
    call_closing=CALL,
    reply_frame=(START, CHANNEL, CONSTRAIN, MESSAGE, END),
    make_parser=HarmonyParser,
)
