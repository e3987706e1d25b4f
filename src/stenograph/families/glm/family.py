"""GLM-4.5 to GLM-5: `<|user|>` and `<|observation|>` end a reply and open what follows it; calls in `<arg_key>` tags.

A template of theirs closes no turn, so a reply's stop token is the next message's opener, or is left out for it. The
stock templates drop the reasoning of replies before the last user message. GLM-4.7 and later have an argument against
that, `clear_thinking`, which is fixed here; GLM-4.5 and 4.6 have the condition edited.

From GLM-4.7 on the prompt opens the reasoning, and a model may close it at once. So that such a reply is written as it
was sampled, a reply without reasoning has an empty block, unless `enable_thinking` is false: then the prompt closes
the block, and so does every reply. GLM-5.2 writes it so as it stands.

Source: the chat templates and tokenizers in the models' own files.
"""

from collections.abc import Mapping

from stenograph.families.glm.calls import glm_calls
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")
_TOKENS = (*_STOPS, "<|assistant|>", "<think>", "</think>", "<tool_call>", "<arg_key>")
_CLEARS = "clear_thinking"
_KEEP: Mapping[str, object] = {_CLEARS: False}
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
    summary="GLM-4.5 and GLM-4.6, and their V",
    signs=Signs(tokens=_TOKENS, template=("<arg_key>", _IS_LATE), not_template=(_CLEARS,)),
    edits=(
        Edit(old=_IS_LATE, new="{%- if reasoning_content -%}"),
        # The prompt of the V has a line break after the empty block; so has a reply without text, which has none else.
        Edit(old=_HAS_TEXT, new=f"{{%- if content.strip() or ({_NOT_THINKING} and not m.tool_calls) -%}}"),
    ),
    tools_before_turns=True,
    syntax=_IN_LINES,
    opening_stops=_STOPS,
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
