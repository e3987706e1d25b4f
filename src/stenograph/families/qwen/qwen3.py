"""Qwen3 and its Thinking and Instruct variants: ChatML, Hermes calls, reasoning in `<think>`.

The stock template drops the reasoning of replies before the last user message, and writes an empty block of it into
the last reply: it rewrites history. With its two conditions edited, a reply is written once and for all as it was
sampled: with its reasoning; without any, with the empty block only where the prompt writes that block itself, under
`enable_thinking: false`. Conversations without reasoning are written as by the stock template, byte by byte.

Source: the chat templates in the models' own files.
"""

from stenograph.text.family import Edit, Family, Signs

_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "</think>")
_IS_LATE = "loop.index0 > ns.last_query_index"
_HAS_BLOCK = "loop.last or (not loop.last and reasoning_content)"
_THINKING_PROMPT = "assistant\\n<think>\\n' }}"

QWEN3 = Family(
    name="qwen3",
    summary="Qwen3, thinking or not",
    signs=Signs(tokens=_TOKENS, template=(_IS_LATE, _HAS_BLOCK), not_template=(_THINKING_PROMPT, "<function=")),
    edits=(
        Edit(old=_IS_LATE, new="true"),
        Edit(old=_HAS_BLOCK, new="reasoning_content or (enable_thinking is defined and enable_thinking is false)"),
    ),
    tools_before_turns=True,
)

QWEN3_THINKING = Family(
    name="qwen3-thinking",
    summary="Qwen3-Thinking-2507 and Qwen3-Next-Thinking: every prompt opens the reasoning",
    signs=Signs(tokens=_TOKENS, template=(_IS_LATE, _HAS_BLOCK, _THINKING_PROMPT), not_template=("<function=",)),
    edits=(Edit(old=_IS_LATE, new="true"), Edit(old=_HAS_BLOCK, new="true")),
    tools_before_turns=True,
)
