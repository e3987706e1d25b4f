"""Qwen2.5 Instruct: ChatML with a default system message and Hermes calls; its template is append-only as it stands.

Source: the chat template in the model's own files. It has no frame for a developer, whose messages are shown as system
messages, and no reasoning.
"""

from stenograph.text.family import Family, Signs
from stenograph.text.reply_syntax import ReplySyntax

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
