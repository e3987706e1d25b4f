"""Kimi K2 Thinking and K2.5: frames of `<|im_…|>` tokens, reasoning in `<think>` on no lines of its own, and its calls.

The stock templates leave the reasoning out of the replies up to the last one without calls: they rewrite history. With
their two cuts edited, every reply keeps its block. A call is written by its id alone: an id made by the model has the
tool's name in it; edited, an id of another form gets the name put before it.

Kimi's calls: a section of calls between control tokens, each with its name in its id, and JSON arguments.

An id is `functions.NAME:NUMBER`, where the model counts; anything may come after the name.

Source: the published chat templates. The models' vocabulary is a tiktoken file, not read here: their folder needs a
tokenizer.json made of it.
"""

import re

from stenograph.core.chat import ParseProblem
from stenograph.text.call_syntax import CALL_ID, NAME, CallSpelling, NameRule
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.json_calls import FramedCalls
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_NAME = r"[^\s:<>]{1,256}"
_SAMPLED_ID = rf"(?:functions\.)?+(?P<name>{_NAME}):[^\s<>]{{1,256}}"

KIMI_CALLS = FramedCalls(
    openers=(OPEN,),
    close=CLOSE,
    markers=(OPEN, CALL, ARGUMENTS, CALL_CLOSE, CLOSE),
    head=re.compile(rf"\s*{re.escape(CALL)}\s*(?P<id>{_SAMPLED_ID})\s*{re.escape(ARGUMENTS)}"),
    call_close=CALL_CLOSE,
    call=re.compile(r"(?P<arguments>(?s:.*))"),
    space=None,
    no_object=ParseProblem.TOOL_CALL_NOT_JSON,
    spelling=CallSpelling(
        begin=OPEN,
        head=f"{CALL}functions.{NAME}:{CALL_ID}{ARGUMENTS}",
        tail=CALL_CLOSE,
        end=CLOSE,
        call_id="[0-9]{1,4}",
        names=NameRule(like=_NAME, where="in an id"),
    ),
)

_EARLY = "messages[:ns.last_non_tool_call_assistant_msg+1]"
_LATE = "messages[ns.last_non_tool_call_assistant_msg+1:]"
_WRITTEN_ID = "{%- set formatted_id = tool_call['id'] -%}"
_NAMED_ID = (
    "{%- set formatted_id = tool_call['id'] if tool_call['id'].startswith('functions.')"
    " else 'functions.' ~ tool_call['function']['name'] ~ ':' ~ tool_call['id'] -%}"
)

KIMI_K2 = Family(
    name="kimi-k2",
    summary="Kimi K2 Thinking and K2.5",
    signs=Signs(tokens=("<|im_middle|>", OPEN, CALL, CALL_CLOSE, CLOSE), template=(_EARLY, _LATE, _WRITTEN_ID)),
    edits=(Edit(old=_EARLY, new="[]"), Edit(old=_LATE, new="messages"), Edit(old=_WRITTEN_ID, new=_NAMED_ID)),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=ReasoningMarks(after_open="", before_close="", after_close=""), calls=KIMI_CALLS),
)
