"""MiniMax-M2's calls: one `<minimax:tool_call>` block of all calls, each an `<invoke name="…">` with its parameters.

A parameter is bare text, typed by the tool's schema. Only the block's two markers are tokens of their own. The template
has a line break before a block, too.

Source: the chat template of MiniMax-M2.7.
"""

import re

from stenograph.text.call_syntax import NAME, PLAIN_NAME, CallSpelling
from stenograph.text.element_calls import ElementCalls, value_end

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"

_INVOKE, _INVOKE_CLOSE = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_CLOSE = "<parameter name=", "</parameter>"
_HEAD = rf'{_PARAMETER}"([^<>\n]{{1,256}})">'

MINIMAX_CALLS = ElementCalls(
    openers=(OPEN,),
    close=CLOSE,
    markers=(OPEN, CLOSE),
    lead="\n",
    call=re.compile(rf'\s*{_INVOKE}"([^"<>\n]+)">'),
    argument=re.compile(rf"\s*{_HEAD}"),
    call_end=re.compile(rf"\s*{_INVOKE_CLOSE}\s*"),
    value_head=re.compile(_HEAD),
    value_end=value_end(_PARAMETER_CLOSE, (_PARAMETER,), (_INVOKE_CLOSE, _INVOKE), (_INVOKE_CLOSE, CLOSE)),
    value_close=_PARAMETER_CLOSE,
    argument_head=f'{_PARAMETER}"{NAME}">',
    argument_tail=f"{_PARAMETER_CLOSE}\n",
    spelling=CallSpelling(
        begin=f"\n{OPEN}\n",
        head=f'{_INVOKE}"{NAME}">\n',
        tail=f"{_INVOKE_CLOSE}\n",
        end=CLOSE,
        names=PLAIN_NAME,
    ),
)
