"""Kimi's calls: a section of calls between control tokens, each with an id that has its name, and JSON arguments.

An id is `functions.NAME:NUMBER`, where the model counts; what comes after the name may be anything.

Source: the published chat templates of Kimi K2 Thinking and K2.5.
"""

import re

from stenograph.core.chat import ParseProblem
from stenograph.text.call_syntax import CALL_ID, NAME, CallSpelling, NameRule
from stenograph.text.json_calls import FramedCalls

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_NAME = r"[^\s:<>]{1,256}"
_ID = rf"(?:functions\.)?+(?P<name>{_NAME}):[^\s<>]{{1,256}}"

KIMI_CALLS = FramedCalls(
    openers=(OPEN,),
    close=CLOSE,
    markers=(OPEN, CALL, ARGUMENTS, CALL_CLOSE, CLOSE),
    head=re.compile(rf"\s*{re.escape(CALL)}\s*(?P<id>{_ID})\s*{re.escape(ARGUMENTS)}"),
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
