"""A grammar that makes a model of harmony call a function: after its reasoning, if it wants any; one call a reply.

Source: the harmony response format as OpenAI publishes it, which has a call end the reply.
"""

import json
from collections.abc import Callable, Sequence

from stenograph.render.parsers.call_syntax import ForcedTool, quoted
from stenograph.render.parsers.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MESSAGE,
    START,
)


class HarmonyCallGrammar:
    """Of the two places where the format has a recipient, the model may choose."""

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """One call, as llguidance's Lark; `parallel` makes no more of it."""
        del parallel
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        channel, message = marker(CHANNEL), marker(MESSAGE)
        thought = f"{channel} {quoted(ANALYSIS)} {message} THOUGHT? {marker(END)}"
        lines = [
            f"start: ({thought} {marker(START)} {quoted('assistant')})? ({names})",
            "THOUGHT: /(?s:.)+/",
        ]
        for tool in tools:
            to, number = f" to={FUNCTIONS}{tool.name}", tool.number
            early = f"{quoted(to)} {channel} {quoted(f'{COMMENTARY} ')}"
            late = f"{channel} {quoted(f'{COMMENTARY}{to} ')}"
            body = f"{marker(CONSTRAIN)} {quoted('json')} {message} arguments_{number} {marker(CALL)}"
            lines.append(f"call_{number}: ({early} | {late}) {body}")
            lines.append(f"arguments_{number}: %json {json.dumps(tool.schema, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"
