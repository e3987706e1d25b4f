"""Qwen3.5 and Qwen3-Coder: ChatML with XML calls; Qwen3.5 reasons in `<think>`, opened or closed by every prompt.

Qwen3.5's stock template writes a reply's block of reasoning only after the last user message: it rewrites history. With
this condition edited, every reply has the block begun by its prompt. If all replies of a conversation come after the
last user message, the stock template writes the same, byte by byte. Qwen3.6 and 3.8 are as Qwen3.5; they have an
argument to keep the blocks, too, needless with the edit.

Source: the chat templates of Qwen3.5, 3.6 and 3.8. Qwen3-Coder's calls are the same; of its template nothing is
assumed.
"""

from stenograph.families.qwen.vision import IMAGE_PAD, UNNUMBERED
from stenograph.families.qwen.xml_calls import QWEN_XML_CALLS
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_CALLS = ("<function=", "<parameter=", "</parameter>")
_IS_LATE = "loop.index0 > ns.last_query_index"

QWEN3_5 = Family(
    name="qwen3.5",
    summary="Qwen3.5, Qwen3.6 and Qwen3.8, thinking or not",
    signs=Signs(tokens=(*_TOKENS, "<think>", "</think>"), template=(*_CALLS, _IS_LATE, "<think>")),
    edits=(Edit(old=_IS_LATE, new="true"),),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=QWEN_XML_CALLS),
    image_placeholder=IMAGE_PAD,
    fixed_kwargs=UNNUMBERED,
)

QWEN3_CODER = Family(
    name="qwen3-coder",
    summary="Qwen3-Coder: no reasoning",
    signs=Signs(tokens=_TOKENS, template=_CALLS, not_template=("<think>",)),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=None, calls=QWEN_XML_CALLS),
)
