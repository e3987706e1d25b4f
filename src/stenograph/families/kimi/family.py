"""Kimi K2 Thinking and K2.5: frames of `<|im_…|>` tokens, reasoning in `<think>` on no lines of its own, and its calls.

The stock templates leave the reasoning out of the replies up to the last one without calls: they rewrite history. With
their two cuts edited, every reply keeps its block. A call is written by its id alone, which has the tool's name where
the model wrote it; edited, an id that is not of that form gets the name put before it.

Source: the published chat templates. The models' vocabulary is a tiktoken file, which is not read here: their folder
needs a tokenizer.json that somebody made of it.
"""

from stenograph.families.kimi.calls import CALL, CALL_CLOSE, CLOSE, KIMI_CALLS, OPEN
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_EARLY = "messages[:ns.last_non_tool_call_assistant_msg+1]"
_LATE = "messages[ns.last_non_tool_call_assistant_msg+1:]"
_ID = "{%- set formatted_id = tool_call['id'] -%}"
_NAMED_ID = (
    "{%- set formatted_id = tool_call['id'] if tool_call['id'].startswith('functions.')"
    " else 'functions.' ~ tool_call['function']['name'] ~ ':' ~ tool_call['id'] -%}"
)

KIMI_K2 = Family(
    name="kimi-k2",
    summary="Kimi K2 Thinking and K2.5",
    signs=Signs(tokens=("<|im_middle|>", OPEN, CALL, CALL_CLOSE, CLOSE), template=(_EARLY, _LATE, _ID)),
    edits=(Edit(old=_EARLY, new="[]"), Edit(old=_LATE, new="messages"), Edit(old=_ID, new=_NAMED_ID)),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=ReasoningMarks(after_open="", before_close="", after_close=""), calls=KIMI_CALLS),
)
