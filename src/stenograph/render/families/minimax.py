"""MiniMax-M2: every prompt opens the reasoning, which the model is to see again in later turns.

The stock template writes a reply's reasoning only after the last user message. Edited, a reply is always written with
its block, an empty one where it has no reasoning, as it was sampled after its prompt. The template shows one system
message, the first; another is dropped by the stock template and refused by this one.

Source: the chat template and the tokenizer in the files of MiniMax-M2.7.
"""

from stenograph.render.families.family import Edit, Family, Signs
from stenograph.render.parsers.minimax_calls import MiniMaxCalls
from stenograph.render.parsers.reply_syntax import ReplySyntax

_IS_LATE = "{%- if reasoning_content and loop.index0 > ns.last_user_index -%}"
_USER = "{%- elif message.role == 'user' -%}"
_REFUSAL = "only the first message can be a system message"

MINIMAX_M2 = Family(
    name="minimax-m2",
    summary="MiniMax-M2 to MiniMax-M2.7",
    signs=Signs(tokens=("]~b]", "[e~[", "<minimax:tool_call>", "<think>"), template=("<minimax:tool_call>", _IS_LATE)),
    edits=(
        Edit(old=_IS_LATE, new="{%- if true -%}"),
        Edit(
            old=_USER,
            new=f"{{%- elif message.role == 'system' -%}}{{{{- raise_exception('{_REFUSAL}') }}}}{_USER}",
        ),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(calls=MiniMaxCalls()),
)
