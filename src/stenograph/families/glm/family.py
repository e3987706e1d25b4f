"""GLM-4.5 to GLM-5: `<|user|>` and `<|observation|>` end a reply and open what follows it; calls in `<arg_key>` tags.

A template of theirs closes no turn, so a reply's stop token is the next message's opener, or is left out for it. The
stock templates drop the reasoning of replies before the last user message. GLM-4.7 and later have an argument against
it, `clear_thinking`, fixed here; GLM-4.5 and 4.6 have the condition edited.

From GLM-4.7 on the prompt opens the reasoning, and a model may close it at once. So that such a reply is written as it
was sampled, a reply without reasoning has an empty block, unless `enable_thinking` is false: then the prompt closes
the block, and so does every reply. GLM-5.2 writes it so as it stands.

Their V models show an image as `<|image|>` between its own marks, the parts of a user's message on a line each; an
engine repeats the token in the middle. Only GLM-4.6V's template shows images of tools.

GLM's calls: a name, then keys and values in tags, `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…`.

A value is bare text, typed by the tool's schema. GLM-4.5 and 4.6 write each piece on a line of its own, later models
write none.

Source: the chat templates and tokenizers in the models' own files.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from stenograph.text.call_syntax import NAME, PLAIN_NAME, CallSpelling
from stenograph.text.element_calls import ElementCalls, value_end
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

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


_STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")
_TOKENS = (*_STOPS, "<|assistant|>", "<think>", "</think>", "<tool_call>", "<arg_key>")
_CLEARS = "clear_thinking"
_KEEP: Mapping[str, object] = {_CLEARS: False}
IMAGE = "<|image|>"
_IMAGE = f"<|begin_of_image|>{IMAGE}<|end_of_image|>"
_IS_LATE = "{%- if loop.index0 > ns.last_user_index and reasoning_content -%}"
_HAS_TEXT = "{%- if content.strip() -%}"
_NOT_THINKING = "enable_thinking is defined and not enable_thinking"
_CLOSED_BLOCK = "{{ '</think>' }}"
_IS_LATE_WITHOUT = "loop.index0 > ns.last_user_index and not (enable_thinking is defined and not enable_thinking)"
_IS_EARLY_WITHOUT = "loop.index0 < ns.last_user_index and ns.has_thinking"

_IN_LINES = ReplySyntax(
    reasoning=ReasoningMarks(lead="\n", after_open="", before_close="", after_close="\n"),
    calls=glm_calls("\n"),
)
_IN_ONE_LINE = ReplySyntax(
    reasoning=ReasoningMarks(after_open="", before_close="", after_close=""),
    calls=glm_calls(""),
)

GLM4_5 = Family(
    name="glm-4.5",
    summary="GLM-4.5 and GLM-4.6",
    signs=Signs(tokens=_TOKENS, template=("<arg_key>", _IS_LATE), not_template=(_CLEARS, _IMAGE)),
    edits=(
        Edit(old=_IS_LATE, new="{%- if reasoning_content -%}"),
        # The prompt of the V has a line break after the empty block; so has a reply without text, which has none else.
        Edit(old=_HAS_TEXT, new=f"{{%- if content.strip() or ({_NOT_THINKING} and not m.tool_calls) -%}}"),
    ),
    tools_before_turns=True,
    syntax=_IN_LINES,
    opening_stops=_STOPS,
)

GLM4_5V = replace(
    GLM4_5,
    name="glm-4.5v",
    summary="GLM-4.5V, GLM-4.6V and GLM-4.6V-Flash",
    signs=Signs(tokens=(*_TOKENS, IMAGE), template=("<arg_key>", _IS_LATE, _IMAGE), not_template=(_CLEARS,)),
    image_placeholder=IMAGE,
)

GLM4_7 = Family(
    name="glm-4.7",
    summary="GLM-4.7, GLM-4.7-Flash and GLM-5",
    signs=Signs(tokens=_TOKENS, template=("<arg_key>", _CLEARS, _CLOSED_BLOCK), not_template=(_IS_EARLY_WITHOUT,)),
    edits=(Edit(old=_CLOSED_BLOCK, new=f"{{{{ '</think>' if {_NOT_THINKING} else '<think></think>' }}}}"),),
    fixed_kwargs=_KEEP,
    tools_before_turns=True,
    syntax=_IN_ONE_LINE,
    opening_stops=_STOPS,
)

GLM5_1 = Family(
    name="glm-5.1",
    summary="GLM-5.1",
    signs=Signs(tokens=_TOKENS, template=("<arg_key>", _CLEARS, _IS_EARLY_WITHOUT)),
    edits=(
        Edit(old=_IS_LATE_WITHOUT, new=f"not ({_NOT_THINKING})"),
        Edit(old=_IS_EARLY_WITHOUT, new="false"),
    ),
    fixed_kwargs=_KEEP,
    tools_before_turns=True,
    syntax=_IN_ONE_LINE,
    opening_stops=_STOPS,
)

GLM5_2 = Family(
    name="glm-5.2",
    summary="GLM-5.2",
    signs=Signs(tokens=_TOKENS, template=("<arg_key>", _CLEARS, "{{ '<think></think>' }}", "reasoning_effort")),
    fixed_kwargs=_KEEP,
    tools_before_turns=True,
    syntax=_IN_ONE_LINE,
    opening_stops=_STOPS,
)
