"""DeepSeek R1 and its distills of Qwen and Llama: the models' own templates, whose prompt opens the reasoning.

Stock, none is in the history: it drops an earlier reply's, and writes no block where the prompt has opened one. R1's
template misplaces the marks around calls as V3's does (`deepseek`); the distills have no tokens for calls. Edited, a
reply is written as it was sampled, wherever it stands, with a block of reasoning, though it be empty; after results,
where the prompt opens none, only if there is any.

Source: the chat templates in the models' own files.
"""

from stenograph.render.families.deepseek import FENCED_TOOL_LIST, TOKENS
from stenograph.render.families.family import Edit, Family, Signs
from stenograph.render.parsers.deepseek_calls import BLOCK_OPEN, CALL_OPEN, DeepSeekCalls
from stenograph.render.parsers.reply_syntax import ReasoningMarks, ReplySyntax

_RESULTS_CLOSE = "<｜tool▁outputs▁end｜>"
_REASONING = "'<think>\\n' + (message['reasoning_content'] or '') + '\\n</think>\\n\\n'"
_REASONING_IF_ANY = "(" + _REASONING + " if message['reasoning_content'] else '')"

_OPENED = "{{'<｜Assistant｜><think>\\n'}}"
_DROPPED = (
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content"
)
_WRITTEN = Edit(old=_DROPPED, new="{{'<｜Assistant｜>' + " + _REASONING + " + content")

_SYSTEM = "{{ bos_token }}{{ ns.system_prompt }}"
_HAS_CALLS = (
    "'tool_calls' in message %}{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls'] %}"
    "{%- if not ns.is_first %}"
)
_FIRST_BARE = "{{'<｜Assistant｜>" + BLOCK_OPEN + CALL_OPEN + "'"
_FIRST_BESIDE_TEXT = "{{'<｜Assistant｜>' + message['content'] + '" + BLOCK_OPEN + CALL_OPEN + "'"
_AFTER_RESULTS = "{{'" + _RESULTS_CLOSE + "' + message['content']"
_FIRST_RESULT = "{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}"
_NO_LONGER_FIRST = "{%- set ns.is_output_first = false %}"

DEEPSEEK_R1 = Family(
    name="deepseek-r1",
    summary="DeepSeek R1",
    signs=Signs(tokens=(*TOKENS, "<think>", "</think>"), template=(_OPENED, _HAS_CALLS, _DROPPED)),
    edits=(
        _WRITTEN,
        Edit(old=_SYSTEM, new=_SYSTEM + FENCED_TOOL_LIST),
        Edit(
            old=_HAS_CALLS,
            new=(
                "'tool_calls' in message %}"
                "{{ ('"
                + _RESULTS_CLOSE
                + "' + "
                + _REASONING_IF_ANY
                + " if ns.is_tool else '<｜Assistant｜>' + "
                + _REASONING
                + ") + (message['content'] or '') + '"
                + BLOCK_OPEN
                + "' }}"
                "{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls'] %}{%- if loop.first %}"
            ),
        ),
        Edit(old=_FIRST_BARE, new="{{'" + CALL_OPEN + "'"),
        Edit(old=_FIRST_BESIDE_TEXT, new="{{'" + CALL_OPEN + "'"),
        Edit(
            old=_AFTER_RESULTS,
            new="{{'" + _RESULTS_CLOSE + "' + " + _REASONING_IF_ANY + " + message['content']",
        ),
        Edit(old=_FIRST_RESULT, new="{%- if not ns.is_tool %}"),
        Edit(old=_NO_LONGER_FIRST, new="{%- set ns.is_tool = true -%}"),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=DeepSeekCalls(fenced=True)),
)

DEEPSEEK_R1_DISTILL = Family(
    name="deepseek-r1-distill",
    summary="DeepSeek R1's distills of Qwen and Llama",
    signs=Signs(tokens=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), template=(_OPENED, _DROPPED)),
    edits=(_WRITTEN,),
    shows_tools=False,
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=None),
)
