"""QwQ: Qwen2.5's ChatML and Hermes calls; every prompt opens the reasoning, which the stock template drops later.

The stock template writes no reasoning: of a reply's text it drops all up to `</think>`, unless it is the last message.
Edited, every reply is written once and for all with the block that its prompt began, an empty one where it has no
reasoning, and a first call without text before it follows that block as text would.

Source: the chat template and the tokenizer in the files of QwQ-32B.
"""

from stenograph.text.family import Edit, Family, Signs

_DROPS = "message.content.split('</think>')[-1].lstrip('\\n')"
_PROMPT = "assistant\\n<think>\\n' }}"
_HEAD = "{{- '<|im_start|>' + message.role }}"
_BLOCK = "'\\n<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n'"
_FIRST_CALL = '{{- \'\\n<tool_call>\\n{"name": "\' }}'

QWQ = Family(
    name="qwq",
    summary="QwQ: every prompt opens the reasoning",
    signs=Signs(
        tokens=("<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "</think>"),
        template=(_DROPS, _PROMPT, "<tool_response>"),
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
