"""DeepSeek V3 and V3.1: the models' own templates, which show no tool list and misplace the marks around calls.

V3's template closes a block of calls only where there are exactly two, opens a block of calls and one of results only
once in a conversation, writes a call without the `<｜tool▁outputs▁end｜>` that it was asked for with, and leaves calls
out beside content. V3.1's shows no reasoning. Edited, each turn is written alike wherever it stands, and the tool list
stands after the system prompt, in words of ours. Conversations without tools and, of V3.1, without `thinking`, are
written as by the stock templates.

Source: the chat templates in the models' own files.
"""

from stenograph.families.deepseek.calls import (
    BLOCK_CLOSE,
    BLOCK_OPEN,
    CALL_CLOSE,
    CALL_OPEN,
    CALLS,
    FENCED_CALLS,
    SEPARATOR,
)
from stenograph.text.family import Edit, Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

THINK_MARKS = ReasoningMarks(after_open="", before_close="", after_close="")
"""DeepSeek's templates write no white space around reasoning."""

TOKENS = ("<｜User｜>", "<｜Assistant｜>", BLOCK_OPEN, SEPARATOR)
_EOS = "<｜end▁of▁sentence｜>"
_RESULTS_CLOSE = "<｜tool▁outputs▁end｜>"


def _tool_list(example: str) -> str:
    """Jinja to write the tools after the system prompt, and how a call is spelled."""
    intro = "## Tools\\n\\nThese functions can be called; each line describes one in JSON:"
    calling = "To call functions, end the reply with one block of calls, which looks like this:"
    return (
        "{%- if tools %}{{ ('\\n\\n' if ns.system_prompt else '') + '" + intro + "' }}"
        "{%- for tool in tools %}{{ '\\n' + (tool['function'] | tojson) }}{%- endfor %}"
        "{{ '\\n\\n" + calling + "\\n" + BLOCK_OPEN + example + BLOCK_CLOSE + "' }}{%- endif %}"
    )


FENCED_TOOL_LIST = _tool_list(
    CALL_OPEN + "function" + SEPARATOR + 'NAME\\n```json\\n{"ARGUMENT": "VALUE"}\\n```' + CALL_CLOSE
)

_V3_HAS_CALLS = "message['role'] == 'assistant' and message['content'] is none %}"
_V3_HAS_NONE = "message['role'] == 'assistant' and message['content'] is not none %}"
_V3_EACH_CALL = "{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls']%}"
_V3_FIRST_CALL = "{%- if not ns.is_first %}{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'"
_V3_CLOSE = "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}"
_V3_FIRST_RESULT = "{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}"
_V3_NO_LONGER_FIRST = "{%- set ns.is_output_first = false %}"
_V3_SYSTEM = "{{bos_token}}{{ns.system_prompt}}"

DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    summary="DeepSeek V3",
    signs=Signs(
        tokens=TOKENS,
        template=(_V3_HAS_CALLS, _V3_FIRST_CALL, _V3_FIRST_RESULT),
        not_template=("think>",),
    ),
    edits=(
        Edit(
            old=_V3_SYSTEM,
            new=_V3_SYSTEM + FENCED_TOOL_LIST,
        ),
        Edit(old=_V3_HAS_CALLS, new="message['role'] == 'assistant' and message['tool_calls'] %}"),
        Edit(old=_V3_HAS_NONE, new="message['role'] == 'assistant' and not message['tool_calls'] %}"),
        Edit(
            old=_V3_EACH_CALL,
            new=(
                "{{ ('" + _RESULTS_CLOSE + "' if ns.is_tool else '<｜Assistant｜>') + (message['content'] or '')"
                " + '" + BLOCK_OPEN + "' }}" + _V3_EACH_CALL
            ),
        ),
        Edit(old=_V3_FIRST_CALL, new="{%- if loop.first %}{{'" + CALL_OPEN + "'"),
        Edit(old=_V3_CLOSE, new="{%- endif %}{%- endfor %}{{'" + BLOCK_CLOSE + _EOS + "'}}"),
        Edit(old=_V3_FIRST_RESULT, new="{%- if not ns.is_tool %}"),
        Edit(old=_V3_NO_LONGER_FIRST, new="{%- set ns.is_tool = true -%}"),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=None, calls=FENCED_CALLS),
)

_V31_SYSTEM = "{{ bos_token }}{{ ns.system_prompt }}"
_V31_CALLS_AFTER_USER = "{{'<｜Assistant｜></think>'}}"
_V31_TEXT_AFTER_USER = "message['prefix'] is defined and message['prefix'] and thinking %}{{'<think>'}}"
_V31_TEXT_AFTER_RESULTS = "{%- if ns.is_tool %}{{message['content']"
_V31_FIRST_CALL = "{%- set ns.is_first = false %}{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls'] %}"
_REASONING = "'<think>' + (message['reasoning_content'] or '') + '</think>'"
_REASONING_IF_ANY = "(" + _REASONING + " if thinking and message['reasoning_content'] else '')"

DEEPSEEK_V3_1 = Family(
    name="deepseek-v3.1",
    summary="DeepSeek V3.1, thinking or not",
    signs=Signs(
        tokens=(*TOKENS, "<think>", "</think>"),
        template=(_V31_CALLS_AFTER_USER, _V31_TEXT_AFTER_USER, _V31_TEXT_AFTER_RESULTS),
    ),
    edits=(
        Edit(
            old=_V31_SYSTEM,
            new=_V31_SYSTEM + _tool_list(CALL_OPEN + "NAME" + SEPARATOR + '{"ARGUMENT": "VALUE"}' + CALL_CLOSE),
        ),
        Edit(
            old=_V31_CALLS_AFTER_USER,
            new="{{ '<｜Assistant｜>' + (" + _REASONING + " if thinking else '</think>') }}",
        ),
        Edit(old=_V31_TEXT_AFTER_USER, new="thinking %}{{ " + _REASONING + " }}"),
        Edit(old=_V31_TEXT_AFTER_RESULTS, new="{%- if ns.is_tool %}{{ " + _REASONING_IF_ANY + " + message['content']"),
        Edit(
            old=_V31_FIRST_CALL,
            new="{%- if ns.is_tool %}{{ " + _REASONING_IF_ANY + " }}{%- endif %}" + _V31_FIRST_CALL,
        ),
    ),
    tools_before_turns=True,
    syntax=ReplySyntax(reasoning=THINK_MARKS, calls=CALLS),
)
