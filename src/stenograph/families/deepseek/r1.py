"""DeepSeek R1, R1-0528, and the distills of Qwen and Llama: the models' own templates, with the reasoning written.

Stock, none is in the history: it drops an earlier reply's. R1's prompt opens the reasoning, and its template misplaces
the marks around calls as V3's does (`deepseek`); R1-0528's prompt opens none; the distills have no tokens for calls.
Edited, a reply is written as it was sampled, wherever it stands: with its reasoning, and where the prompt has opened
some, with a block of it, though it be empty.

Source: the chat templates in the models' own files.
"""

from stenograph.families.deepseek.calls import BLOCK_OPEN, CALL_OPEN, FENCED_CALLS
from stenograph.families.deepseek.v3 import FENCED_TOOL_LIST, TOKENS
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_RESULTS_CLOSE = "<｜tool▁outputs▁end｜>"
_REASONING = "'<think>\\n' + (message['reasoning_content'] or '') + '\\n</think>\\n\\n'"
_REASONING_IF_ANY = "(" + _REASONING + " if message['reasoning_content'] else '')"

_OPENED = "{{'<｜Assistant｜><think>\\n'}}"
_DROPPED = (
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content"
)
_WRITTEN = Edit(old=_DROPPED, new="{{'<｜Assistant｜>' + " + _REASONING + " + content")

_0528_USER = "'<｜User｜>' + content + '<｜Assistant｜>'}}"
_0528_DROPPED = (
    "{%- if message['role'] == 'assistant' %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{% endif %}"
)
_0528_WRITTEN = Edit(
    old=_0528_DROPPED,
    new=(
        "{%- if message['role'] == 'assistant' %}"
        "{% set content = ('' if ns.is_last_user or ns.is_tool else '<｜Assistant｜>') + "
        + _REASONING_IF_ANY
        + " + (content or '') %}{% endif %}"
    ),
)
"""A reply that follows a reply gets the mark that a prompt has there."""

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
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=FENCED_CALLS),
)

DEEPSEEK_R1_DISTILL = Family(
    name="deepseek-r1-distill",
    summary="DeepSeek R1's distills of Qwen and Llama",
    signs=Signs(tokens=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), template=(_OPENED, _DROPPED)),
    edits=(_WRITTEN,),
    shows_tools=False,
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=None),
)

DEEPSEEK_R1_0528 = Family(
    name="deepseek-r1-0528",
    summary="DeepSeek R1-0528",
    signs=Signs(tokens=(*TOKENS, "<think>", "</think>"), template=(_0528_USER, _0528_DROPPED, _SYSTEM)),
    edits=(_0528_WRITTEN, Edit(old=_SYSTEM, new=_SYSTEM + FENCED_TOOL_LIST)),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=FENCED_CALLS),
)

DEEPSEEK_R1_0528_DISTILL = Family(
    name="deepseek-r1-0528-distill",
    summary="DeepSeek R1-0528's distill of Qwen3",
    signs=Signs(tokens=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), template=(_0528_USER, _0528_DROPPED)),
    edits=(_0528_WRITTEN,),
    shows_tools=False,
    syntax=ReplySyntax(reasoning=ReasoningMarks(), calls=None),
)
