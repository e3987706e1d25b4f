"""Qwen's XML calls: `<tool_call>` around `<function=name>`, and in it each argument in `<parameter=key>` as bare text.

An argument's text is not escaped, so it may hold any marker: a value ends where its closing marker is followed by a
marker allowed to come next. The template gives a value lines of its own, and so its end needs a line break too, never
found in JSON within a value; a value begun on its marker's line may end anywhere. The end of a whole call ends a value
as well: if a model forgets one closing marker, it loses that call, and not the next.

Source: the chat templates of Qwen3-Coder and Qwen3.5.
"""

import re

from stenograph.text.call_syntax import NAME, PLAIN_NAME, CallSpelling
from stenograph.text.element_calls import ElementCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_PARAMETER = r"<parameter=([^<>\n]{1,256})>"
_NEXT = rf"<parameter=|</function>|{CLOSE}"
_LINES_END = rf"\n?</parameter>[ \t]{{0,8}}\n\s{{0,8}}(?={_NEXT})|(?=</function>[ \t]{{0,8}}\n\s{{0,8}}{CLOSE})"
_INLINE_END = rf"</parameter>\s{{0,8}}(?={_NEXT})|(?=</function>\s{{0,8}}{CLOSE})"

QWEN_XML_CALLS = ElementCalls(
    openers=(OPEN,),
    close=CLOSE,
    markers=(OPEN, CLOSE),
    lead="\n\n",
    call=re.compile(r"\s*<function=([^<>\n]{1,256})>"),
    argument=re.compile(rf"\s*{_PARAMETER}"),
    call_end=re.compile(r"\s*</function>\s*"),
    value_head=re.compile(_PARAMETER),
    value_end=re.compile(_INLINE_END),
    end_in_lines=re.compile(_LINES_END),
    value_close="\n</parameter>",
    argument_head=f"<parameter={NAME}>\n",
    argument_tail="\n</parameter>\n",
    never=r"<\/(parameter|function)>",
    spelling=CallSpelling(
        head=f"{OPEN}\n<function={NAME}>\n", tail=f"</function>\n{CLOSE}", between="\n", names=PLAIN_NAME
    ),
)
