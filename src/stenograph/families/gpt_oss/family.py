"""gpt-oss: harmony, written by an encoder of ours whether the files bring a template or not.

The format would leave the reasoning of answered turns out of later prompts; here it stays, because a line's ids are
never written again. Two stop tokens end a reply: `<|return|>`, in whose place a later prompt has `<|end|>`, and
`<|call|>`, which stays. Source: the harmony response format as OpenAI publishes it.
"""

from stenograph.core.messages import Role
from stenograph.families.gpt_oss.grammar import HarmonyCallGrammar, before_answer
from stenograph.families.gpt_oss.harmony import HarmonyEncoder
from stenograph.families.gpt_oss.reply import (
    ANALYSIS,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyParser,
)
from stenograph.text.family import Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

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
