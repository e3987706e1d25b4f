"""GLM's calls: a name, then keys and values in tags, `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…`.

A value is bare text, typed by the tool's schema. GLM-4.5 and 4.6 write each piece on a line of its own, later models
write none.

Source: the chat templates of GLM-4.5V, GLM-4.6V, GLM-4.7-Flash and GLM-5.
"""

import re

from stenograph.text.call_syntax import NAME, PLAIN_NAME, CallSpelling
from stenograph.text.element_calls import ElementCalls, value_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE, VALUE_CLOSE = "<arg_value>", "</arg_value>"


def glm_calls(gap: str) -> ElementCalls:
    """The syntax. `gap` is what the template writes between content and a block, and between a block's pieces."""
    return ElementCalls(
        openers=(OPEN,),
        close=CLOSE,
        markers=(OPEN, CLOSE, KEY, KEY_CLOSE, VALUE, VALUE_CLOSE),
        lead=gap,
        call=re.compile(rf"\s*({PLAIN_NAME.like})\s*(?={KEY}|{CLOSE}\n\Z)"),
        argument=re.compile(rf"\s*{KEY}([^<>\n]+){KEY_CLOSE}\s*{VALUE}"),
        value_head=re.compile(VALUE),
        value_end=value_end(VALUE_CLOSE, (KEY,), (CLOSE,)),
        value_close=VALUE_CLOSE,
        argument_head=f"{KEY}{NAME}{KEY_CLOSE}{gap}{VALUE}",
        argument_tail=f"{VALUE_CLOSE}{gap}",
        spelling=CallSpelling(head=f"{OPEN}{NAME}{gap}", tail=CLOSE, between=gap, names=PLAIN_NAME),
    )
