"""Qwen2.5, QwQ and Qwen3: ChatML and Hermes calls; reasoning in `<think>`, but for Qwen2.5.

Qwen2.5's template is append-only as it stands, and has a default system message. It has no frame for a developer: such
messages are shown as system messages.

Qwen3's stock template drops the reasoning of replies before the last user message, and writes an empty block of it into
the last reply: it rewrites history. With its two conditions edited, a reply is written once and for all as it was
sampled: with its reasoning; without any, with the empty block only where the prompt writes that block itself, under
`enable_thinking: false`. Conversations without reasoning are written as by the stock template, byte by byte.

QwQ's stock template writes no reasoning: of a reply's text it drops all up to `</think>`, unless it is the last
message. Edited, every reply is written once and for all with the block that its prompt began, an empty one where it has
no reasoning, and a first call without text before it follows that block as text would.

Source: the chat templates in the models' own files, and QwQ-32B's tokenizer.
"""

from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReplySyntax

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

QWEN2_5 = Family(
    name="qwen2.5",
    summary="Qwen2.5 Instruct and Coder",
    signs=Signs(
        tokens=("<|im_start|>", "<|im_end|>", "<tool_call>"),
        template=("You are Qwen, created by Alibaba Cloud.", "<tool_response>"),
        not_template=("<think>",),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=None),
)

_DROPS = "message.content.split('</think>')[-1].lstrip('\\n')"
_HEAD = "{{- '<|im_start|>' + message.role }}"
_BLOCK = "'\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n'"
_FIRST_CALL = '{{- \'\\n<tool_call>\\n{"name": "\' }}'

QWQ = Family(
    name="qwq",
    summary="QwQ: every prompt opens the reasoning",
    signs=Signs(
        tokens=_TOKENS,
        template=(_DROPS, _THINKING_PROMPT, "<tool_response>"),
        not_template=("last_query_index", "<function="),
    ),
    edits=(
        # One branch for replies with calls and without.
        Edit(old='message.role == "assistant" and not message.tool_calls', new="false"),
        Edit(old=_HEAD, new=f"{{{{- '<|im_start|>' + message.role + {_BLOCK} }}}}"),
        Edit(old="{{- '\\n' + content }}", new="{{- message.content }}"),
        Edit(old="for tool_call in message.tool_calls %}", new="for tool_call in message.tool_calls or [] %}"),
        Edit(
            old=_FIRST_CALL,
            new="{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}"
            + _FIRST_CALL.replace("'\\n<tool_call>", "'<tool_call>", 1),
        ),
    ),
    tools_before_turns=True,
)
